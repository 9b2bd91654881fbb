"""Gated MLP with SwiGLU-OAI: the dense layers and the shared expert."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from . import cells, linear, row_linear
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation
from .weight import Weight, dequantize, split_input

CELLS = (
    Cell("shared expert at TP8", dict(T=8, D=6144, F=384, S=1, format="mxfp8", quant=True, gain=4)),
    Cell("every clamp crossed", dict(T=5, D=64, F=96, S=8, format="dense", quant=False, gain=40)),
)


class SwiGLU(NamedTuple):
    """The numbers of SwiGLU-OAI. All are required: plain SiLU defaults give fluent nonsense."""

    alpha: float
    limit: float
    beta: float

    def __call__(self, gate: Array, up: Array) -> Array:
        """y = g * sigmoid(alpha g) * (u + beta), g clamped above, u on both sides."""
        g = jnp.minimum(gate, self.limit)
        u = jnp.clip(up, -self.limit, self.limit)
        return g * jax.nn.sigmoid(self.alpha * g) * (u + self.beta)


@checked
def mlp(
    x: Float[Array, "T D"],
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    swiglu: SwiGLU,
    slices: int,
    quantize_input: bool,
    impl: Impl = REFERENCE,
) -> Float32[Array, "T S D"]:
    """Partial sums of down(swiglu(gate(x), up(x))) over `slices` runs of the intermediate axis.

    Args:
      x: input rows, the same on every rank.
      gate, up: [F, D] of this rank. down: [D, F] of this rank. Dense or MXFP8.
      swiglu: alpha, limit, beta.
      slices: runs that F is cut into; divides F.
      quantize_input: quantise both products' inputs per row and 32 channels (MXFP8 weights only).
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
      ValueError: `slices` does not divide F.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(
                x, gate, up, down, swiglu=swiglu, slices=slices, quantize_input=quantize_input
            )
        case _:
            raise no_implementation("mlp", impl)


def reference(
    x: Array,
    gate: Weight,
    up: Weight,
    down: Weight,
    *,
    swiglu: SwiGLU,
    slices: int,
    quantize_input: bool,
) -> Array:
    """The specification. Gate and up round their product to x's dtype, as a linear layer does."""
    w_gate, w_up = dequantize(gate, x.dtype), dequantize(up, x.dtype)  # F D
    w_down = split_input(dequantize(down, x.dtype), slices)  # S D f

    def tile(rows: Array) -> Array:
        rows = linear.prepare(rows, gate, quantize_input)
        g, u = (
            linear.product("td,fd->tf", rows, w).astype(x.dtype).astype(jnp.float32)
            for w in (w_gate, w_up)
        )
        hidden = swiglu(g, u).astype(x.dtype)
        return row_linear.sliced_product(linear.prepare(hidden, down, quantize_input), w_down)

    return map_tiles(tile, x)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `mlp` for one cell; `gain` makes pre-activations cross the clamp."""
    rng = cells.generator(key)
    width, hidden, fmt = spec["D"], spec["F"], spec["format"]
    return dict(
        x=spec["gain"] * cells.normal(rng, (spec["T"], width)),
        gate=cells.weight(rng, (hidden, width), fmt),
        up=cells.weight(rng, (hidden, width), fmt),
        down=cells.weight(rng, (width, hidden), fmt),
        swiglu=SwiGLU(1.702, 7.0, 1.0),
        slices=spec["S"],
        quantize_input=spec["quant"],
    )


def compare(out: Array, ref: Array) -> None:
    """64 ulp: two products in a row, each summed in another order.

    The quantised middle gets no allowance: one changed E4M3 code moves a sum by far more than this.
    Kernels quantise from the same rounded values.
    """
    assert_ulp(out, ref, 64, "mlp")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """Three weights once, rows in and out in float32."""
    per_weight = 33 / 32 if spec["format"] == "mxfp8" else 4
    return int(3 * spec["D"] * spec["F"] * per_weight) + 8 * spec["T"] * spec["D"]
