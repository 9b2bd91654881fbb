"""sparse_attn: CELLS against a float64 loop, the block table's axes, masked rows, unread pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.kv_format import KVFormat, Stored
from m31jax.ops import cells
from m31jax.ops import sparse_attn as op
from m31jax.ops.index_score import index_score
from m31jax.ops.index_topk import index_topk
from tests.ops import checks, loops

STEM = "sparse_attn"
FP8, SHORT, NVFP4 = range(3)
PAGE = 128


def attention(args):
    keys, values = (loops.cached_values(args[name])[args["layer"]] for name in ("k_pool", "v_pool"))
    names = ("page_table", "slot", "position", "scale", "block_table")
    return loops.attention(args["q"], keys, values, *(args[name] for name in names))


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    loops.close(checks.run(STEM, cell), attention(checks.inputs(STEM, cell)), 32)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG = {
    "page table shifted": lambda a: dict(page_table=jnp.roll(a["page_table"], 1, axis=1)),
    "slots swapped": lambda a: dict(slot=a["slot"][::-1]),
    "position off by one": lambda a: dict(position=a["position"] - 1),
    "k and v swapped": lambda a: dict(k_pool=a["v_pool"], v_pool=a["k_pool"]),
    "tables of the other head": lambda a: dict(block_table=a["block_table"][:, ::-1]),
    "query heads interleaved": lambda a: dict(
        q=a["q"].reshape(3, 4, 2, 128).swapaxes(1, 2).reshape(3, 8, 128)
    ),
    "the other layer": lambda a: dict(v_pool=jax.tree.map(lambda part: part[::-1], a["v_pool"])),
    "scales of the next token": lambda a: dict(
        v_pool=Stored(a["v_pool"].data, jnp.roll(a["v_pool"].scale, 1, axis=3))
    ),
    "a block less": lambda a: dict(block_table=a["block_table"].at[..., 0].set(-1)),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong):
    changed = wrong(checks.inputs(STEM, NVFP4))
    checks.assert_teeth(STEM, NVFP4, checks.run(STEM, NVFP4, **changed))


def test_teeth_of_the_scale():
    args = checks.inputs(STEM, SHORT)
    checks.assert_teeth(STEM, SHORT, op.sparse_attn(**args | dict(scale=args["scale"] * 1.01)))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def loud_elsewhere(args):
    """Pools with NaN wherever no row of `args` may look: layers, pages, heads, later tokens."""
    table, position = np.asarray(args["page_table"]), np.asarray(args["position"])
    slot, kv_heads = np.asarray(args["slot"]), args["k_pool"].data.shape[2]
    blocks = np.asarray(args["block_table"]) if "block_table" in args else None
    seen = np.zeros(args["k_pool"].data.shape[:4], bool)
    for t, h in np.ndindex(len(position), kv_heads):
        for n in range(position[t] + 1):
            if blocks is None or n // PAGE in blocks[t, h]:
                seen[args["layer"], table[slot[t], n // PAGE], h, n % PAGE] = True

    def loud(part):
        bits = np.array(part)
        bits[~seen] = np.uint8(0xFF) if bits.dtype == np.uint8 else np.nan
        return jnp.asarray(bits)

    return {name: jax.tree.map(loud, args[name]) for name in ("k_pool", "v_pool")}


@pytest.mark.parametrize("cell", [FP8, SHORT, NVFP4])
def test_nothing_else_is_read(cell):
    pools = loud_elsewhere(checks.inputs(STEM, cell))
    assert checks.same_bits(checks.run(STEM, cell, **pools), checks.run(STEM, cell))


@pytest.mark.parametrize("how", ["padding", "no block", "future blocks"])
def test_a_row_that_sees_nothing_is_zero(how):
    """Never NaN, which would spread through the residual stream."""
    args = checks.inputs(STEM, NVFP4)
    position, table = args["position"], args["block_table"]
    if how == "padding":
        position = position.at[1].set(-1)
    elif how == "no block":
        table = table.at[1].set(-1)
    else:
        table = table.at[1].set(jnp.asarray([6, 6, 7]))
    q = args["q"].at[1].set(args["q"][1] * 1e3)
    out = checks.run(STEM, NVFP4, position=position, block_table=table, q=q)
    assert not out[1].any()
    assert checks.same_bits(out[::2], checks.run(STEM, NVFP4)[::2])


def test_huge_scores_stay_finite():
    """Dot products past the range of exp, of both signs."""
    args = checks.inputs(STEM, SHORT)
    q = args["q"] * jnp.asarray([[[1e4]], [[-1e4]]])
    out = checks.run(STEM, SHORT, q=q)
    assert jnp.isfinite(out).all()
    loops.close(out, attention(args | dict(q=q)), 2**12)  # one key takes all, or two share


def test_every_row_and_head_has_its_own_blocks():
    """As many rows as KV heads: only the axis order of the table tells them apart.

    Four rows and four heads in a context of 20 blocks. Pair (t, g) has its best block at
    1 + 4 t + g, where a one-hot key waits for its one-hot query. Chosen: it and the row's own.
    """
    rows = heads = 4
    position = 20 * PAGE - rows + np.arange(rows)
    order = np.random.default_rng(0).permutation(20)
    table = jnp.asarray(1 + order[None], jnp.int32)
    keys = np.zeros((1, 21, PAGE, 64), np.float32)
    query = np.zeros((rows, heads, 64), np.float32)
    for t, g in np.ndindex(rows, heads):
        block = 1 + 4 * t + g
        keys[0, 1 + order[block], 3 * t + g, block] = 1
        query[t, g, block] = 2 + t
    where = (table, jnp.zeros(rows, jnp.int32), jnp.asarray(position, jnp.int32))
    scores = index_score(jnp.asarray(query), Stored(jnp.asarray(keys)), *where, layer=0)
    chosen = index_topk(scores, where[2], page=PAGE, topk=2, init_blocks=0, local_blocks=1)
    want = [[[1 + 4 * t + g, 19] for g in range(heads)] for t in range(rows)]
    assert chosen.tolist() == want
    np.testing.assert_array_equal(scores, loops.index_score(query, keys[0], *where))

    rng = np.random.default_rng(1)
    shape = (1, 21, heads, PAGE, 32)
    pools = [cells.pool(rng, shape, KVFormat.F32) for _ in range(2)]
    q = checks.normal(2, rows, 2 * heads, 32)
    run = jax.jit(lambda table: op.sparse_attn(q, *pools, *where, table, layer=0, scale=0.2))
    out = run(chosen)
    values = [np.asarray(pool.data[0]) for pool in pools]
    loops.close(out, loops.attention(q, *values, *where, 0.2, chosen), 32)
    with pytest.raises(AssertionError):
        op.compare(run(jnp.swapaxes(chosen, 0, 1)), out)


@checks.row_counts(("float32", KVFormat.F32), ("bfloat16", KVFormat.FP8))
def test_rows_do_not_depend_on_their_number(variant, counts):
    dtype, fmt = variant
    rng = np.random.default_rng(0)
    lengths = (700, 130, 400)
    shape = (1, cells.pool_pages(lengths, PAGE), 2, PAGE, 32)
    pools = [cells.pool(rng, shape, fmt) for _ in range(2)]
    table = cells.rows(rng, lengths, 6, PAGE)["page_table"]
    slot = np.arange(checks.ALL_ROWS) % 3
    position = np.array(lengths)[slot] - 1 - np.arange(checks.ALL_ROWS) % 5
    blocks = np.full((checks.ALL_ROWS, 2, 3), -1, np.int32)
    for t, g in np.ndindex(blocks.shape[:2]):
        ids = np.sort(rng.permutation(position[t] // PAGE + 1)[:3])
        blocks[t, g, : len(ids)] = ids
    q = checks.normal(1, checks.ALL_ROWS, 4, 32, dtype=dtype)

    def call(rows, rest):
        (q, *where, blocks), (pools, table) = rows, rest
        return op.sparse_attn(q, *pools, table, *where, blocks, layer=0, scale=0.2)

    rows = (q, slot.astype(np.int32), position.astype(np.int32), blocks)
    checks.assert_row_counts(call, rows, (pools, table), counts)
