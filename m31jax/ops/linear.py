"""Column-parallel linear layer: every rank has all inputs and its own outputs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from . import cells
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation
from .weight import Weight, dequantize, mxfp8_activation

CELLS = (
    Cell("q_proj at TP8, one row", dict(T=1, N=1024, K=6144, format="mxfp8", quant=True)),
    Cell("q_proj at TP8, a verify", dict(T=8, N=1024, K=6144, format="mxfp8", quant=True)),
    Cell("weights only", dict(T=8, N=256, K=512, format="mxfp8", quant=False)),
    Cell("dense, rows past one tile", dict(T=19, N=96, K=128, format="dense", quant=False)),
)


@checked
def linear(
    x: Float[Array, "T K"],
    weight: Weight,
    *,
    quantize_input: bool,
    out_dtype: Any = None,
    impl: Impl = REFERENCE,
) -> Float[Array, "T N"]:
    """out = x @ weight^T with float32 sums, rounded once to `out_dtype`.

    Args:
      x: input rows, the same on every rank.
      weight: [N, K] of this rank, dense or MXFP8.
      quantize_input: quantise x per row and 32 channels first (MXFP8 weights only).
      out_dtype: x's dtype unless given.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
      NotImplementedError: the weight is NVFP4; those belong to `moe_experts`.
    """
    if weight.format == "nvfp4":
        raise NotImplementedError("linear takes dense or MXFP8 weights; NVFP4 is for moe_experts")
    match impl.kind:
        case Kind.REFERENCE:
            return reference(x, weight, quantize_input=quantize_input, out_dtype=out_dtype)
        case _:
            raise no_implementation("linear", impl)


def prepare(x: Array, weight: Weight, quantize_input: bool) -> Array:
    """The input rows as the product sees them; shared with the other linear ops."""
    return mxfp8_activation(x) if quantize_input and weight.format == "mxfp8" else x


def product(letters: str, x: Array, values: Array) -> Float32[Array, "..."]:
    """An einsum with float32 products and sums; shared with the other linear ops.

    A GPU's default for float32 operands is TF32, which keeps 10 bits of each.
    """
    return jnp.einsum(
        letters,
        x,
        values,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def reference(x: Array, weight: Weight, *, quantize_input: bool, out_dtype: Any = None) -> Array:
    """The specification."""
    values = dequantize(weight, x.dtype)  # N K

    def tile(rows: Array) -> Array:
        rows = prepare(rows, weight, quantize_input)
        out = product("tk,nk->tn", rows, values)
        return out.astype(x.dtype if out_dtype is None else out_dtype)

    return map_tiles(tile, x)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `linear` for one cell."""
    rng = cells.generator(key)
    return dict(
        x=cells.normal(rng, (spec["T"], spec["K"])),
        weight=cells.weight(rng, (spec["N"], spec["K"]), spec["format"]),
        quantize_input=spec["quant"],
    )


def compare(out: Array, ref: Array) -> None:
    """16 ulp: K products are summed in another order; errors grow with sqrt(K), K at most 12288."""
    assert_ulp(out, ref, 16, "linear")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """The weight once, rows in and out in float32."""
    per_weight = 33 / 32 if spec["format"] == "mxfp8" else 4
    return int(spec["N"] * spec["K"] * per_weight) + 4 * spec["T"] * (spec["N"] + spec["K"])
