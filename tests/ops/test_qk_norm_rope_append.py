"""qk_norm_rope_append: CELLS against a float64 loop, angles at long positions, what is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax import kv_format
from m31jax.kv_format import KVFormat
from m31jax.ops import oracle
from m31jax.ops import qk_norm_rope_append as op
from m31jax.ops.op import REFERENCE
from m31jax.ops.qk_norm_rope_append import HeadGeometry, NormWeights, Projected
from tests.ops import checks, loops

STEM = "qk_norm_rope_append"
DECODE, VERIFY, DENSE, PADDED = range(4)
# From float32's roundings in norm and rotation, against a row's largest magnitude.
ULPS = 4


def places(args):
    """(row, page, offset) of each row that is stored."""
    for t, p in enumerate(np.asarray(args["position"])):
        if p >= 0:
            yield t, int(args["page_table"][args["slot"][t], p // 128]), int(p % 128)


def assert_stored(pool, layer, rows, args, fmt):
    """`rows` [T, K, H] lie, stored, at their places, and nothing but zeros lies elsewhere."""
    got, want = loops.cached_values(pool), np.zeros(loops.cached_values(pool).shape)
    stored = loops.store(rows, fmt)
    for t, page, offset in places(args):
        at = (layer, page, slice(None), offset) if got.ndim == 5 else (layer, page, offset)
        want[at] = stored[t] if got.ndim == 5 else stored[t, 0]
    if fmt == "f32":
        loops.close(got, want, ULPS)
        return
    # float32 and float64 disagree on a value only where it sits on a boundary of the format
    differ = got != want
    assert differ.sum() <= 1e-3 * (want != 0).sum(), f"{differ.sum()} stored values differ"
    loops.close(got, want, 1, {"bf16": 2.0**-7, "fp8": 1 / 8, "nvfp4": 1 / 3}[fmt])


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args, out = checks.inputs(STEM, cell), checks.run(STEM, cell)
    x, weights, heads = args["x"], args["weights"], args["heads"]
    turned = functools.partial(loops.norm_rope, position=args["position"], heads=heads)
    loops.close(out.q, turned(x.q, weights.q), ULPS)
    fmt = op.CELLS[cell].spec["fmt"]
    assert_stored(out.k_pool, args["layer"], turned(x.k, weights.k), args, fmt)
    assert_stored(out.v_pool, args["layer"], np.asarray(x.v, np.float64), args, fmt)
    if x.index_k is None:
        assert out.index_q is out.index_pool is None
        return
    loops.close(out.index_q, turned(x.index_q, weights.index_q), ULPS)
    index_k = turned(np.asarray(x.index_k)[:, None], weights.index_k)
    assert_stored(out.index_pool, args["index_layer"], index_k, args, fmt)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG = {
    "position off by one": lambda a: dict(position=a["position"] + (a["position"] >= 0)),
    "page table shifted": lambda a: dict(page_table=jnp.roll(a["page_table"], 1, axis=1)),
    "slots swapped": lambda a: dict(slot=1 - a["slot"]),
    "q and k weights swapped": lambda a: dict(
        weights=a["weights"]._replace(q=a["weights"].k, k=a["weights"].q)
    ),
    "k and v swapped": lambda a: dict(x=a["x"]._replace(k=a["x"].v, v=a["x"].k)),
    "other index query weight": lambda a: dict(
        weights=a["weights"]._replace(index_q=a["weights"].q)
    ),
    "other index key": lambda a: dict(x=a["x"]._replace(index_k=a["x"].k[:, 0])),
}


@pytest.mark.parametrize("cell", [DECODE, VERIFY])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong, cell):
    changed = wrong(checks.inputs(STEM, cell))
    checks.assert_teeth(STEM, cell, checks.run(STEM, cell, **changed))


def _one_code_each(out):
    """Every stored index key off by one code."""
    data = out.index_pool.data
    return out._replace(index_pool=out.index_pool._replace(data=jnp.where(data, data ^ 0x11, 0)))


WRONG_OUTPUTS = {
    "index pool missing": lambda out: out._replace(index_pool=None),
    "another layer": lambda out: out._replace(
        k_pool=out.k_pool._replace(data=out.k_pool.data[::-1])
    ),
    "scales not written": lambda out: out._replace(
        k_pool=out.k_pool._replace(scale=jnp.zeros_like(out.k_pool.scale))
    ),
    "one code off everywhere": _one_code_each,
    "a neighbour written": lambda out: out._replace(
        k_pool=out.k_pool._replace(data=out.k_pool.data.at[1, 4, 0, 7].set(0x22))
    ),
}


@pytest.mark.parametrize("wrong", WRONG_OUTPUTS.values(), ids=WRONG_OUTPUTS)
def test_teeth_of_the_pools(wrong):
    checks.assert_teeth(STEM, VERIFY, wrong(checks.run(STEM, VERIFY)))


@pytest.mark.parametrize("wrong", [dict(rotary_dim=64), dict(rope_theta=1e4), dict(offset=0.0)])
def test_teeth_of_the_constants(wrong):
    args = checks.inputs(STEM, DENSE)
    changed = args | dict(heads=args["heads"]._replace(**wrong))
    checks.assert_teeth(STEM, DENSE, op.qk_norm_rope_append(**changed))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


@pytest.mark.parametrize("cell", [VERIFY, PADDED])
def test_only_the_rows_own_places_are_written(cell):
    """A pool of loud bytes keeps every one of them elsewhere, codes and scales alike."""
    args = checks.inputs(STEM, cell)

    def loud(stored):
        return jax.tree.map(
            lambda part: jnp.asarray(np.full(part.shape, 0x7F, np.uint8).view(part.dtype)), stored
        )

    pools = {name: loud(args[name]) for name in ("k_pool", "v_pool", "index_pool")}
    out, plain = checks.run(STEM, cell, **pools), checks.run(STEM, cell)
    for name, before in pools.items():
        layer = args["index_layer" if name == "index_pool" else "layer"]
        parts = zip(getattr(out, name), getattr(plain, name), before, strict=True)
        for got, written, old in parts:
            if got is None:
                continue
            want = np.array(old).view(np.uint8)
            for _, page, offset in places(args):
                at = (layer, page, ..., offset, slice(None))
                want[at] = np.asarray(written).view(np.uint8)[at]
            np.testing.assert_array_equal(np.asarray(got).view(np.uint8), want)


def test_padding_rows_are_stored_nowhere_whatever_they_hold():
    args = checks.inputs(STEM, PADDED)
    assert args["position"][-3:].tolist() == [-1, -1, -1]
    x = jax.tree.map(lambda part: part.at[-3:].set(jnp.nan), args["x"])
    loud = checks.run(STEM, PADDED, x=x, slot=args["slot"].at[-3:].set(1))
    plain = checks.run(STEM, PADDED)
    assert checks.same_bits(loud[2:], plain[2:])
    assert checks.same_bits(loud.q[:3], plain.q[:3])


def test_a_row_past_the_page_table_is_stored_nowhere():
    """Its column would otherwise be clamped to the last page of the slot."""
    args = checks.inputs(STEM, DECODE)
    out = checks.run(STEM, DECODE, position=args["position"].at[1].set(3 * 128))
    alone = checks.run(STEM, DECODE, position=args["position"].at[1].set(-1))
    assert checks.same_bits(out[2:], alone[2:])


def test_zero_rows_store_zeros_and_touch_nobody():
    args = checks.inputs(STEM, VERIFY)
    x = jax.tree.map(lambda part: part.at[2].set(0.0), args["x"])
    out, plain = checks.run(STEM, VERIFY, x=x), checks.run(STEM, VERIFY)
    (_, page, offset) = list(places(args))[2]
    for name in ("k_pool", "v_pool", "index_pool"):
        got, old = (kv_format.decode(getattr(o, name)) for o in (out, plain))
        layer = args["index_layer" if name == "index_pool" else "layer"]
        assert not got[layer, page, ..., offset, :].any()
        assert checks.same_bits(got, old.at[layer, page, ..., offset, :].set(0.0))
    assert not out.q[2].any()


def test_head_norm_weights_are_stored_around_zero():
    """Per head, as in the residual norms: 0 gives the plain normalised head, -1 gives zero."""
    args = checks.inputs(STEM, DENSE)
    plain, none = (
        checks.run(STEM, DENSE, weights=NormWeights(jnp.full(64, w), jnp.full(64, w)))
        for w in (0.0, -1.0)
    )
    unit = loops.rms_norm(args["x"].q, np.zeros(64), 1e-6, 1.0)
    loops.close(plain.q[..., 32:], unit[..., 32:], ULPS)  # channels that are not rotated
    np.testing.assert_allclose(np.square(plain.q).mean(axis=-1), 1, rtol=1e-5)
    assert not none.q.any()
    assert not none.k_pool.data.any()


def test_queries_in_e4m3():
    args = checks.inputs(STEM, DECODE)
    heads = args["heads"]._replace(e4m3_q=True, e4m3_index_q=True)
    x = args["x"]._replace(q=args["x"].q * 100)
    weights = args["weights"]._replace(q=args["weights"].q.at[3].set(1e4))
    changed = args | dict(x=x, weights=weights)
    plain = checks.run(STEM, DECODE, x=x, weights=weights)
    call, arrays = oracle.bind(STEM, changed | dict(heads=heads), REFERENCE)
    out = jax.jit(call)(arrays)
    assert np.abs(plain.q).max() > 448  # saturates rather than NaN
    for got, wide in ((out.q, plain.q), (out.index_q, plain.index_q)):
        assert got.dtype == wide.dtype
        flat = np.asarray(wide, np.float64).ravel()
        want = np.reshape([loops.to_e4m3(v) for v in flat], wide.shape)
        np.testing.assert_array_equal(got, want)
    assert checks.same_bits(out[2:], plain[2:])


LIMITS = {2_048: 6.2e-5, 131_072: 4.0e-3, 1_048_576: 3.2e-2}


def test_angles_at_long_positions():
    """Cosine and sine against float64 angles of the float32 frequencies, up to position 2^20 - 1.

    What is off is the float32 product of position and frequency: half a unit of an angle of up to
    647,000 rad is 2^-5. Measured: 5.8e-5 below position 2048, 3.6e-3 below 2^17, 3.08e-2 below
    2^20. The cosine of the rounded angle itself is right to 3.3e-8 at every position.
    """
    rng = np.random.default_rng(0)
    position = np.unique(
        np.concatenate([np.arange(2048), rng.integers(0, 2**20, 2000), 2**20 - np.arange(1, 65)])
    ).astype(np.int32)
    x = np.zeros((len(position), 1, 128), np.float32)
    x[..., :32] = 1  # the rotated pair is (cos, sin)
    turned = jax.jit(lambda x, p: op.rotate(x, p, 64, 5e6))(x, position)
    cos, sin = turned[:, 0, :32], turned[:, 0, 32:64]
    assert not turned[:, 0, 64:].any()
    frequency = loops.inv_freq(64, 5e6)
    exact = position[:, None].astype(np.float64) * frequency.astype(np.float64)
    for limit, bound in LIMITS.items():
        near = position < limit
        assert np.abs(cos - np.cos(exact))[near].max() < bound
        assert np.abs(sin - np.sin(exact))[near].max() < bound
    rounded = (position[:, None].astype(np.float32) * frequency).astype(np.float64)
    assert np.abs(cos - np.cos(rounded)).max() < 6e-8
    assert np.abs(sin - np.sin(rounded)).max() < 6e-8


def test_frequencies_are_those_of_the_theory():
    theory = 5e6 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(loops.inv_freq(64, 5e6), theory, rtol=2.0**-23)


@checks.row_counts(("float32", "f32"), ("bfloat16", "nvfp4"))
def test_rows_do_not_depend_on_their_number(variant, counts):
    """Queries, and what is stored of each row: row t lies at offset t of page 1."""
    dtype, fmt = variant[0], KVFormat(variant[1])
    rows = checks.ALL_ROWS
    x = Projected(
        *(checks.normal(seed, rows, 4 // seed, 64, dtype=dtype) for seed in (1, 2, 2)),
        checks.normal(3, rows, 2, 64, dtype=dtype),
        checks.normal(4, rows, 64, dtype=dtype),
    )
    weights = NormWeights(*(0.3 * checks.normal(seed, 64) for seed in range(4)))
    heads = HeadGeometry(1e-6, 1.0, 32, 5e6, fmt, fmt)

    def call(rows, weights):
        x, position = rows
        pools = [op.cells.empty_pool(shape, fmt) for shape in ((1, 2, 2, 128, 64), (1, 2, 128, 64))]
        out = op.qk_norm_rope_append(
            x,
            weights,
            pools[0],
            pools[0],
            pools[1],
            jnp.ones((1, 1), jnp.int32),
            jnp.zeros_like(position),
            position,
            layer=0,
            index_layer=0,
            heads=heads,
        )
        k, v = (
            jax.tree.map(lambda part: jnp.moveaxis(part[0, 1], 1, 0)[: len(position)], pool)
            for pool in (out.k_pool, out.v_pool)
        )
        index_k = jax.tree.map(lambda part: part[0, 1, : len(position)], out.index_pool)
        return out.q, out.index_q, k, v, index_k

    checks.assert_row_counts(call, (x, np.arange(rows, dtype=np.int32)), weights, counts)
