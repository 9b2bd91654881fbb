"""linear: CELLS against a float64 loop, scales, quantised inputs, and the promise of fixed tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import linear as op
from m31jax.ops.weight import Weight
from tests.ops import checks, loops

STEM = "linear"
KEYS = jax.random.split(jax.random.key(2), 3)


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args, out = checks.inputs(STEM, cell), checks.run(STEM, cell)
    assert len(out) == op.CELLS[cell].spec["T"]
    loops.close(out, loops.linear(args["x"], args["weight"], args["quantize_input"]), 16)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


def _wrong_weights(weight):
    data, scale = weight.data, weight.scale
    yield "outputs in another order", Weight(data[::-1], scale[::-1])
    yield "reciprocal scale", Weight(data, 254 - scale)
    yield "scale of the next row", Weight(data, jnp.roll(scale, 1, axis=0))
    yield "scale of the next group", Weight(data, jnp.roll(scale, 1, axis=1))
    yield "one scale doubled", Weight(data, scale.at[3, 1].add(1))
    bits = jax.lax.bitcast_convert_type(data, jnp.uint8).at[5, 7].add(1)
    yield "one code moved", Weight(jax.lax.bitcast_convert_type(bits, jnp.float8_e4m3fn), scale)


@pytest.mark.parametrize("number", range(6))
def test_teeth(number):
    name, weight = list(_wrong_weights(checks.inputs(STEM, 2)["weight"]))[number]
    assert name
    checks.assert_teeth(STEM, 2, checks.run(STEM, 2, weight=weight))


def test_teeth_of_a_forgotten_quantisation():
    args = dict(checks.inputs(STEM, 2))
    with pytest.raises(AssertionError):
        op.compare(op.linear(**args | dict(quantize_input=True)), op.linear(**args))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_loud_rows_stay_alone():
    x = checks.inputs(STEM, 3)["x"]
    loud = checks.run(STEM, 3, x=x.at[2].set(jnp.nan).at[17].set(jnp.inf))
    others = np.delete(np.arange(len(x)), [2, 17])
    assert checks.same_bits(loud[others], checks.run(STEM, 3)[others])


def test_rows_of_zeros_give_zeros_and_touch_nobody():
    """Also a group of zeros inside a row, and a row of values below float32's normal range."""
    weight = op.random_weight(KEYS[0], (64, 128), "mxfp8")
    x = jax.random.normal(KEYS[1], (5, 128))
    quiet = x.at[1].set(0.0).at[3].set(1e-40).at[4, 32:64].set(0.0)
    out = op.linear(quiet, weight, quantize_input=True)
    assert not out[jnp.array([1, 3])].any()
    assert checks.same_bits(out[::2][:2], op.linear(x, weight, quantize_input=True)[::2][:2])
    loops.close(out[4:], loops.linear(quiet[4:], weight, True), 16)


@pytest.mark.parametrize("quantize_input", [False, True])
def test_bfloat16_rows_round_once(quantize_input):
    weight = op.random_weight(KEYS[0], (48, 256), "mxfp8")
    x = jax.random.normal(KEYS[1], (3, 256)).astype(jnp.bfloat16)
    want = loops.linear(x, weight, quantize_input)
    out = op.linear(x, weight, quantize_input=quantize_input)
    assert out.dtype == jnp.bfloat16
    loops.close(out, want, 0.5, 1.01 * 2.0**-7)
    wide = op.linear(x, weight, quantize_input=quantize_input, out_dtype=jnp.float32)
    loops.close(wide, want, 16)
    assert checks.same_bits(out, wide.astype(jnp.bfloat16))


def test_a_dense_weight_never_quantises_its_input():
    weight = op.random_weight(KEYS[0], (32, 64), "dense")
    x = jax.random.normal(KEYS[1], (3, 64))
    outs = [op.linear(x, weight, quantize_input=flag) for flag in (False, True)]
    assert checks.same_bits(*outs)


def test_nvfp4_is_refused():
    codes, scale = jnp.zeros((32, 32), jnp.uint8), jnp.zeros((32, 4), jnp.float8_e4m3fn)
    weight = Weight(codes, scale, jnp.float32(1))
    with pytest.raises(NotImplementedError, match="moe_experts"):
        op.linear(jnp.ones((1, 64)), weight, quantize_input=False)


def _rows(dtype, fmt):
    x = jax.random.normal(KEYS[1], (checks.ALL_ROWS, 384)).astype(dtype)
    weight = op.random_weight(KEYS[2], (96, 384), fmt)
    if fmt == "dense":
        weight = Weight(weight.data.astype(dtype))
    return lambda x, w: op.linear(x, w, quantize_input=True), x, weight


@pytest.mark.parametrize("fmt", ["dense", "mxfp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_their_number(dtype, fmt):
    checks.assert_row_counts(*_rows(dtype, fmt))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_fixed_tiles_rows_do_depend_on_their_number(monkeypatch, dtype):
    checks.untile(monkeypatch)
    assert checks.row_counts_that_differ(*_rows(dtype, "dense"))
