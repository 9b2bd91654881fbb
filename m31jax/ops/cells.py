"""Random arrays for cells, drawn on the host from a JAX key.

Every eager JAX operation is compiled once a shape: drawn that way the cells of all ops take 118 s
of a CPU core, drawn here 4 s. Packed operands are drawn as bytes.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from .. import kv_format
from ..kv_format import KVFormat, Stored
from .weight import Format, Weight

_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
_LOUD = 448.0


def generator(key: Array) -> np.random.Generator:
    """NumPy's generator with the seed that a JAX key holds."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """Standard normal values."""
    return jnp.asarray(rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))


def weight(rng: np.random.Generator, shape: tuple[int, ...], fmt: Format) -> Weight:
    """A weight [..., N, K] of one format, sized so that products with normal rows are of order one.

    Scales differ from group to group and outer scales from matrix to matrix, so that a misplaced
    one shows.
    """
    *outer, rows, width = shape
    size = 1 / math.sqrt(width)
    match fmt:
        case "dense":
            return Weight(normal(rng, shape) * size)
        case "mxfp8":
            data = rng.standard_normal(shape, np.float32) * np.float32(64)
            middle = 127 + round(math.log2(size / 64))
            scale = rng.integers(middle - 1, middle + 2, (*outer, rows, width // 32), np.uint8)
            return Weight(jnp.asarray(data.astype(_E4M3)), jnp.asarray(scale))
        case "nvfp4":
            codes = rng.integers(0, 256, (*outer, rows, width // 2), np.uint8)
            scale = rng.integers(0x60, 0x7F, (*outer, rows, width // 16), np.uint8)  # 32 to 448
            scale_2 = rng.uniform(0.5, 1.5, outer) * size / 500
            return Weight(
                jnp.asarray(codes),
                jnp.asarray(scale.view(_E4M3)),
                jnp.asarray(scale_2, jnp.float32),
            )


def pool(rng: np.random.Generator, shape: tuple[int, ...], fmt: KVFormat) -> Stored:
    """A pool of random vectors of about unit size; the guard page holds loud values."""
    parts = kv_format.parts(fmt, shape[-1])
    width, dtype = parts["data"]
    if fmt is not KVFormat.NVFP4:
        values = rng.standard_normal(shape, np.float32)
        values[:, 0] = _LOUD
        stored = values.astype(_E4M3).view(dtype) if fmt is KVFormat.FP8 else values.astype(dtype)
        return Stored(jnp.asarray(stored))
    data = rng.integers(0, 256, (*shape[:-1], width), np.uint8)
    scale = rng.integers(0x24, 0x35, (*shape[:-1], parts["scale"][0]), np.uint8)  # 3/16 to 13/16
    data[:, 0], scale[:, 0] = 0x77, 0x7E  # 6 and 448
    return Stored(jnp.asarray(data), jnp.asarray(scale))


def empty_pool(shape: tuple[int, ...], fmt: KVFormat) -> Stored:
    """A zeroed pool whose vectors have `shape[-1]` channels."""
    made = {
        name: jnp.zeros((*shape[:-1], width), dtype)
        for name, (width, dtype) in kv_format.parts(fmt, shape[-1]).items()
    }
    return Stored(**made)


def rows(
    rng: np.random.Generator, lengths: tuple[int, ...], width: int, page: int
) -> dict[str, Array]:
    """One row at the end of each request, whose pages are scattered over a pool.

    Columns of the page table past a request's last page name the guard page.
    """
    needed = [-(-n // page) for n in lengths]
    order = 1 + rng.permutation(sum(needed))
    table = np.zeros((len(lengths), width), np.int32)
    for b, pages in enumerate(np.split(order, np.cumsum(needed)[:-1])):
        table[b, : len(pages)] = pages
    return dict(
        page_table=jnp.asarray(table),
        slot=jnp.arange(len(lengths), dtype=jnp.int32),
        position=jnp.asarray(lengths, jnp.int32) - 1,
    )


def pool_pages(lengths: tuple[int, ...], page: int) -> int:
    """Pages that `rows` needs, the guard included."""
    return 1 + sum(-(-n // page) for n in lengths)
