"""dense_attn: CELLS against a float64 loop, page tables of two widths, unread pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.kv_format import KVFormat
from m31jax.ops import cells
from m31jax.ops import dense_attn as op
from m31jax.ops.sparse_attn import sparse_attn
from tests.ops import checks, loops
from tests.ops.test_sparse_attn import attention, loud_elsewhere

STEM = "dense_attn"
BF16, UNEQUAL = range(2)
PAGE = 128


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args = checks.inputs(STEM, cell) | dict(block_table=None)
    loops.close(checks.run(STEM, cell), attention(args), 32)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG = {
    "page table shifted": lambda a: dict(page_table=jnp.roll(a["page_table"], 1, axis=1)),
    "slots swapped": lambda a: dict(slot=a["slot"][::-1]),
    "position off by one": lambda a: dict(position=a["position"] - 1),
    "k and v swapped": lambda a: dict(k_pool=a["v_pool"], v_pool=a["k_pool"]),
    "query heads swapped": lambda a: dict(q=jnp.roll(a["q"], 1, axis=1)),
    "the other layer": lambda a: dict(k_pool=jax.tree.map(lambda part: part[::-1], a["k_pool"])),
    "heads of the cache swapped": lambda a: dict(
        v_pool=jax.tree.map(lambda part: part[:, :, ::-1], a["v_pool"])
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong):
    changed = wrong(checks.inputs(STEM, UNEQUAL))
    checks.assert_teeth(STEM, UNEQUAL, checks.run(STEM, UNEQUAL, **changed))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


@pytest.mark.parametrize("cell", [BF16, UNEQUAL])
def test_nothing_else_is_read(cell):
    pools = loud_elsewhere(checks.inputs(STEM, cell))
    assert checks.same_bits(checks.run(STEM, cell, **pools), checks.run(STEM, cell))


def test_padding_rows_are_zero():
    args = checks.inputs(STEM, UNEQUAL)
    out = checks.run(
        STEM, UNEQUAL, position=args["position"].at[0].set(-1), q=args["q"].at[0].set(jnp.nan)
    )
    assert not out[0].any()
    assert checks.same_bits(out[1:], checks.run(STEM, UNEQUAL)[1:])
    nobody = checks.run(STEM, UNEQUAL, position=jnp.full_like(args["position"], -1))
    assert not nobody.any()


def test_all_blocks_chosen_is_the_same():
    """A sparse layer whose top-k covers the context attends to all of it, bit for bit."""
    args = checks.inputs(STEM, UNEQUAL)
    blocks = np.tile(np.arange(4, dtype=np.int32), (3, 2, 1))
    blocks[blocks > np.asarray(args["position"])[:, None, None] // PAGE] = -1
    out = sparse_attn(**args, block_table=jnp.asarray(blocks))
    assert checks.same_bits(out, checks.run(STEM, UNEQUAL))


@checks.row_counts(("float32", KVFormat.F32), ("bfloat16", KVFormat.BF16))
def test_rows_depend_neither_on_their_number_nor_on_the_table(variant, counts):
    dtype, fmt = variant
    lengths = (700, 130, 400)
    slot = np.arange(checks.ALL_ROWS) % 3
    position = np.array(lengths)[slot] - 1 - np.arange(checks.ALL_ROWS) % 5
    q = checks.normal(1, checks.ALL_ROWS, 4, 32, dtype=dtype)
    rows = (q, slot.astype(np.int32), position.astype(np.int32))

    def call(rows, rest):
        (q, *where), (pools, table) = rows, rest
        return op.dense_attn(q, *pools, table, *where, layer=0, scale=0.2)

    results = []
    for width in (6, 24):
        rng = np.random.default_rng(0)
        shape = (1, cells.pool_pages(lengths, PAGE), 2, PAGE, 32)
        pools = [cells.pool(rng, shape, fmt) for _ in range(2)]
        rest = (pools, cells.rows(rng, lengths, width, PAGE)["page_table"])
        if width == 6:
            checks.assert_row_counts(call, rows, rest, counts)
        results.append(jax.jit(call)(rows, rest))
    assert checks.same_bits(*results)
