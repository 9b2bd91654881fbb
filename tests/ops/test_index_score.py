"""index_score: CELLS against a float64 loop, page tables, unread pages, rows that do not mix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.kv_format import KVFormat
from m31jax.ops import cells
from m31jax.ops import index_score as op
from tests.ops import checks, loops

STEM = "index_score"
PAGE_MULTIPLE, FP8, NVFP4 = 1, 2, 3


def score(args):
    keys = loops.cached_values(args["index_pool"])[args["layer"]]
    return loops.index_score(
        args["index_q"], keys, args["page_table"], args["slot"], args["position"]
    )


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args, out = checks.inputs(STEM, cell), checks.run(STEM, cell)
    want = score(args)
    np.testing.assert_array_equal(np.isneginf(out), np.isneginf(want))
    finite = np.where(np.isneginf(want), 0, want)
    loops.close(np.where(np.isneginf(want), 0, out), finite, 8)
    lengths = np.asarray(op.CELLS[cell].spec["lengths"])
    assert np.isfinite(want).sum(axis=2).tolist() == [
        [-(-n // 128)] * out.shape[1] for n in lengths
    ]


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG = {
    "page table shifted": lambda a: dict(page_table=jnp.roll(a["page_table"], 1, axis=1)),
    "slots swapped": lambda a: dict(slot=a["slot"][::-1]),
    "position off by one": lambda a: dict(position=a["position"] - 1),
    "heads swapped": lambda a: dict(index_q=a["index_q"][:, ::-1]),
    "the other layer": lambda a: dict(
        index_pool=jax.tree.map(lambda part: part[::-1], a["index_pool"])
    ),
    "channels swapped": lambda a: dict(index_q=jnp.roll(a["index_q"], 1, axis=2)),
}


@pytest.mark.parametrize("cell", [FP8, NVFP4])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong, cell):
    changed = wrong(checks.inputs(STEM, cell))
    if wrong is WRONG["position off by one"]:
        # make the newest key the best one of its block
        position = checks.inputs(STEM, cell)["position"]
        changed = dict(position=position - position % 128 - 1)
    checks.assert_teeth(STEM, cell, checks.run(STEM, cell, **changed))


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_row_sees_its_own_key_and_no_later_one(offset):
    """The best key of all lies at the row's position, or one after it."""
    args = checks.inputs(STEM, PAGE_MULTIPLE)
    position = args["position"] - 5
    pool = np.array(args["index_pool"].data)
    for t, p in enumerate(position):
        page = args["page_table"][t, p // 128]
        pool[1, page, p % 128] = 10 * args["index_q"][t, 0]
    stored = args["index_pool"]._replace(data=jnp.asarray(pool))
    own = checks.run(STEM, PAGE_MULTIPLE, position=position, index_pool=stored)
    other = checks.run(STEM, PAGE_MULTIPLE, position=position + offset, index_pool=stored)
    rows = np.arange(len(position))
    best = np.asarray(own)[rows, 0, position // 128]
    np.testing.assert_allclose(best, 10 * np.square(args["index_q"][:, 0]).sum(axis=-1), rtol=1e-5)
    seen = np.asarray(other)[rows, 0, position // 128]
    assert ((seen == best) if offset > 0 else (seen < best)).all()


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


@pytest.mark.parametrize("cell", range(4))
def test_nothing_else_is_read(cell):
    """NaN in the guard page, in the other layer and after each row's position."""
    args = checks.inputs(STEM, cell)
    nan = {"float32": np.nan, "bfloat16": np.nan, "uint8": 0xFF}

    def loud(part):
        if part is None:
            return None
        out = np.array(part)
        out[0] = out[1, 0] = nan[str(out.dtype)]
        for t, p in enumerate(np.asarray(args["position"])):
            out[1, args["page_table"][t, p // 128], p % 128 + 1 :] = nan[str(out.dtype)]
        return jnp.asarray(out)

    pool = args["index_pool"]
    stored = pool._replace(data=loud(pool.data), scale=loud(pool.scale))
    assert checks.same_bits(checks.run(STEM, cell, index_pool=stored), checks.run(STEM, cell))


def test_padding_rows_score_nothing():
    args = checks.inputs(STEM, FP8)
    position = args["position"].at[1].set(-1)
    query = args["index_q"].at[1].set(jnp.nan)
    out, plain = checks.run(STEM, FP8, position=position, index_q=query), checks.run(STEM, FP8)
    assert np.isneginf(out[1]).all()
    assert checks.same_bits(out[::2], plain[::2])


def _many_rows(dtype, fmt, width):
    """64 rows of four requests of unequal length, at most 9 pages each."""
    rng = np.random.default_rng(0)
    lengths = (1100, 130, 700, 7)
    where = cells.rows(rng, lengths, width, 128)
    pool = cells.pool(rng, (1, cells.pool_pages(lengths, 128), 128, 64), fmt)
    slot = np.arange(checks.ALL_ROWS) % 4
    position = np.array(lengths)[slot] - 1 - np.arange(checks.ALL_ROWS) % 7
    rows = (
        checks.normal(1, checks.ALL_ROWS, 2, 64, dtype=dtype),
        slot.astype(np.int32),
        position.astype(np.int32),
    )
    return rows, (pool, where["page_table"])


@checks.row_counts(("float32", KVFormat.F32), ("bfloat16", KVFormat.NVFP4))
def test_rows_depend_neither_on_their_number_nor_on_the_table(variant, counts):
    results = []
    for width in (9, 24):
        rows, rest = _many_rows(*variant, width)

        def call(rows, rest):
            (q, slot, position), (pool, table) = rows, rest
            return op.index_score(q, pool, table, slot, position, layer=0)

        if width == 9:
            checks.assert_row_counts(call, rows, rest, counts)
        results.append(np.asarray(jax.jit(call)(rows, rest)))
    assert checks.same_bits(results[0], results[1][..., :9])
    assert np.isneginf(results[1][..., 9:]).all()
