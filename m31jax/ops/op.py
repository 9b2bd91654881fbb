"""What every op module is made of: implementations, cells, the shape check and the row tiles."""

import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from beartype import beartype
from jaxtyping import jaxtyped

ROW_TILE = 8
"""Rows that the reference computes at a time, whatever the number of live rows.

An XLA matmul gives one row other last bits in a batch of 2 than in a batch of 8. Running each op
over tiles of one fixed shape makes a row's bits independent of its neighbours, so that decode (one
row a slot), verify (1 + K rows) and prefill (a chunk) agree. Any size works if one size serves
every phase.
"""


class Kind(enum.StrEnum):
    """Where an implementation comes from."""

    REFERENCE = "reference"
    COMPOSED = "composed"
    PALLAS = "pallas"
    TRITON = "triton"
    CUTE = "cute"


@dataclass(frozen=True)
class Impl:
    """One implementation of one op, chosen before tracing. Hashable, static under jit."""

    kind: Kind = Kind.REFERENCE
    arch: str = "cpu"
    tuning: Hashable = None


REFERENCE = Impl()


@dataclass(frozen=True)
class Cell:
    """One shape to test, tune and time, with the reason that it is here."""

    why: str
    spec: Mapping[str, Any] = field(hash=False)


def checked[**P, R](op: Callable[P, R]) -> Callable[P, R]:
    """Make jaxtyping annotations the shape check, and the op's name the scope of what it traces.

    Both run while tracing; a compiled step pays nothing. A profile's row then names its file.
    """
    return jaxtyped(typechecker=beartype)(jax.named_scope(op.__name__)(op))


class NoImplementation(NotImplementedError):
    """An op has no implementation of that kind at all, whatever the input.

    A kernel that does not cover one valid input raises a plain NotImplementedError.
    """


def no_implementation(op: str, impl: Impl) -> NoImplementation:
    """The error of an op asked for an implementation that it does not have."""
    return NoImplementation(
        f"{op} has no {impl.kind} implementation for {impl.arch}; "
        f"unset M31JAX_IMPL or name one that `m31jax explain` lists"
    )


def map_tiles(fn: Callable[..., Any], *rows: jax.Array | None) -> Any:
    """Apply a row-wise function over fixed tiles of ROW_TILE rows.

    Args:
      fn: takes as many arrays as `rows`, each [ROW_TILE, ...] (None stays None); returns a pytree
        of [ROW_TILE, ...]. Row i of its result may depend on row i of its arguments only.
      rows: arrays with one leading axis of T rows, T at least 1. The last tile is filled with
        copies of the last row, whose results are dropped.
    Returns:
      The results for all T rows.
    """
    count = next(x.shape[0] for x in rows if x is not None)
    tiles = -(-count // ROW_TILE)

    def split(x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        fill = [(0, tiles * ROW_TILE - count)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, fill, mode="edge").reshape(tiles, ROW_TILE, *x.shape[1:])

    def isolated(tile: tuple[jax.Array | None, ...]) -> Any:
        # XLA inlines a loop of one tile and fuses it with its surroundings, where a product and a
        # sum become one fused multiply-add: other bits than in a loop of several tiles.
        return jax.lax.optimization_barrier(fn(*jax.lax.optimization_barrier(tile)))

    out = jax.lax.map(isolated, tuple(split(x) for x in rows))
    return jax.tree.map(lambda y: y.reshape(tiles * ROW_TILE, *y.shape[2:])[:count], out)


def fixed_sum(x: jax.Array) -> jax.Array:
    """Float32 sum over the last axis, in an order that the size of the other axes does not change.

    An XLA reduction's order does change: on CPU a sum of 64 over 32 rows goes to other code than
    one over 64 rows, so the heads of one shard would round otherwise than the same heads among
    more. A product with a vector of ones takes one path at every size (checked for 8 to 256 rows,
    16 to 6144 terms).
    """
    ones = jnp.ones(x.shape[-1], jnp.float32)
    return jnp.matmul(x, ones, precision=jax.lax.Precision.HIGHEST)


def at_least_two(x: jax.Array, axis: int) -> jax.Array:
    """`x`, a single row along `axis` doubled: a product of one row takes other code than more."""
    return jnp.concatenate([x, x], axis=axis) if x.shape[axis] == 1 else x
