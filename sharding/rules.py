"""Logical axis -> mesh axis. The one place that says what is cut and what is replicated."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from . import mesh

RULES: dict[str, str] = {
    "vocab": mesh.TP,  # embedding and head rows
    "heads": mesh.TP,  # q_proj rows, o_proj columns
    "kv_heads": mesh.TP,  # k_proj, v_proj rows; K and V lanes of the cache
    "index_heads": mesh.TP,  # index_q_proj rows
    "mlp": mesh.TP,  # intermediate axis of dense, shared and routed experts
}


def spec(axes: Sequence[str | None]) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; None is replicated.

    Raises:
      KeyError: an axis without a rule.
    """
    return PartitionSpec(*(None if axis is None else RULES[axis] for axis in axes))


def heads_per_rank(heads: int, tp: int) -> int:
    """Heads that one rank holds. Past `heads` ranks each head is held by tp / heads neighbours."""
    return max(1, heads // tp)


def head_of_rank(heads: int, tp: int, rank: int) -> int:
    """First head that `rank` holds."""
    return rank * heads // tp
