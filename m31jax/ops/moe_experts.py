"""Routed experts: both products of each row's experts, the activation and the weighted sum."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from .. import nvfp4
from . import cells, linear, row_linear
from .compare import assert_ulp
from .mlp import SwiGLU
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation
from .weight import Weight, dequantize, split_input

CELLS = (
    Cell("NVFP4, one row", dict(T=1, D=256, F=128, E=8, X=4, S=8, format="nvfp4", quant=False)),
    Cell("NVFP4, vendor rule", dict(T=8, D=256, F=128, E=16, X=4, S=8, format="nvfp4", quant=True)),
    Cell("MXFP8", dict(T=3, D=128, F=64, E=4, X=2, S=2, format="mxfp8", quant=True)),
    Cell("dense, padding row", dict(T=11, D=64, F=32, E=8, X=2, S=4, format="dense", quant=False)),
)

_FC1_RANGE = 2688.0  # 448 * 6, the largest product of an E4M3 scale and an E2M1 code
_FC2_SCALE = 16.0
_SMALLEST_AMAX = 2.0**-100


@checked
def moe_experts(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T X"],
    weights: Float32[Array, "T X"],
    gate_up: Weight,
    down: Weight,
    *,
    swiglu: SwiGLU,
    slices: int,
    quantize_input: bool,
    impl: Impl = REFERENCE,
) -> Float32[Array, "T S D"]:
    """Partial sums of sum_x weights[t, x] * expert ids[t, x] (x[t]) over `slices` runs of F.

    Each row adds its experts in ascending id order, whatever other rows chose.

    Args:
      x: input rows, the same on every rank.
      ids: chosen experts, ascending; -1 (padding) computes nothing and gives zeros.
      weights: of each chosen expert, the routed scaling factor included.
      gate_up: [E 2 F D] of this rank: gate, then up. down: [E D F] of this rank. One format.
      swiglu: alpha, limit, beta.
      slices: runs that F is cut into; divides F.
      quantize_input: quantise both products' inputs. NVFP4 experts: FC1 per row with the outer
        scale 2688/amax, FC2 with the fixed outer scale 16. MXFP8 experts: per row and 32 channels.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
      ValueError: `slices` does not divide F.
    Source: MiniMax-M3.1 numerics note for the NVFP4 quantisers.
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(
                x,
                ids,
                weights,
                gate_up,
                down,
                swiglu=swiglu,
                slices=slices,
                quantize_input=quantize_input,
            )
        case _:
            raise no_implementation("moe_experts", impl)


def _codes(values: Array, outer: float) -> Array:
    """E2M1 value times stored scale of each group of 16 along the last axis.

    scale = e4m3(amax / 6 * outer), code = e2m1(value / (scale / outer)); `outer` is a power of two,
    so that no product here rounds. A group whose scale rounds to 0 is all zeros.
    """
    groups = values.reshape(*values.shape[:-1], -1, nvfp4.GROUP)
    amax = jnp.abs(groups).max(axis=-1, keepdims=True)
    scale = nvfp4.group_scale(amax * outer).astype(jnp.float32)
    codes = nvfp4.e2m1_decode(nvfp4.e2m1_encode(groups, scale / outer))
    return (codes * scale).reshape(values.shape)


def _to_bfloat16(x: Array) -> Array:
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def quantize_fc1(x: Array) -> tuple[Array, Array]:
    """FC1's input rule: (code values [T, D], factor [T, 1] of the product before the activation).

    A row with nothing above 2^-100 counts as zero: 2688 / amax could overflow, and infinity times
    one of its zeros is NaN.
    """
    wide = x.astype(jnp.float32)
    amax = jnp.abs(wide).max(axis=-1, keepdims=True)
    amax = jnp.where(amax < _SMALLEST_AMAX, 0.0, amax)
    scaled = _to_bfloat16(wide * (_FC1_RANGE / jnp.where(amax == 0.0, 1.0, amax)))
    return _codes(scaled, 1.0), _to_bfloat16(nvfp4.divide(amax, _FC1_RANGE))


def quantize_fc2(z: Array) -> Array:
    """FC2's input rule, fixed outer scale 16: the values that the product sees, 1/16 included."""
    return _codes(z.astype(jnp.float32), _FC2_SCALE) / _FC2_SCALE


def reference(
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: Weight,
    down: Weight,
    *,
    swiglu: SwiGLU,
    slices: int,
    quantize_input: bool,
) -> Array:
    """The specification: one expert after the other, only those that some row chose."""
    is_vendor = quantize_input and gate_up.format == "nvfp4"
    if is_vendor:
        inputs, factor = map_tiles(quantize_fc1, x)
        inputs = inputs.astype(x.dtype)
    else:
        inputs = map_tiles(lambda rows: linear.prepare(rows, gate_up, quantize_input), x)
        factor = jnp.ones((x.shape[0], 1), jnp.float32)
    num_experts = gate_up.data.shape[0]
    used = (ids[..., None] == jnp.arange(num_experts)).any(axis=(0, 1))
    order = jnp.argsort(~used, stable=True)

    def expert(i: Array, total: Array) -> Array:
        e = order[i]
        w_in = dequantize(gate_up.take(e), x.dtype)  # 2 F D
        w_out = split_input(dequantize(down.take(e), x.dtype), slices)  # S D f

        def tile(rows: Array, factor: Array, share: Array) -> Array:
            both = linear.product("td,cfd->ctf", rows, w_in)
            both = (both * factor).astype(x.dtype).astype(jnp.float32)
            hidden = swiglu(both[0], both[1]).astype(x.dtype)
            if is_vendor:
                hidden = quantize_fc2(hidden).astype(x.dtype)
            else:
                hidden = linear.prepare(hidden, down, quantize_input)
            return share * row_linear.sliced_product(hidden, w_out)

        chosen = ids == e
        share = jnp.where(chosen, weights, 0.0).sum(axis=-1)[:, None, None]
        added = total + map_tiles(tile, inputs, factor, share)
        return jnp.where(chosen.any(axis=-1)[:, None, None], added, total)

    start = jnp.zeros((x.shape[0], slices, x.shape[1]), jnp.float32)
    return jax.lax.fori_loop(0, used.sum(), expert, start)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `moe_experts` for one cell; the last row of a dense cell is padding."""
    rng = cells.generator(key)
    experts, width, hidden, fmt = spec["E"], spec["D"], spec["F"], spec["format"]
    order = rng.permuted(np.tile(np.arange(experts), (spec["T"], 1)), axis=1)
    ids = np.sort(order[:, : spec["X"]], axis=1).astype(np.int32)
    if fmt == "dense":
        ids[-1] = -1
    return dict(
        x=4.0 * cells.normal(rng, (spec["T"], width)),
        ids=jnp.asarray(ids),
        weights=jnp.asarray(rng.random(ids.shape, np.float32)),
        gate_up=cells.weight(rng, (experts, 2, hidden, width), fmt),
        down=cells.weight(rng, (experts, width, hidden), fmt),
        swiglu=SwiGLU(1.702, 7.0, 1.0),
        slices=spec["S"],
        quantize_input=spec["quant"],
    )


def compare(out: Array, ref: Array) -> None:
    """64 ulp, as in `mlp`: two products in a row, inputs quantised from the same rounded values."""
    assert_ulp(out, ref, 64, "moe_experts")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """Three weights of each distinct expert (independent uniform routing), rows in and out."""
    per_weight = {"nvfp4": 9 / 16, "mxfp8": 33 / 32, "dense": 4}[spec["format"]]
    distinct = spec["E"] * (1 - (1 - spec["X"] / spec["E"]) ** spec["T"])
    return int(3 * distinct * spec["D"] * spec["F"] * per_weight) + 8 * spec["T"] * spec["D"]
