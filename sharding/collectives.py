"""Sums and gathers over ranks whose result has the same bits on every rank.

Each rank gathers all parts and adds them in one fixed order. A plain `psum` leaves the order to the
back end, and two ranks that differ in a last bit can accept different tokens.
"""

import jax
import jax.numpy as jnp
from jax import Array


def tree_sum(parts: Array) -> Array:
    """Sum over axis 0 as a balanced tree.

    Raises:
      ValueError: the length is no power of two; halves of unequal length would broadcast.
    """
    count = parts.shape[0]
    if count < 1 or count & (count - 1):
        raise ValueError(f"a balanced tree of {count} parts; use a power of two")
    while parts.shape[0] > 1:
        parts = parts[0::2] + parts[1::2]
    return parts[0]


def all_reduce(x: Array, axis_name: str) -> Array:
    """Sum over ranks in the fixed order of `tree_sum`. Ranks must be a power of two."""
    if jax.lax.axis_size(axis_name) == 1:
        return x
    return tree_sum(jax.lax.all_gather(x, axis_name))


def sum_slices(parts: Array, axis_name: str) -> Array:
    """Sum [T, S, N] partial sums over slices and ranks: [T, N].

    Slices of neighbouring ranks are neighbours, so the tree over one rank's slices followed by the
    tree over ranks is one tree over all slices: the same additions for every number of ranks.
    """
    return all_reduce(tree_sum(jnp.moveaxis(parts, 1, 0)), axis_name)


def all_gather_last(x: Array, axis_name: str) -> Array:
    """Concatenate the last axis over ranks, in rank order."""
    if jax.lax.axis_size(axis_name) == 1:
        return x
    return jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def argmax_sharded(x: Array, axis_name: str) -> tuple[Array, Array]:
    """Arg-max over a last axis that is cut over ranks: (global index int32, value).

    Ties: the lowest index. Only one value and one index a rank travel.
    """
    width = x.shape[-1]
    local = jnp.argmax(x, axis=-1)
    best = jnp.take_along_axis(x, local[..., None], axis=-1)[..., 0]
    index = (local + width * jax.lax.axis_index(axis_name)).astype(jnp.int32)
    if jax.lax.axis_size(axis_name) == 1:
        return index, best
    values, indices = (jax.lax.all_gather(part, axis_name) for part in (best, index))
    rank = jnp.argmax(values, axis=0)  # the first rank among equals holds the lowest ids
    pick = jnp.take_along_axis(indices, rank[None], axis=0)[0]
    return pick, jnp.take_along_axis(values, rank[None], axis=0)[0]
