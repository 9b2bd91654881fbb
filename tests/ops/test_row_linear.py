"""row_linear: CELLS against a float64 loop, and slices that do not depend on the number of ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import linear
from m31jax.ops import row_linear as op
from m31jax.ops.weight import Weight
from tests.ops import checks, loops

STEM = "row_linear"
KEYS = jax.random.split(jax.random.key(3), 3)


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    args, out = checks.inputs(STEM, cell), checks.run(STEM, cell)
    spec = op.CELLS[cell].spec
    assert out.shape == (spec["T"], spec["S"], spec["N"])
    assert out.dtype == jnp.float32
    loops.close(out, loops.row_linear(**args), 16)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


@pytest.mark.parametrize("wrong", ["slices", "scale", "outputs", "inputs"])
def test_teeth(wrong):
    weight = checks.inputs(STEM, 1)["weight"]
    right = checks.run(STEM, 1)
    changed = {
        "slices": lambda: jnp.roll(right, 1, axis=1),
        "scale": lambda: checks.run(STEM, 1, weight=Weight(weight.data, 254 - weight.scale)),
        "outputs": lambda: right[..., ::-1],
        "inputs": lambda: checks.run(STEM, 1, x=checks.inputs(STEM, 1)["x"][:, ::-1]),
    }
    checks.assert_teeth(STEM, 1, changed[wrong]())


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_loud_rows_stay_alone_and_zero_rows_are_zero():
    x = jax.random.normal(KEYS[0], (4, 128))
    weight = linear.random_weight(KEYS[1], (32, 128), "mxfp8")
    options = dict(slices=4, quantize_input=True)
    right = op.row_linear(x, weight, **options)
    loud = op.row_linear(x.at[1].set(jnp.nan).at[3].set(0.0), weight, **options)
    assert checks.same_bits(loud[::2], right[::2])
    assert not loud[3].any()


@pytest.mark.parametrize("slices", [0, 3, 7])
def test_slices_that_do_not_divide_the_inputs_are_refused(slices):
    weight = linear.random_weight(KEYS[0], (32, 128), "dense")
    with pytest.raises(ValueError, match=f"slices={slices} does not divide the 128 inputs"):
        op.row_linear(jnp.ones((1, 128)), weight, slices=slices, quantize_input=False)


def cut(weight, tp, rank):
    """Rank `rank`'s columns of a weight."""

    def columns(part):
        width = part.shape[1] // tp
        return part[:, rank * width : (rank + 1) * width]

    return Weight(*(None if part is None else columns(part) for part in weight))


@pytest.mark.parametrize("fmt", ["dense", "mxfp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slices_have_the_same_bits_at_every_tensor_parallel_width(fmt, dtype):
    """Eight slices over all ranks, whatever their number."""
    x = jax.random.normal(KEYS[0], (5, 256)).astype(dtype)
    weight = linear.random_weight(KEYS[1], (48, 256), fmt)
    if fmt == "dense":
        weight = Weight(weight.data.astype(dtype))
    run = jax.jit(op.row_linear, static_argnames=("slices", "quantize_input"))
    whole = run(x, weight, slices=8, quantize_input=True)
    for tp in (2, 4, 8):
        own = [
            run(part, cut(weight, tp, rank), slices=8 // tp, quantize_input=True)
            for rank, part in enumerate(jnp.split(x, tp, axis=1))
        ]
        assert checks.same_bits(jnp.concatenate(own, axis=1), whole), f"tp={tp}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_do_not_depend_on_their_number(dtype):
    x = jax.random.normal(KEYS[1], (checks.ALL_ROWS, 256)).astype(dtype)
    weight = Weight(linear.random_weight(KEYS[2], (96, 256), "dense").data.astype(dtype))
    checks.assert_row_counts(
        lambda x, w: op.row_linear(x, w, slices=8, quantize_input=False), x, weight
    )


def test_the_slices_add_up_to_the_linear_layer():
    args = checks.inputs(STEM, 1)
    whole = linear.linear(args["x"], args["weight"], quantize_input=True)
    loops.close(np.asarray(checks.run(STEM, 1)).sum(axis=1), whole, 16)
