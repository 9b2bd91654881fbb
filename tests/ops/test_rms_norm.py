"""rms_norm: CELLS against a float64 loop, the weight convention, and rows that do not mix."""

import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import rms_norm as op
from m31jax.ops.op import Impl, Kind, NoImplementation
from tests.ops import checks, loops

STEM = "rms_norm"
# Half a unit of a bfloat16 entry and a little, or two of float32.
EPS = {"bfloat16": 0.51 * 2.0**-7, "float32": 2.0**-22}


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args, out = checks.inputs(STEM, cell), checks.run(STEM, cell)
    loops.close(out, loops.rms_norm(**args), 1, EPS[str(out.dtype)])
    assert out.dtype == op.CELLS[cell].spec["dtype"]


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
    args["x"] = args["x"] * wrong.get("scale", 1.0)
    wrong = {name: value for name, value in wrong.items() if name != "scale"}
    with pytest.raises(AssertionError):
        op.compare(op.rms_norm(**args | wrong), op.rms_norm(**args))


def test_teeth_of_swapped_rows():
    checks.assert_teeth(STEM, 2, checks.run(STEM, 2)[::-1])


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_loud_rows_stay_alone():
    x = checks.inputs(STEM, 2)["x"]
    loud = checks.run(STEM, 2, x=x.at[4].set(jnp.nan).at[9].set(jnp.inf))
    others = np.delete(np.arange(len(x)), [4, 9])
    assert checks.same_bits(loud[others], checks.run(STEM, 2)[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_is_stored_around_zero(dtype):
    """A weight of 0 gives the plain normalised row, -1 gives zero: it is shifted once, here."""
    x = checks.normal(0, 5, 96, dtype=dtype) * 5
    out = op.rms_norm(x, jnp.zeros(96), eps=1e-6, offset=1.0)
    loops.close(out, loops.rms_norm(x, np.zeros(96), 1e-6, 1.0), 1, EPS[dtype])
    assert not op.rms_norm(x, -jnp.ones(96), eps=1e-6, offset=1.0).any()
    assert checks.same_bits(out, op.rms_norm(x, jnp.ones(96), eps=1e-6, offset=0.0))


def test_a_small_weight_is_added_in_float32():
    """1 + 2^-9 is 1 in bfloat16."""
    out = op.rms_norm(jnp.ones((1, 32)), jnp.full(32, 2.0**-9), eps=0.0, offset=1.0)
    np.testing.assert_array_equal(out, np.full((1, 32), np.float32(1 + 2.0**-9)))


def test_a_row_of_zeros_is_zero():
    x = checks.inputs(STEM, 2)["x"].at[1].set(0.0)
    out = checks.run(STEM, 2, x=x)
    assert not out[1].any()
    assert jnp.isfinite(out).all()


@checks.row_counts("float32", "bfloat16")
def test_rows_do_not_depend_on_their_number(variant, counts):
    x = checks.normal(1, checks.ALL_ROWS, 200, dtype=variant)
    checks.assert_row_counts(
        lambda x, w: op.rms_norm(x, w, eps=1e-6, offset=1.0), x, checks.normal(2, 200), counts
    )


def test_an_implementation_that_does_not_exist_is_refused():
    args = checks.inputs(STEM, 2)
    with pytest.raises(NoImplementation, match="rms_norm has no cute implementation for sm_90"):
        op.rms_norm(**args, impl=Impl(Kind.CUTE, "sm_90"))
