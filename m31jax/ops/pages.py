"""Reading and writing rows of a paged pool. Shared by the ops that touch the cache.

A pool part is [L, P, 128, W] (one vector a token: index keys) or [L, P, K, 128, W] (one a token and head);
L layers, P pages, `page` tokens a page, W stored width. Page 0 is a guard: no request owns it.
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
    """Pool page and offset of each row; a padding row (position -1) gets page `num_pages`.

    A scatter drops that page, being out of range. -1 would wrap to the last page in JAX.
    """
    column = jnp.maximum(position, 0) // page
    pages = page_table[jnp.maximum(slot, 0), column]
    return jnp.where(position >= 0, pages, num_pages), jnp.maximum(position, 0) % page


def write(pool: Stored, values: Stored, layer: int, pages: Array, offset: Array) -> Stored:
    """Put one stored vector a row ([T, W] or [T, K, W]) at (page, offset) of `layer`."""

    def put(part: Array | None, new: Array | None) -> Array | None:
        if part is None or new is None:
            return None
        if part.ndim == 4:
            return part.at[layer, pages, offset].set(new, mode="drop")
        return part.at[layer, pages, :, offset].set(new, mode="drop")

    return Stored(put(pool.data, values.data), put(pool.scale, values.scale))


def read(pool: Stored, layer: int, pages: Array, heads: Array | None = None) -> Stored:
    """Whole pages: [..., page, W] for each entry of `pages` (and, for K and V, of `heads`)."""

    def get(part: Array | None) -> Array | None:
        if part is None:
            return None
        return part[layer, pages] if heads is None else part[layer, pages, heads]

    return Stored(get(pool.data), get(pool.scale))
