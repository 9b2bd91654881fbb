"""Collectives on eight simulated devices: the right sums, and the same bits on every rank."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import collectives, mesh

WIDTHS = (1, 2, 4, 8)


def on_ranks(fn, tp, *arrays):
    """Run fn on each rank's run of the first axis; results of all ranks, rank axis first.

    The arrays have a leading axis of tp ranks, which fn does not see.
    """

    def local(*parts):
        return jax.tree.map(lambda x: x[None], fn(*(part[0] for part in parts)))

    run = jax.shard_map(
        local,
        mesh=mesh.make_mesh(tp, jax.devices()),
        in_specs=P(mesh.TP),
        out_specs=P(mesh.TP),
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(run)(*arrays))


def uneven(*shape):
    """Values of very different size, whose sum depends on the order of addition."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, shape)
    return values.astype(np.float32)


def tree(parts):
    """The balanced tree, one pair at a time."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def assert_same_on_ranks(results):
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), results[0].view(np.uint32))


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_tree_sum_is_the_balanced_tree(count):
    parts = uneven(count, 7)
    np.testing.assert_array_equal(collectives.tree_sum(jnp.asarray(parts)), tree(parts))


@pytest.mark.parametrize("count", [0, 3, 5, 6, 12])
def test_other_counts_are_refused(count):
    """Halves of 2 and 1 would broadcast to a wrong sum."""
    with pytest.raises(ValueError, match=f"tree of {count} parts; use a power of two"):
        collectives.tree_sum(jnp.ones((count, 2)))


@pytest.mark.parametrize("tp", WIDTHS)
def test_all_reduce(tp):
    parts = uneven(tp, 5, 33)
    got = on_ranks(functools.partial(collectives.all_reduce, axis_name=mesh.TP), tp, parts)
    assert_same_on_ranks(got)
    np.testing.assert_array_equal(got[0], tree(parts))


def test_the_order_of_addition_matters_here():
    """Otherwise the tests of bits would prove nothing."""
    parts = uneven(8, 5, 33)
    in_a_row = functools.reduce(np.add, parts)
    assert (tree(parts) != in_a_row).any()
    assert (tree(parts) != tree(parts[[0, 2, 1, 3, 4, 5, 6, 7]])).any()


def test_slices_add_up_to_the_same_bits_at_every_width():
    """[T, 8, N] parts over all ranks, whatever the number of ranks."""
    parts = uneven(5, 8, 33)
    want = tree(np.moveaxis(parts, 1, 0))
    for tp in WIDTHS:
        own = np.stack(np.split(parts, tp, axis=1))
        got = on_ranks(functools.partial(collectives.sum_slices, axis_name=mesh.TP), tp, own)
        assert_same_on_ranks(got)
        np.testing.assert_array_equal(got[0], want, err_msg=f"tp={tp}")


@pytest.mark.parametrize("tp", WIDTHS)
def test_all_gather_last_keeps_rank_order(tp):
    whole = np.arange(3 * 16, dtype=np.int32).reshape(3, 16)
    own = np.stack(np.split(whole, tp, axis=1))
    got = on_ranks(functools.partial(collectives.all_gather_last, axis_name=mesh.TP), tp, own)
    assert got.shape == (tp, 3, 16)
    for result in got:
        np.testing.assert_array_equal(result, whole)


@pytest.mark.parametrize("tp", WIDTHS)
def test_argmax_sharded(tp):
    """Also ties within a rank, across ranks and everywhere, infinities and signed zeros."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((40, 64)).astype(np.float32)
    logits[10:20] = np.round(logits[10:20])
    logits[20] = 0
    logits[21] = -np.inf
    logits[22, [5, 13, 40, 63]] = 9
    logits[23, [63, 40]] = np.inf
    logits[24] = np.where(np.arange(64) % 3, 0.0, -0.0)
    logits[25, [31, 32]] = 9
    own = np.stack(np.split(logits, tp, axis=1))
    index, value = on_ranks(
        functools.partial(collectives.argmax_sharded, axis_name=mesh.TP), tp, own
    )
    want = [next(i for i in range(64) if row[i] == row.max()) for row in logits]
    for rank in range(tp):
        assert index[rank].tolist() == want
        np.testing.assert_array_equal(value[rank], logits.max(axis=1))
    assert index.dtype == np.int32


def test_argmax_sharded_of_ties_needs_the_rank_order():
    """Ranks in another order would give another id: the lowest one has to win by construction."""
    logits = np.zeros((8, 1, 8), np.float32)
    index, _ = on_ranks(functools.partial(collectives.argmax_sharded, axis_name=mesh.TP), 8, logits)
    assert index.ravel().tolist() == [0] * 8
    logits[0], logits[3, 0, 2] = -1, 0
    index, _ = on_ranks(functools.partial(collectives.argmax_sharded, axis_name=mesh.TP), 8, logits)
    assert index.ravel().tolist() == [8] * 8
