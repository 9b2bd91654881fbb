"""Softmax attention of a few rows over a list of pages. The body of both attention references."""

import jax
import jax.numpy as jnp
from jax import Array

from .. import kv_format
from ..kv_format import Stored
from . import pages
from .op import at_least_two, fixed_sum


def attend(
    q: Array,
    k_pool: Stored,
    v_pool: Stored,
    page_table: Array,
    slot: Array,
    position: Array,
    blocks: Array,
    count: Array,
    *,
    layer: int,
    scale: float,
) -> Array:
    """Attend to the keys n <= position of the listed blocks, one block after the other.

    Args:
      q: [T, K, G, H]: G query heads of each KV head.
      blocks: int32 [T, K, U] block ids, -1 for none. The same block may not come twice.
      count: int32 scalar; blocks at and past this place are all -1.
    Returns:
      float32 [T, K, G, H]; zero for a row that sees no key.
    """
    page = pages.page_size(k_pool)
    query = at_least_two(q.astype(jnp.float32), axis=2)
    rows, kv_heads, group, width = query.shape
    heads = jnp.arange(kv_heads)

    def step(u: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        best, total, acc = carry
        block = jax.lax.dynamic_index_in_dim(blocks, u, axis=2, keepdims=False)  # T K
        at = page_table[slot[:, None], jnp.maximum(block, 0)]  # T K
        keys = kv_format.decode(pages.read(k_pool, layer, at, heads))  # T K page H
        values = kv_format.decode(pages.read(v_pool, layer, at, heads))
        token = block[..., None] * page + jnp.arange(page)  # T K page
        seen = (block >= 0)[..., None] & (token <= position[:, None, None])
        dots = jnp.einsum("tkgh,tknh->tkgn", query, keys, precision=jax.lax.Precision.HIGHEST)
        dots = jnp.where(seen[:, :, None], dots * scale, -jnp.inf)
        new_best = jnp.maximum(best, dots.max(axis=-1))
        shift = jnp.where(new_best == -jnp.inf, 0.0, new_best)
        weights = jnp.exp(dots - shift[..., None])
        fade = jnp.exp(best - shift)
        values = jnp.where(seen[..., None], values, 0.0)  # a stale NaN must not meet a zero weight
        added = jnp.einsum("tkgn,tknh->tkgh", weights, values, precision=jax.lax.Precision.HIGHEST)
        total = total * fade + fixed_sum(weights)
        return new_best, total, acc * fade[..., None] + added

    start = (
        jnp.full((rows, kv_heads, group), -jnp.inf, jnp.float32),
        jnp.zeros((rows, kv_heads, group), jnp.float32),
        jnp.zeros((rows, kv_heads, group, width), jnp.float32),
    )
    _, total, acc = jax.lax.fori_loop(0, count, step, start)
    out = acc / jnp.where(total == 0.0, 1.0, total)[..., None]
    return out[:, :, : q.shape[2]]
