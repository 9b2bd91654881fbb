"""Reading and writing rows of a paged pool. Shared by the ops that touch the cache.

A pool part is [L, P, 128, W] (one vector a token: index keys) or [L, P, K, 128, W] (one a token
and head); L layers, P pages, `page` tokens a page, W stored width. Page 0 is a guard: no request
owns it.
"""

import jax.numpy as jnp
from jax import Array

from ..kv_format import Stored


def page_size(pool: Stored) -> int:
    """Tokens in one page."""
    return pool.data.shape[-2]


def locate(
    page_table: Array, slot: Array, position: Array, page: int, num_pages: int
) -> tuple[Array, Array]:
    """Pool page and offset of each row; a row that is stored nowhere gets page `num_pages`.

    That is a padding row (position -1) and one past the page table, whose column a gather would
    clamp to the last one. A scatter drops page `num_pages`, being out of range; -1 would wrap.
    """
    column = jnp.maximum(position, 0) // page
    pages = page_table[jnp.maximum(slot, 0), column]
    is_stored = (position >= 0) & (column < page_table.shape[1])
    return jnp.where(is_stored, pages, num_pages), jnp.maximum(position, 0) % page


def write(pool: Stored, values: Stored, layer: int, pages: Array, offset: Array) -> Stored:
    """Put one stored vector a row ([T, W] or [T, K, W]) at (page, offset) of `layer`."""

    def put(part: Array, new: Array) -> Array:
        if part.ndim == 4:
            return part.at[layer, pages, offset].set(new, mode="drop")
        return part.at[layer, pages, :, offset].set(new, mode="drop")

    data = put(pool.data, values.data)
    if pool.scale is None or values.scale is None:
        return Stored(data)
    return Stored(data, put(pool.scale, values.scale))


def read(pool: Stored, layer: int, pages: Array, heads: Array | None = None) -> Stored:
    """Whole pages: [..., page, W] for each entry of `pages` (and, for K and V, of `heads`)."""

    def get(part: Array) -> Array:
        return part[layer, pages] if heads is None else part[layer, pages, heads]

    return Stored(get(pool.data), None if pool.scale is None else get(pool.scale))
