"""Row-parallel linear layer: every rank has its own inputs and a partial sum of all outputs."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from . import linear
from .compare import assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, at_least_two, checked, map_tiles, no_implementation
from .weight import Weight, dequantize, split_input

CELLS = (
    Cell("o_proj at TP8", dict(T=8, N=6144, K=1024, S=1, format="mxfp8", quant=True)),
    Cell("o_proj at TP1, small", dict(T=3, N=128, K=512, S=8, format="mxfp8", quant=True)),
    Cell("dense, rows past one tile", dict(T=9, N=64, K=96, S=4, format="dense", quant=False)),
)


@checked
def row_linear(
    x: Float[Array, "T K"],
    weight: Weight,
    *,
    slices: int,
    quantize_input: bool,
    impl: Impl = REFERENCE,
) -> Float32[Array, "T S N"]:
    """out[t, s] = x[t, slice s] @ weight[:, slice s]^T: partial sums over runs of the input.

    The caller adds them over slices and ranks in a fixed order (`collectives.sum_slices`).

    Args:
      x: input rows of this rank.
      weight: [N, K] of this rank, dense or MXFP8.
      slices: runs that K is cut into; divides K.
      quantize_input: quantise x per row and 32 channels first (MXFP8 weights only).
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
      ValueError: `slices` does not divide K.
      NotImplementedError: the weight is NVFP4; those belong to `moe_experts`.
    """
    if weight.format == "nvfp4":
        raise NotImplementedError(
            "row_linear takes dense or MXFP8 weights; NVFP4 is for moe_experts"
        )
    match impl.kind:
        case Kind.REFERENCE:
            return reference(x, weight, slices=slices, quantize_input=quantize_input)
        case _:
            raise no_implementation("row_linear", impl)


def sliced_product(rows: Array, values: Array) -> Array:
    """[T, K] rows against [S, N, k] values: float32 [T, S, N]."""
    slices, _, width = values.shape
    # A batch of one product takes other code than a batch of several, as one rank of many has.
    cut = at_least_two(rows.reshape(rows.shape[0], slices, width), axis=1)  # T S k
    out = linear.product("tsk,snk->stn", cut, at_least_two(values, axis=0))
    return jnp.moveaxis(out[:slices], 0, 1)


def reference(x: Array, weight: Weight, *, slices: int, quantize_input: bool) -> Array:
    """The specification."""
    values = split_input(dequantize(weight, x.dtype), slices)  # S N k
    return map_tiles(
        lambda rows: sliced_product(linear.prepare(rows, weight, quantize_input), values), x
    )


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `row_linear` for one cell."""
    return linear.make_inputs(spec, key) | dict(slices=spec["S"])


def compare(out: Array, ref: Array) -> None:
    """16 ulp: products are summed in another order, as in `linear`."""
    assert_ulp(out, ref, 16, "row_linear")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """The weight once, rows in, one sum out (a kernel adds its slices before it writes)."""
    return linear.bytes_moved(spec)
