"""NVFP4: E2M1 codes, two a byte, with one E4M3 scale per 16 values and an outer float32 scale.

    value = e2m1(code) * (scale * weight_scale_2)

`weight_scale_2` multiplies when decoding. Checkpoints of the compressed-tensors kind store its
reciprocal, `weight_global_scale`. The KV cache uses an outer scale of 1.

Every function takes NumPy or JAX arrays of any leading shape, computes in float32 and gives the
same bits eagerly and under `jit`. Two habits of XLA (CPU, measured) stand in the way of that:

* `x / y` with a broadcast or constant y becomes `x * (1 / y)`, whose last bit differs in a third of
  all quotients. Ties are then rounded wrongly. Rounding here compares with thresholds that float32
  holds exactly, and where a quotient is needed `divide` takes it.
* float32 subnormals are read as zero. So they are zero here on every device: a value below 2^-126
  in magnitude counts as 0, and so does NaN.
"""

from typing import Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8

GROUP: Final = 16
"""Consecutive values of the last axis that share one scale."""

E2M1_MAX: Final = 6.0
E4M3_MAX: Final = 448.0
RANGE: Final = E4M3_MAX * E2M1_MAX
"""2688, the largest product of a scale and a code: the range that an outer scale maps amax to."""

_E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1_SIGNED: Final = np.concatenate([_E2M1, -_E2M1])
# Threshold i separates code i from i + 1. A tie goes to the even code: up where i is odd.
_E2M1_TIES: Final = (_E2M1[:-1] + _E2M1[1:]) / 2
# Values of one packed byte, low nibble first.
_PAIRS: Final = np.stack([_E2M1_SIGNED[np.arange(256) % 16], _E2M1_SIGNED[np.arange(256) // 16]], 1)

_SMALLEST_NORMAL: Final = 2.0**-126
# Outer scales are kept within a range where scale * weight_scale_2 is a normal float32 whatever the
# scale, so that a tensor of tiny or huge values still decodes to finite values.
_OUTER_MIN: Final = 2.0**-100
_AMAX_MAX: Final = 2.0**127


def _scale_thresholds() -> np.ndarray:
    """Smallest amax whose sixth rounds to E4M3 byte i or above, for i in 0..127.

    That of byte 127, which no amax rounds to, is NaN: nothing is at or above it.
    """
    e4m3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ties = 6 * (e4m3[:-1] + e4m3[1:]) / 2  # exact: 5 significant bits times 6
    goes_down = np.arange(126) % 2 == 0  # a tie between an even byte and the next
    smallest = np.where(goes_down, np.nextafter(ties, np.float32(np.inf)), ties)
    return np.concatenate([[0], smallest, [np.nan]]).astype(np.float32)


_SCALE_THRESHOLDS: Final = _scale_thresholds()


def divide(x: Array, y: Array | float) -> Array:
    """x / y, broadcast, as one IEEE division an element on the CPU.

    XLA turns a division by a broadcast value into a product with its reciprocal; behind a barrier
    it does not see the broadcast. A GPU's float32 division may still be off in the last bit.
    """
    shape = jnp.broadcast_shapes(jnp.shape(x), jnp.shape(y))
    divisor = jnp.broadcast_to(jnp.asarray(y, jnp.float32), shape)
    return x / jax.lax.optimization_barrier(divisor)


def _finite(x: Array) -> Float32[Array, "*B"]:
    """x in float32, with 0 for NaN (it fails the comparison) and subnormals; infinities stay."""
    x = jnp.asarray(x).astype(jnp.float32)
    return jnp.where(jnp.abs(x) >= _SMALLEST_NORMAL, x, 0.0)


def _groups(x: Array) -> Array:
    """Split the last axis into groups: [..., n] to [..., n/16, 16]."""
    width = x.shape[-1] if x.ndim else 0
    if width == 0 or width % GROUP:
        raise ValueError(
            f"last axis of shape {x.shape} is not a multiple of {GROUP}; "
            f"NVFP4 scales cover {GROUP} consecutive values, pad the axis"
        )
    return x.reshape(*x.shape[:-1], width // GROUP, GROUP)


def e2m1_encode(x: Float[Array, "*B"], scale: Array | float = 1.0) -> UInt8[Array, "*B"]:
    """Codes of x / scale: nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives.

    Ties go to the even code; magnitudes above 6, infinity included, saturate at 6. What rounds to
    zero is code 0, also for negative x (the M3.1 KV rule; other encoders keep the sign, code 8).
    NaN and a scale of 0 give code 0.

    The comparison is |x| against scale * threshold. For an E4M3 scale times any power of two this
    is exact, and equal to rounding the float32 quotient, on every device. For another scale pass
    `divide(x, scale)`, the rounded quotient, which is what other encoders round.

    Args:
      x: values of any float dtype.
      scale: not negative, broadcasts against x.
    Returns:
      Codes 0..15: magnitude 0..7, sign bit 8.
    """
    x = _finite(x)
    magnitude = jnp.abs(x)
    scale = jnp.asarray(scale, jnp.float32)
    code = jnp.zeros(magnitude.shape, jnp.uint8)
    for i, tie in enumerate(_E2M1_TIES):
        threshold = tie * scale
        passed = magnitude >= threshold if i % 2 else magnitude > threshold
        code += passed.astype(jnp.uint8)
    code = jnp.where(scale > 0, code, jnp.uint8(0))
    return jnp.where((x < 0) & (code > 0), code | 8, code)


def e2m1_decode(codes: UInt8[Array, "*B"]) -> Float32[Array, "*B"]:
    """Values of codes 0..15. Code 8 is -0.0. Higher bits of a byte are ignored.

    Raises:
      ValueError: codes are not uint8.
    """
    codes = _bytes(codes, "codes")
    # Building the float's bits is quicker on the CPU than a look-up in 16 entries: 0.22 and 0.38 ms
    # for 2^20 codes, where writing the result alone takes 0.21.
    wide = codes.astype(jnp.uint32)
    magnitude = wide & 7
    normal = (magnitude + 252) << 22  # codes 2..7: two exponent bits, one mantissa bit
    bits = jnp.where(magnitude < 2, magnitude * (126 << 23), normal)  # 0 and 0.5
    return jax.lax.bitcast_convert_type(bits | ((wide & 8) << 28), jnp.float32)


def pack(codes: UInt8[Array, "*B n"]) -> UInt8[Array, "*B n//2"]:
    """Two codes a byte, the even column in the low nibble.

    Raises:
      ValueError: codes are not uint8, or the last axis is odd.
    """
    codes = _bytes(codes, "codes")
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {codes.shape} cannot be paired; make the last axis even")
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def unpack(packed: UInt8[Array, "*B m"]) -> UInt8[Array, "*B 2*m"]:
    """The codes of `pack`, low nibble first.

    Raises:
      ValueError: packed is not uint8.
    """
    packed = _bytes(packed, "packed")
    pairs = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


def e4m3_cast(x: Float[Array, "*B"]) -> Float8e4m3fn[Array, "*B"]:
    """Round to E4M3: nearest, ties to even, magnitudes above 448 (infinity included) to 448.

    NaN gives 0, so that one bad value cannot spread through a cache. The sign of zero is kept.
    """
    x = jnp.asarray(x).astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), 0.0, jnp.clip(x, -E4M3_MAX, E4M3_MAX))
    # Without the barrier XLA on a GPU drops a cast down and up again inside one jit.
    return jax.lax.optimization_barrier(x.astype(jnp.float8_e4m3fn))


def group_scale(amax: Float[Array, "*B"]) -> Float8e4m3fn[Array, "*B"]:
    """E4M3 nearest to amax / 6 (ties to even, at most 448), without a division.

    Equal to rounding the float32 quotient. Up to 6 * 2^-10 it is 0; the KV rule then takes 2^-9.
    NaN gives 0.

    Args:
      amax: largest magnitude of each group, not negative.
    """
    amax = _finite(amax)
    # The rounded product with 1/6 is off by one byte at most, which its two thresholds tell. A
    # search of the table is a loop: 7 times as long on the CPU, and twice as long to compile.
    near = jax.lax.bitcast_convert_type(e4m3_cast(amax * (1 / E2M1_MAX)), jnp.uint8)
    is_above = amax >= look_up(_SCALE_THRESHOLDS[1:], near)
    is_below = amax < look_up(_SCALE_THRESHOLDS[:-1], near)
    byte = near + is_above.astype(jnp.uint8) - is_below.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)


def quantize_unit(
    x: Float[Array, "*B n"],
) -> tuple[UInt8[Array, "*B n//2"], Float8e4m3fn[Array, "*B n//16"]]:
    """Quantise with an outer scale of 1: the KV-cache rule of MiniMax-M3.1.

    scale = e4m3(clamp(amax / 6, 2^-9, 448)), code = e2m1(x / scale) with the stored scale. A group
    depends on its own 16 values only.

    An all-zero group gets scale 2^-9 and codes 0, and so does one with nothing above 2^-11, such as
    a lone 1e-30. Magnitudes above 2688 and infinities saturate at 2688; the rest of such a group
    keeps the scale 448. NaN counts as 0 and leaves its neighbours alone.

    Args:
      x: values of any float dtype; n is a multiple of 16.
    Returns:
      (packed codes, scales).
    Raises:
      ValueError: n is not a multiple of 16.
    """
    groups = _groups(_finite(x))
    scale = group_scale(jnp.abs(groups).max(axis=-1))
    byte = jnp.maximum(jax.lax.bitcast_convert_type(scale, jnp.uint8), 1)  # byte 1 is 2^-9
    scale = jax.lax.bitcast_convert_type(byte, jnp.float8_e4m3fn)
    codes = e2m1_encode(groups, scale.astype(jnp.float32)[..., None])
    return pack(codes.reshape(jnp.shape(x))), scale


def quantize(
    x: Float[Array, "*B n"],
    weight_scale_2: Array | float,
) -> tuple[UInt8[Array, "*B n//2"], Float8e4m3fn[Array, "*B n//16"]]:
    """Quantise with a given outer scale, which multiplies on decode.

    scale = e4m3(clamp(amax / (6 * weight_scale_2), 2^-9, 448)), code = e2m1(x / (scale *
    weight_scale_2)). Zero, tiny, huge and NaN values end as in `quantize_unit`, whose result this
    is for weight_scale_2 = 1; the range is 2688 * weight_scale_2.

    Args:
      x: values of any float dtype; n is a multiple of 16.
      weight_scale_2: finite, at least 2^-100; one value, or an array of the rank of x that
        broadcasts against the scales [*B, n/16], such as [E, 1, 1] for x [E, N, K].
    Returns:
      (packed codes, scales).
    Raises:
      ValueError: n is not a multiple of 16, or weight_scale_2 does not fit.
    """
    groups = _groups(_finite(x))
    outer = _outer(weight_scale_2, groups.shape[:-1])
    amax = jnp.abs(groups).max(axis=-1)
    smallest = 2.0**-9
    scale = e4m3_cast(jnp.maximum(divide(amax, E2M1_MAX * outer), smallest))
    return _encode_groups(groups, scale.astype(jnp.float32) * outer), scale


def dequantize(
    packed: UInt8[Array, "*B n//2"],
    scale: Float8e4m3fn[Array, "*B n//16"],
    weight_scale_2: Array | float = 1.0,
) -> Float32[Array, "*B n"]:
    """Values of packed codes: e2m1 * (scale * weight_scale_2), the product of scales rounded first.

    A scale of NaN (byte 0x7F) makes its group NaN, zero codes included: whoever loads a checkpoint
    looks for it. A zero code times a finite scale is exactly zero.

    Args:
      packed: two codes a byte, the even column in the low nibble.
      scale: one per 16 values.
      weight_scale_2: the outer decode scale (1 / weight_global_scale); one value, or an array of
        the rank of `scale` that broadcasts against it.
    Raises:
      ValueError: dtypes or shapes do not fit each other.
    """
    packed = _bytes(packed, "packed")
    scale = jnp.asarray(scale)
    if scale.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"scale is {scale.dtype}; view its bytes as float8_e4m3fn")
    width = packed.shape[-1] * 2 if packed.ndim else 0
    if width % GROUP or scale.shape != (*packed.shape[:-1], width // GROUP):
        raise ValueError(
            f"packed {packed.shape} and scale {scale.shape} disagree; "
            f"{GROUP // 2} bytes of the last axis share one scale"
        )
    step = scale.astype(jnp.float32) * _outer(weight_scale_2, scale.shape)
    # One look-up a byte gives both values: 0.45 ms for 2^20 values on the CPU (0.21 of it writing
    # them), 0.57 by unpacking and building bits, 1.0 by way of float4_e2m1fn.
    values = look_up(_PAIRS, packed).reshape(*scale.shape, GROUP) * step[..., None]
    return values.reshape(*packed.shape[:-1], -1)


def quantize_weight_modelopt(
    w: Float[Array, "*B K"],
) -> tuple[UInt8[Array, "*B K//2"], Float8e4m3fn[Array, "*B K//16"], Float32[Array, ""]]:
    """Quantise a weight by NVIDIA ModelOpt's rule; the whole array shares one outer scale.

    weight_scale_2 = amax / 2688, then `quantize`; an all-zero group stores scale 1. An all-zero
    weight gets weight_scale_2 = 1. Below amax 2688 * 2^-100 the outer scale stays at 2^-100.
    Magnitudes above 2^127, infinities included, saturate there (and leave little of the rest).

    Args:
      w: [out, in] or any stack of such; K is a multiple of 16.
    Returns:
      (packed codes, scales, weight_scale_2), the last a decode scale.
    Raises:
      ValueError: K is not a multiple of 16.
    Source: nvidia-modelopt `NVFP4QTensor.quantize`, except that -0 is stored as code 0.
    """
    groups = _groups(_finite(w))
    amax = jnp.minimum(jnp.abs(groups).max(axis=-1), _AMAX_MAX)
    largest = amax.max()
    outer = jnp.maximum(divide(largest, RANGE), _OUTER_MIN)
    outer = jnp.where(largest > 0, outer, 1.0)
    ratio = divide(amax, E2M1_MAX * outer)
    scale = e4m3_cast(jnp.where(ratio > 0, jnp.maximum(ratio, 2.0**-9), 1.0))
    return _encode_groups(groups, scale.astype(jnp.float32) * outer), scale, outer


def quantize_weight(
    w: Float[Array, "*B K"],
) -> tuple[UInt8[Array, "*B K//2"], Float8e4m3fn[Array, "*B K//16"], Float32[Array, "1"]]:
    """Quantise a weight as released M3.1 experts are; the whole array shares one outer scale.

    weight_global_scale = 2688 / amax, scale = e4m3(weight_global_scale * (group amax / 6)) with
    0.125 in place of 0, code = e2m1(w / (scale / weight_global_scale)). Stack w1 and w3 to give
    them one global scale. All-zero weights get 1; it is at most 2^100, reached below amax
    2688 * 2^-100. Magnitudes above 2^127, infinities included, saturate there.

    Args:
      w: [out, in] or any stack of such; K is a multiple of 16.
    Returns:
      (packed codes, scales, weight_global_scale), the last an **encode** scale: `dequantize` takes
      its reciprocal.
    Raises:
      ValueError: K is not a multiple of 16.
    Source: compressed-tensors `nvfp4-pack-quantized`, except that -0 is stored as code 0.
    """
    groups = _groups(_finite(w))
    amax = jnp.minimum(jnp.abs(groups).max(axis=-1), _AMAX_MAX)
    largest = amax.max(keepdims=True).reshape(1)
    global_scale = jnp.minimum(divide(jnp.float32(RANGE), largest), 1 / _OUTER_MIN)
    global_scale = jnp.where(largest > 0, global_scale, 1.0)
    scale = e4m3_cast(global_scale * divide(amax, E2M1_MAX))
    scale = jnp.where(scale.astype(jnp.float32) == 0, jnp.float8_e4m3fn(0.125), scale)
    step = divide(scale.astype(jnp.float32), global_scale)
    return _encode_groups(groups, step), scale, global_scale


def _encode_groups(groups: Array, step: Array) -> UInt8[Array, "*B n//2"]:
    """Packed codes of groups [..., g, 16] / step [..., g], rounding the float32 quotient."""
    codes = e2m1_encode(divide(groups, step[..., None]))
    return pack(codes.reshape(*groups.shape[:-2], -1))


def _outer(weight_scale_2: Array | float, shape: tuple[int, ...]) -> Float32[Array, "..."]:
    """The outer scale in float32, checked against the shape of the scales.

    A lower rank would broadcast from the right, where [E, 2] could meet [.., 2] columns by chance.
    """
    outer = jnp.asarray(weight_scale_2, jnp.float32)
    if outer.size == 1:
        return outer.reshape(())
    if outer.ndim != len(shape) or any(
        mine not in (1, width) for mine, width in zip(outer.shape, shape, strict=True)
    ):
        raise ValueError(
            f"weight_scale_2 of shape {outer.shape} does not fit scales of shape {shape}; "
            f"give one value, or add axes of 1 up to rank {len(shape)}"
        )
    return outer


def _bytes(x: Array, name: str) -> UInt8[Array, "*B"]:
    x = jnp.asarray(x)
    if x.dtype != jnp.uint8:
        raise ValueError(f"{name} is {x.dtype}, not uint8; view or cast it to bytes first")
    return x


def look_up(table: np.ndarray, index: Array) -> Array:
    """table[index], for an index whose dtype keeps it inside the table.

    Indexing without that promise costs more than the look-up itself (0.74 against 0.37 ms).
    """
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")
