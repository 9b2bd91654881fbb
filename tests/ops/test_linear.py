"""linear: CELLS against a float64 loop, scales, quantised inputs, and the promise of the tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import linear as op
from m31jax.ops.weight import Weight
from tests.ops import checks, loops

STEM = "linear"
RUN = jax.jit(op.linear, static_argnames=("quantize_input", "out_dtype"))


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    out = checks.run(STEM, cell)
    assert len(out) == op.CELLS[cell].spec["T"]
    loops.close(out, loops.linear(**checks.inputs(STEM, cell)), 16)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG_WEIGHTS = {
    "outputs in another order": lambda w: Weight(w.data[::-1], w.scale[::-1]),
    "reciprocal scale": lambda w: Weight(w.data, 254 - w.scale),
    "scale of the next row": lambda w: Weight(w.data, jnp.roll(w.scale, 1, axis=0)),
    "scale of the next group": lambda w: Weight(w.data, jnp.roll(w.scale, 1, axis=1)),
    "one scale doubled": lambda w: Weight(w.data, w.scale.at[3, 1].add(1)),
    "one value doubled": lambda w: Weight(w.data.at[5, 7].set(w.data[5, 7] * 2), w.scale),
}


@pytest.mark.parametrize("wrong", WRONG_WEIGHTS.values(), ids=WRONG_WEIGHTS)
def test_teeth(wrong):
    weight = wrong(checks.inputs(STEM, 2)["weight"])
    checks.assert_teeth(STEM, 2, checks.run(STEM, 2, weight=weight))


def test_teeth_of_a_forgotten_quantisation():
    args = checks.inputs(STEM, 2) | dict(quantize_input=True)
    checks.assert_teeth(STEM, 2, op.linear(**args))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_loud_rows_stay_alone():
    x = checks.inputs(STEM, 3)["x"]
    loud = checks.run(STEM, 3, x=x.at[2].set(jnp.nan).at[17].set(jnp.inf))
    others = np.delete(np.arange(len(x)), [2, 17])
    assert checks.same_bits(loud[others], checks.run(STEM, 3)[others])


def test_zero_inputs_give_zeros_and_touch_nobody():
    """A row of zeros, one below float32's normal range, and a group of zeros inside a row."""
    args = checks.inputs(STEM, 1)
    x = args["x"].at[1].set(0.0).at[3].set(1e-40).at[4, 32:64].set(0.0)
    out, plain = checks.run(STEM, 1, x=x), checks.run(STEM, 1)
    assert not out[jnp.array([1, 3])].any()
    others = np.array([0, 2, 5, 6, 7])
    assert checks.same_bits(out[others], plain[others])
    loops.close(out[4:5], loops.linear(x[4:5], args["weight"], quantize_input=True), 16)


@pytest.mark.parametrize("quantize_input", [False, True])
def test_bfloat16_rows_round_once(quantize_input):
    weight = checks.weight(0, 48, 256, fmt="mxfp8")
    x = checks.normal(1, 3, 256, dtype="bfloat16")
    out = RUN(x, weight, quantize_input=quantize_input)
    wide = RUN(x, weight, quantize_input=quantize_input, out_dtype=jnp.float32)
    loops.close(wide, loops.linear(x, weight, quantize_input), 16)
    assert out.dtype == jnp.bfloat16
    assert checks.same_bits(out, wide.astype(jnp.bfloat16))


def test_a_dense_weight_never_quantises_its_input():
    args = checks.inputs(STEM, 3) | dict(quantize_input=True)
    assert checks.same_bits(RUN(**args), checks.run(STEM, 3))


def test_nvfp4_is_refused():
    with pytest.raises(NotImplementedError, match="moe_experts"):
        op.linear(jnp.ones((1, 64)), checks.weight(0, 32, 64, fmt="nvfp4"), quantize_input=False)


def _rows(dtype, fmt):
    x = checks.normal(1, checks.ALL_ROWS, 384, dtype=dtype)
    return (
        lambda x, w: op.linear(x, w, quantize_input=True, out_dtype=jnp.float32),
        x,
        checks.weight(2, 96, 384, fmt=fmt, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_their_number(dtype):
    checks.assert_row_counts(*_rows(dtype, "dense"))


@checks.row_counts("float32", "bfloat16")
def test_quantised_rows_do_not_depend_on_their_number(variant, counts):
    checks.assert_row_counts(*_rows(variant, "mxfp8"), counts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_tiles_rows_do_depend_on_their_number(monkeypatch, dtype):
    checks.untile(monkeypatch)
    assert checks.row_counts_that_differ(*_rows(dtype, "dense"))
