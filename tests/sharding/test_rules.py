"""Logical axes, which head a rank holds, and the mesh."""

import jax
import pytest
from jax.sharding import PartitionSpec

from sharding import mesh, rules


def test_spec():
    assert rules.spec(("vocab", None)) == PartitionSpec("tp", None)
    assert rules.spec((None, "mlp")) == PartitionSpec(None, "tp")
    assert rules.spec(()) == PartitionSpec()
    assert set(rules.RULES.values()) == {mesh.TP}
    with pytest.raises(KeyError, match="tokens"):
        rules.spec(("tokens",))


@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_head_is_held_and_by_neighbours(heads, tp):
    held = rules.heads_per_rank(heads, tp)
    owners = [
        range(rules.head_of_rank(heads, tp, r), rules.head_of_rank(heads, tp, r) + held)
        for r in range(tp)
    ]
    counts = [sum(h in owner for owner in owners) for h in range(heads)]
    assert counts == [max(1, tp // heads)] * heads
    firsts = [owner.start for owner in owners]
    assert firsts == sorted(firsts)


def test_eight_ranks_share_four_heads_in_pairs():
    assert [rules.head_of_rank(4, 8, rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rules.heads_per_rank(4, 8) == 1


def test_query_heads_stay_with_their_kv_head():
    """Head j of q uses KV head j // 16, whatever the width."""
    for tp in (1, 2, 4, 8):
        for rank in range(tp):
            per, kv_per = rules.heads_per_rank(64, tp), rules.heads_per_rank(4, tp)
            first, kv_first = (rules.head_of_rank(n, tp, rank) for n in (64, 4))
            needed = {j // 16 for j in range(first, first + per)}
            assert needed <= set(range(kv_first, kv_first + kv_per))


def test_mesh():
    made = mesh.make_mesh(4, jax.devices())
    assert made.axis_names == ("tp",)
    assert list(made.devices) == jax.devices()[:4]


def test_too_few_devices_are_named():
    with pytest.raises(ValueError, match=r"tp=16 needs 16 devices, 8 found.*device_count=16"):
        mesh.make_mesh(16, jax.devices())
