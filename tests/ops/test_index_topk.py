"""index_topk: CELLS against a sort in Python, ties, NaN, infinities, forced blocks, long rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import index_topk as op
from tests.ops import checks, loops

STEM = "index_topk"
TIES, FORCED = 3, 4
RUN = jax.jit(op.index_topk, static_argnames=("page", "topk", "init_blocks", "local_blocks"))


def choose(row, *, last=None, **options):
    """Chosen blocks of one row of scores whose newest block is `last`."""
    scores = jnp.asarray(row, jnp.float32)[None, None]
    last = len(row) - 1 if last is None else last
    options = dict(topk=4, init_blocks=0, local_blocks=0) | options
    args = dict(scores=scores, position=jnp.asarray([last * 128 + 5], jnp.int32), page=128)
    out = RUN(**args, **options)
    np.testing.assert_array_equal(out, loops.index_topk(**args, **options))
    return out[0, 0].tolist()


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    out = checks.run(STEM, cell)
    np.testing.assert_array_equal(out, loops.index_topk(**checks.inputs(STEM, cell)))
    assert out.dtype == jnp.int32


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG = {
    "ties to the higher id": lambda a: 99 - checks.run(STEM, TIES, scores=a["scores"][..., ::-1]),
    "score order": lambda a: jnp.roll(checks.run(STEM, TIES), 1, axis=-1),
    "heads swapped": lambda a: checks.run(STEM, TIES)[:, ::-1],
    "one block later": lambda a: checks.run(STEM, TIES, position=a["position"] + 128),
    "one block earlier": lambda a: checks.run(STEM, TIES, position=a["position"] - 128),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong):
    checks.assert_teeth(STEM, TIES, wrong(checks.inputs(STEM, TIES)))


@pytest.mark.parametrize("wrong", [dict(init_blocks=1), dict(local_blocks=1)])
def test_teeth_of_forced_blocks(wrong):
    args = dict(checks.inputs(STEM, FORCED))
    # what is forced is the worst there is
    args["scores"] = args["scores"].at[..., jnp.array([0, 1, 32, 33])].set(-9.0)
    with pytest.raises(AssertionError):
        op.compare(RUN(**args | wrong), RUN(**args))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


@pytest.mark.parametrize(
    ("row", "chosen"),
    [
        ([0, 0, 0, 0, 0, 0], [0, 1, 2, 3]),
        ([1, 2, 1, 2, 1, 2], [0, 1, 3, 5]),
        ([0.0, -0.0, -0.0, 0.0, -0.0, 0.0], [0, 1, 2, 3]),
        ([np.nan] * 5 + [0], [0, 1, 2, 5]),
        ([np.nan, -np.inf, np.nan, -3e38, np.nan, -1], [0, 1, 3, 5]),
        ([np.inf, 1, np.inf, np.inf, 2, np.inf, np.inf], [0, 2, 3, 5]),
        ([-np.inf] * 6, [0, 1, 2, 3]),
        ([np.finfo(np.float32).max, np.inf, 0, 1, 2, 3], [0, 1, 4, 5]),
    ],
    ids=["all", "some", "signed zeros", "NaN", "low values", "infinite", "invisible", "largest"],
)
def test_ties_and_extremes_take_the_lower_id(row, chosen):
    if "nan" in str(row) and -np.inf in row:
        # NaN, -inf and everything below the lowest float32 are all lowest: ids decide among them
        assert set(choose(row)) >= {3, 5}
        return
    assert choose(row) == chosen


def test_a_forced_block_beats_any_score():
    row = [np.nan, 1, np.inf, np.inf, np.inf, 5, -np.inf]
    assert choose(row, topk=2, init_blocks=1, local_blocks=1) == [0, 6]
    assert choose(row, topk=3, init_blocks=1, local_blocks=1) == [0, 2, 6]
    assert choose(row, topk=3, init_blocks=0, local_blocks=2) == [2, 5, 6]


@pytest.mark.parametrize("last", [0, 1, 2, 3, 4])
def test_a_block_that_is_forced_twice_counts_once(last):
    """Init and local blocks overlap in a short request."""
    chosen = choose([0.0] * 8, last=last, topk=6, init_blocks=2, local_blocks=3)
    assert chosen == [*range(last + 1)] + [-1] * (5 - last)


def test_fewer_blocks_than_topk_chooses_all_and_pads():
    assert choose([3, 1, 2], topk=5) == [0, 1, 2, -1, -1]
    assert choose([3, 1, 2, 9, 9], last=1, topk=4) == [0, 1, -1, -1]


@functools.cache
def _long_row():
    row = np.random.default_rng(0).standard_normal(8192).astype(np.float32)
    row[4100], row[8191] = 9.0, 8.0
    return row


def test_blocks_past_4096_are_found():
    """A row of a million tokens: the best block is 4100, the second best the last one."""
    assert choose(_long_row(), topk=2) == [4100, 8191]
    assert choose(_long_row(), topk=1) == [4100]
    assert 4100 in choose(_long_row(), topk=16, local_blocks=1)


def test_a_short_request_chooses_the_same_on_a_server_for_long_ones():
    """30 blocks in a table of 8192 columns, whose other scores are loud."""
    short = np.random.default_rng(1).standard_normal(30).astype(np.float32)
    wide = np.full(8192, np.inf, np.float32)
    wide[:30] = short
    options = dict(last=29, topk=16, local_blocks=1)
    assert choose(short, **options) == choose(wide, **options)


def test_padding_rows_choose_nothing():
    args = checks.inputs(STEM, TIES)
    out = checks.run(
        STEM,
        TIES,
        position=args["position"].at[4].set(-1),
        scores=args["scores"].at[4].set(jnp.nan),
    )
    assert (out[4] == -1).all()
    others = np.delete(np.arange(9), 4)
    assert checks.same_bits(out[others], checks.run(STEM, TIES)[others])


def test_scores_of_invisible_blocks_are_ignored():
    args = checks.inputs(STEM, TIES)
    for loud in (jnp.inf, jnp.nan):
        scores = args["scores"].at[..., 61:].set(loud)
        assert checks.same_bits(checks.run(STEM, TIES, scores=scores), checks.run(STEM, TIES))


@checks.row_counts(16, 40)
def test_rows_do_not_depend_on_their_number(variant, counts):
    scores = np.round(np.asarray(checks.normal(0, checks.ALL_ROWS, 2, variant)) * 4)
    position = np.random.default_rng(1).integers(-1, variant * 128, checks.ALL_ROWS)
    checks.assert_row_counts(
        lambda rows, _: op.index_topk(*rows, page=128, topk=8, init_blocks=1, local_blocks=1),
        (scores, position.astype(np.int32)),
        (),
        counts,
    )
