"""MXFP8: E4M3 values with one power-of-two scale per 32, stored as an E8M0 byte.

    value = e4m3 * 2^(byte - 127)

Every function takes NumPy or JAX arrays of any leading shape, computes in float32 and gives the
same bits eagerly and under `jit`. Values below 2^-126 in magnitude count as 0, because XLA's CPU
back end reads float32 subnormals as zero.
"""

from typing import Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jaxtyping import Float, Float8e4m3fn, Float32, Int32, UInt8

from .nvfp4 import e4m3_cast, look_up

GROUP: Final = 32
"""Consecutive values of the last axis that share one scale."""

_MANTISSA_OF_448: Final = 0x600000  # 448 = 1.75 * 2^8
_E4M3: Final = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _halves(power: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two normal float32 powers of two whose product is 2^power, for -127 <= power <= 128.

    2^-127 is subnormal and 2^128 infinite as one factor. Multiplying by one after the other is
    exact wherever the final product is a normal number, because both factors point the same way.
    """
    half = power >> 1
    return np.ldexp(np.float32(1), half), np.ldexp(np.float32(1), power - half)


_DECODE: Final = _halves(np.arange(256) - 127)
_DECODE[1][255] = np.nan
_ENCODE: Final = _halves(127 - np.arange(255))


def quantize(
    x: Float[Array, "*B n"],
) -> tuple[Float8e4m3fn[Array, "*B n"], UInt8[Array, "*B n//32"]]:
    """Quantise groups of 32 along the last axis.

    byte = clamp(ceil(log2(amax / 448)) + 127, 0, 254), data = e4m3(x * 2^(127 - byte)), so that
    the scaled maximum lies in (224, 448]. (The floor rule of the OCP specification is not used.)
    A group depends on its own 32 values only.

    An all-zero group gets byte 0 and data 0. A lone 1e-30 gets byte 19 and is kept. NaN counts as 0
    and leaves its neighbours alone. An infinity gives byte 254 and data of magnitude 448, which
    decodes to infinity, and next to nothing remains of its group.

    Args:
      x: values of any float dtype; n is a multiple of 32.
    Returns:
      (data, scale bytes).
    Raises:
      ValueError: n is not a multiple of 32.
    """
    x = jnp.asarray(x).astype(jnp.float32)
    width = x.shape[-1] if x.ndim else 0
    if width == 0 or width % GROUP:
        raise ValueError(
            f"last axis of shape {x.shape} is not a multiple of {GROUP}; "
            f"MXFP8 scales cover {GROUP} consecutive values, pad the axis"
        )
    groups = x.reshape(*x.shape[:-1], width // GROUP, GROUP)
    groups = jnp.where(jnp.abs(groups) >= 2.0**-126, groups, 0.0)  # NaN and subnormals to 0
    byte = _scale_byte(jnp.abs(groups).max(axis=-1))
    first, second = (look_up(half, byte)[..., None] for half in _ENCODE)
    data = e4m3_cast(groups * first * second)
    return data.reshape(x.shape), byte.astype(jnp.uint8)


def _scale_byte(amax: Float32[Array, "*B"]) -> Int32[Array, "*B"]:
    """clamp(ceil(log2(amax / 448)) + 127, 0, 254) from the bits of amax.

    With amax = m * 2^e, 1 <= m < 2, the ceiling is e - 8, or e - 7 where m is above 1.75. Over all
    2^23 mantissas this equals rounding amax * (1/448) up to a power of two, the rule of other
    encoders, and it has no product that could underflow.
    """
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    exponent = bits >> 23
    byte = exponent - 8 + ((bits & 0x7FFFFF) > _MANTISSA_OF_448).astype(jnp.int32)
    return jnp.where(jnp.isinf(amax), 254, jnp.clip(byte, 0, 254))


def dequantize(
    data: Float8e4m3fn[Array, "*B n"],
    scale: UInt8[Array, "*B n//32"],
) -> Float32[Array, "*B n"]:
    """Values: data * 2^(scale - 127), exact where that is a normal float32.

    Past float32's range it is infinite, below 2^-126 in magnitude it may be zero. Scale byte 255 is
    NaN in E8M0 and makes its group NaN, zeros included; `quantize` never writes it, and whoever
    loads a checkpoint looks for it.

    Raises:
      ValueError: dtypes or shapes do not fit each other.
    """
    data, scale = jnp.asarray(data), jnp.asarray(scale)
    if data.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"data is {data.dtype}; view its bytes as float8_e4m3fn")
    if scale.dtype != jnp.uint8:
        raise ValueError(f"scale is {scale.dtype}, not uint8; view the E8M0 exponents as bytes")
    width = data.shape[-1] if data.ndim else 0
    if width % GROUP or scale.shape != (*data.shape[:-1], width // GROUP):
        raise ValueError(
            f"data {data.shape} and scale {scale.shape} disagree; "
            f"{GROUP} values of the last axis share one scale"
        )
    # A look-up takes half the time of XLA's cast of E4M3 on the CPU: 0.3 and 0.65 ms for 2^20.
    values = look_up(_E4M3, jax.lax.bitcast_convert_type(data, jnp.uint8))
    first, second = (look_up(half, scale)[..., None] for half in _DECODE)
    groups = values.reshape(*scale.shape, GROUP) * first * second
    return groups.reshape(data.shape)


def e8m0_decode(scale: UInt8[Array, "*B"]) -> Float32[Array, "*B"]:
    """2^(scale - 127) for bytes 0..254, NaN for 255.

    Byte 0 is 2^-127, a float32 subnormal: right as a value, but XLA's CPU back end takes it for
    zero in arithmetic. `dequantize` does not multiply by it.

    Raises:
      ValueError: scale is not uint8.
    """
    scale = jnp.asarray(scale)
    if scale.dtype != jnp.uint8:
        raise ValueError(f"scale is {scale.dtype}, not uint8; view the E8M0 exponents as bytes")
    wide = scale.astype(jnp.uint32)
    bits = jnp.where(wide == 0, jnp.uint32(1 << 22), wide << 23)
    bits = jnp.where(wide == 255, jnp.uint32(0x7FC00000), bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
