"""How one cached vector (K, V or index K) is stored, and read back.

| format | stored                                   | value                              |
|--------|------------------------------------------|------------------------------------|
| f32    | float32                                  | exact; the reference               |
| bf16   | bfloat16                                 | rounded once                       |
| fp8    | E4M3, scale 1, saturating                | rounded once                       |
| nvfp4  | E2M1 codes, two a byte, E4M3 scale per 16 | `nvfp4.quantize_unit`, outer scale 1 |

E4M3 numbers are stored as their bytes: XLA's CPU back end has no 8-bit floats and would convert the
whole pool to float16 and back around every scatter.

Quantisation is per token and head, so appending, rewriting after a rejection and moving a slot
never touch a neighbour.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array
from jaxtyping import Float, Float32

from . import nvfp4


class KVFormat(enum.StrEnum):
    """Storage format of a cache lane; the values are those of `--kv-dtype`."""

    F32 = "f32"
    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


class Stored(NamedTuple):
    """Stored vectors: `data` and, for NVFP4 only, its scales. The last axis is the channel.

    Data of type uint8 are E2M1 codes if there are scales, E4M3 numbers if there are none.
    """

    data: Array
    scale: Array | None = None


_DATA_DTYPE = {
    KVFormat.F32: np.dtype(np.float32),
    KVFormat.BF16: np.dtype(ml_dtypes.bfloat16),
    KVFormat.FP8: np.dtype(np.uint8),
    KVFormat.NVFP4: np.dtype(np.uint8),
}


def parts(fmt: KVFormat, width: int) -> dict[str, tuple[int, np.dtype]]:
    """Stored width and dtype of each part (`data`, `scale`) of a vector of `width` channels."""
    if fmt is not KVFormat.NVFP4:
        return {"data": (width, _DATA_DTYPE[fmt])}
    return {
        "data": (width // 2, _DATA_DTYPE[fmt]),
        "scale": (width // nvfp4.GROUP, np.dtype(np.uint8)),
    }


def encode(x: Float[Array, "*B H"], fmt: KVFormat) -> Stored:
    """Store vectors of any float dtype in `fmt`."""
    match fmt:
        case KVFormat.NVFP4:
            data, scale = nvfp4.quantize_unit(x.astype(jnp.float32))
            return Stored(data, _as_bytes(scale))
        case KVFormat.FP8:
            return Stored(_as_bytes(nvfp4.e4m3_cast(x.astype(jnp.float32))))
        case _:
            return Stored(x.astype(_DATA_DTYPE[fmt]))


def decode(stored: Stored) -> Float32[Array, "*B H"]:
    """The values that `encode` stored, in float32 (exact: every format is a subset of it)."""
    if stored.scale is not None:
        return nvfp4.dequantize(stored.data, _as_e4m3(stored.scale))
    data = _as_e4m3(stored.data) if stored.data.dtype == jnp.uint8 else stored.data
    return data.astype(jnp.float32)


def _as_bytes(e4m3: Array) -> Array:
    return jax.lax.bitcast_convert_type(e4m3, jnp.uint8)


def _as_e4m3(stored: Array) -> Array:
    return jax.lax.bitcast_convert_type(stored, jnp.float8_e4m3fn)
