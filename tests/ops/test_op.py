"""What ops are made of: row tiles, the shape check, comparison, and the oracle that runs them."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.core import Tracer
from jaxtyping import Float, TypeCheckError

from m31jax.ops import STEMS, cells, op, oracle, rms_norm
from m31jax.ops.compare import assert_equal, assert_ulp
from m31jax.ops.op import Cell, Impl, Kind, NoImplementation, checked, map_tiles
from m31jax.ops.weight import Weight, dequantize
from tests.ops import checks, loops


@pytest.mark.parametrize("count", [1, 7, 8, 9, 16, 19])
def test_map_tiles_gives_each_row_its_result(count):
    x = np.arange(count * 3, dtype=np.float32).reshape(count, 3)

    def tile(x, nothing, at):
        assert x.shape == (op.ROW_TILE, 3)
        assert nothing is None
        return {"sum": x.sum(axis=1), "both": (x * 2, at)}

    out = map_tiles(tile, x, None, np.arange(count))
    np.testing.assert_array_equal(out["sum"], x.sum(axis=1))
    np.testing.assert_array_equal(out["both"][0], x * 2)
    np.testing.assert_array_equal(out["both"][1], np.arange(count))


def test_map_tiles_fills_the_last_tile_with_its_last_row():
    """Never with zeros or stale rows: what fills must be as harmless as what is there."""
    out = map_tiles(lambda x: jnp.broadcast_to(x.min(), (8,)), jnp.full((11,), 5.0))
    np.testing.assert_array_equal(out, np.full(11, 5.0))


@pytest.mark.parametrize("is_tiled", [True, False])
def test_a_tile_is_not_fused_with_what_follows(monkeypatch, is_tiled):
    """A product in a tile and a sum outside round twice, in a loop of one tile as in one of eight.

    Without the barrier the loop of one tile is inlined and both become a fused multiply-add.
    """
    if not is_tiled:
        monkeypatch.setattr(jax.lax, "optimization_barrier", lambda x: x)
    x, total = checks.normal(0, 64, 500), checks.normal(1, 64, 500)

    def call(rows, _):
        x, total = rows
        return total + map_tiles(lambda x: 1.1 * x, x)

    assert bool(checks.row_counts_that_differ(call, (x, total))) is not is_tiled


def test_annotations_are_the_shape_check():
    @checked
    def add(x: Float[jax.Array, "T D"], y: Float[jax.Array, " D"]) -> Float[jax.Array, "T D"]:
        return x + y

    assert add(jnp.ones((2, 3)), jnp.ones(3)).shape == (2, 3)
    for x, y in (((2, 3), (2,)), ((3,), (3,))):
        with pytest.raises(TypeCheckError):
            add(jnp.ones(x), jnp.ones(y))
    with pytest.raises(TypeCheckError):
        jax.eval_shape(add, jnp.ones((2, 3)), jnp.ones(3, jnp.int32))


def test_impl_is_static_and_cell_is_frozen():
    assert hash(Impl()) == hash(Impl(Kind.REFERENCE, "cpu"))
    assert Impl(Kind.PALLAS, "sm_90") != Impl(Kind.PALLAS, "sm_100")
    cell = Cell("why", dict(T=1))
    assert hash(cell) == hash(Cell("why", dict(T=2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        cell.why = "other"


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, ml_dtypes.float8_e4m3fn])
def test_assert_equal(dtype):
    a = np.arange(6).reshape(2, 3).astype(dtype)
    assert_equal(a, a, "x")
    b = a.copy()
    b[1, 2] = 7
    with pytest.raises(AssertionError, match=r"x: 1 of 6 entries differ, first at \(1, 2\)"):
        assert_equal(b, a, "x")
    for other in (a[:1], a.astype(np.int8)):
        with pytest.raises(AssertionError, match=f"x: {other.dtype}.*, expected {a.dtype}"):
            assert_equal(other, a, "x")


def test_assert_equal_sees_nan_bytes_and_signed_zeros():
    nan = np.array([0x7F, 0x80], np.uint8).view(ml_dtypes.float8_e4m3fn)
    assert_equal(nan, nan, "x")
    with pytest.raises(AssertionError):
        assert_equal(nan, np.array([0xFF, 0], np.uint8).view(ml_dtypes.float8_e4m3fn), "x")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_assert_ulp_counts_in_units_of_the_row(dtype):
    eps = float(ml_dtypes.finfo(dtype).eps)
    ref = jnp.asarray([[8.0, 1.0, -jnp.inf], [2.0, 0.0, 1.0], [0.0, 0.0, 0.0]]).astype(dtype)
    assert_ulp(ref, ref, 0, "x")
    near = ref.at[0, 1].add(8 * eps)
    assert_ulp(near, ref, 1, "x")
    for wrong in (
        ref.at[0, 1].add(16 * eps),
        ref.at[1, 1].add(8 * eps),
        ref.at[0, 2].set(-1e30),
        ref.at[1, 0].set(jnp.nan),
        ref.at[1, 2].set(jnp.inf),
        ref.at[2, 1].set(1e-30),
    ):
        with pytest.raises(AssertionError, match=r"1 of 9 entries past 1 ulp"):
            assert_ulp(wrong, ref, 1, "x")


def test_assert_ulp_refuses_other_shapes_and_dtypes():
    ref = jnp.ones((2, 3))
    for wrong in (jnp.ones((2, 2)), jnp.ones((2, 3), jnp.bfloat16)):
        with pytest.raises(AssertionError, match="expected float32"):
            assert_ulp(wrong, ref, 1e9, "x")
    nan = ref.at[0, 0].set(jnp.nan)
    assert_ulp(nan, nan, 0, "x")


@pytest.mark.parametrize("fmt", ["dense", "mxfp8", "nvfp4"])
def test_stored_weights_and_their_values(fmt):
    weight = checks.weight(0, 3, 2, 8, 64, fmt=fmt)
    assert weight.format == fmt
    want = loops.weight_values(weight)
    np.testing.assert_allclose(dequantize(weight, jnp.float32), want, rtol=2.0**-23)
    taken = weight.take(1)
    assert taken.format == fmt
    np.testing.assert_array_equal(loops.weight_values(taken), want[1])
    assert 0.5 < np.std(want) * 8 < 2  # products with normal rows are of order one


def test_cells_are_a_function_of_the_key():
    same, again, other = (
        oracle.module("moe_experts").make_inputs(
            oracle.module("moe_experts").CELLS[0].spec, jax.random.key(seed)
        )
        for seed in (1, 1, 2)
    )
    assert checks.same_bits(same["gate_up"], again["gate_up"])
    assert not checks.same_bits(same["gate_up"], other["gate_up"])


def test_rows_of_cells_own_disjoint_pages():
    rng = np.random.default_rng(0)
    made = cells.rows(rng, (300, 128, 1), 5, 128)
    table = np.asarray(made["page_table"])
    assert (table > 0).sum(axis=1).tolist() == [3, 1, 1]
    owned = table[table > 0]
    assert sorted(owned) == [1, 2, 3, 4, 5]
    assert cells.pool_pages((300, 128, 1), 128) == 6
    assert made["position"].tolist() == [299, 127, 0]


@pytest.mark.parametrize("stem", STEMS)
def test_every_op_has_a_reference_and_counts_its_bytes(stem):
    module = oracle.module(stem)
    arch = oracle.arch_of(oracle.device())
    assert oracle.implementations(stem, arch)[0] == Impl(Kind.REFERENCE, arch)
    for cell in module.CELLS:
        assert module.bytes_moved(cell.spec) > 0
    assert len({cell.why for cell in module.CELLS}) == len(module.CELLS)


def test_oracle_gives_a_verdict_a_cell():
    verdicts = oracle.run("rms_norm")
    assert [verdict.cell for verdict in verdicts] == [cell.why for cell in rms_norm.CELLS]
    assert {(v.op, v.impl, v.outcome, v.problem) for v in verdicts} == {
        ("rms_norm", Impl(), "agrees", None)
    }


def test_oracle_tells_a_wrong_implementation(monkeypatch):
    right = rms_norm.reference

    def wrong(x, weight, *, eps, offset):
        return right(x, weight, eps=eps, offset=offset + isinstance(x, Tracer))

    monkeypatch.setattr(rms_norm, "reference", wrong)
    verdicts = oracle.run("rms_norm", Kind.REFERENCE)
    assert {verdict.outcome for verdict in verdicts} == {"disagrees"}
    assert "past 2 ulp of their row" in verdicts[0].problem


def test_oracle_reports_what_an_implementation_does_not_cover(monkeypatch):
    """A kernel's own limit is a verdict; its absence is an error."""
    public = rms_norm.rms_norm

    def narrow(x, weight, *, eps, offset, impl):
        if impl.kind is Kind.PALLAS:
            raise NotImplementedError("rows of 7 only")
        return public(x, weight, eps=eps, offset=offset, impl=impl)

    monkeypatch.setattr(rms_norm, "rms_norm", narrow)
    arch = oracle.arch_of(oracle.device())
    assert [impl.kind for impl in oracle.implementations("rms_norm", arch)] == [
        Kind.REFERENCE,
        Kind.PALLAS,
    ]
    verdicts = oracle.run("rms_norm", "pallas")
    assert {(v.outcome, v.problem) for v in verdicts} == {("not covered", "rows of 7 only")}
    with pytest.raises(NoImplementation, match="rms_norm has no cute implementation"):
        oracle.run("rms_norm", "cute")


def test_oracle_names_what_it_knows():
    with pytest.raises(ValueError, match="no op 'norm'; the ops are rms_norm, linear"):
        oracle.run("norm")
    with pytest.raises(ValueError, match="no kind 'fast' of implementation; the kinds are refer"):
        oracle.run("rms_norm", "fast")


def test_architectures():
    class Device:
        platform, compute_capability = "gpu", "9.0"

    assert oracle.arch_of(Device()) == "sm_90"
    assert oracle.arch_of(oracle.device()) == "cpu"


def test_a_weight_without_its_outer_scale_is_mxfp8():
    """The format follows from the parts; there is no flag to disagree with them."""
    assert Weight(jnp.ones((2, 32))).format == "dense"
    assert Weight(jnp.ones((2, 32)), jnp.ones((2, 1))).format == "mxfp8"
