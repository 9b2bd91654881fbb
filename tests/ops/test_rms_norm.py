"""rms_norm: CELLS against a float64 loop, the weight convention, and rows that do not mix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import rms_norm as op
from m31jax.ops.op import Impl, Kind, NoImplementation
from tests.ops import checks, loops

STEM = "rms_norm"
KEYS = jax.random.split(jax.random.key(1), 3)


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args, out = checks.inputs(STEM, cell), checks.run(STEM, cell)
    want = loops.rms_norm(args["x"], args["weight"], args["eps"], args["offset"])
    # One rounding to bfloat16 (eps 2^-7, half a unit of the entry itself), else float32 arithmetic.
    eps = 2.0**-8 if out.dtype == jnp.bfloat16 else 2.0**-23
    loops.close(out, want, 1.5, eps)
    assert op.CELLS[cell].spec["dtype"] == out.dtype


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


@pytest.mark.parametrize(
    "wrong",
    [dict(offset=0.0), dict(offset=2.0), dict(eps=1e-3), dict(eps=0.0, scale=1e-3)],
    ids=["1 + w forgotten", "weight shifted twice", "other eps", "no eps on a small row"],
)
def test_teeth(wrong):
    args = dict(checks.inputs(STEM, 2))
    args["x"] = args["x"] * wrong.pop("scale", 1.0)
    with pytest.raises(AssertionError):
        op.compare(op.rms_norm(**args | wrong), op.rms_norm(**args))


def test_teeth_of_swapped_rows():
    checks.assert_teeth(STEM, 2, checks.run(STEM, 2)[::-1])


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_a_loud_row_stays_alone():
    x = checks.inputs(STEM, 2)["x"]
    loud = checks.run(STEM, 2, x=x.at[4].set(jnp.nan).at[9].set(jnp.inf))
    others = np.delete(np.arange(len(x)), [4, 9])
    assert checks.same_bits(loud[others], checks.run(STEM, 2)[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_is_stored_around_zero(dtype):
    """A weight of 0 gives the plain normalised row, -1 gives zero: it is shifted once, here."""
    x = (5 * jax.random.normal(KEYS[0], (5, 96))).astype(dtype)
    plain = loops.rms_norm(x, np.zeros(96), 1e-6, 1.0)
    out = op.rms_norm(x, jnp.zeros(96), eps=1e-6, offset=1.0)
    loops.close(out, plain, 1.5, 2.0**-8 if dtype == "bfloat16" else 2.0**-23)
    assert not op.rms_norm(x, -jnp.ones(96), eps=1e-6, offset=1.0).any()
    assert checks.same_bits(out, op.rms_norm(x, jnp.ones(96), eps=1e-6, offset=0.0))


def test_small_bfloat16_weight_is_added_in_float32():
    """1 + 2^-9 is 1 in bfloat16; the sum must keep it."""
    x = jnp.ones((1, 32))
    out = op.rms_norm(x, jnp.full(32, 2.0**-9), eps=0.0, offset=1.0)
    np.testing.assert_array_equal(out, np.full((1, 32), np.float32(1 + 2.0**-9)))


def test_a_row_of_zeros_is_zero():
    x = jax.random.normal(KEYS[0], (3, 64)).at[1].set(0.0)
    out = op.rms_norm(x, jnp.ones(64), eps=1e-6, offset=1.0)
    assert not out[1].any()
    assert jnp.isfinite(out).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_their_number(dtype):
    x = jax.random.normal(KEYS[1], (checks.ALL_ROWS, 200)).astype(dtype)
    weight = 0.3 * jax.random.normal(KEYS[2], (200,))
    checks.assert_row_counts(lambda x, w: op.rms_norm(x, w, eps=1e-6, offset=1.0), x, weight)


def test_an_implementation_that_does_not_exist_is_refused():
    args = checks.inputs(STEM, 2)
    with pytest.raises(NoImplementation, match="rms_norm has no cute implementation for sm_90"):
        op.rms_norm(**args, impl=Impl(Kind.CUTE, "sm_90"))
