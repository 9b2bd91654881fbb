"""row_linear: CELLS against a float64 loop, and slices that do not depend on the rank count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import row_linear as op
from m31jax.ops.weight import Weight
from tests.ops import checks, loops

STEM = "row_linear"


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    out, spec = checks.run(STEM, cell), op.CELLS[cell].spec
    assert out.shape == (spec["T"], spec["S"], spec["N"])
    assert out.dtype == jnp.float32
    loops.close(out, loops.row_linear(**checks.inputs(STEM, cell)), 16)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


WRONG = {
    "slices": lambda x, w, out: jnp.roll(out, 1, axis=1),
    "outputs": lambda x, w, out: out[..., ::-1],
    "scale": lambda x, w, out: checks.run(STEM, 1, weight=Weight(w.data, 254 - w.scale)),
    "inputs": lambda x, w, out: checks.run(STEM, 1, x=x[:, ::-1]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong):
    args = checks.inputs(STEM, 1)
    checks.assert_teeth(STEM, 1, wrong(args["x"], args["weight"], checks.run(STEM, 1)))


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_loud_rows_stay_alone_and_zero_rows_are_zero():
    x = checks.inputs(STEM, 1)["x"]
    loud = checks.run(STEM, 1, x=x.at[0].set(jnp.nan).at[2].set(0.0))
    assert checks.same_bits(loud[1], checks.run(STEM, 1)[1])
    assert not loud[2].any()


@pytest.mark.parametrize("slices", [0, 3, 7])
def test_slices_that_do_not_divide_the_inputs_are_refused(slices):
    with pytest.raises(ValueError, match=f"slices={slices} does not divide the 128 inputs"):
        op.row_linear(
            jnp.ones((1, 128)), checks.weight(0, 32, 128), slices=slices, quantize_input=False
        )


def _cut(weight, tp, rank):
    """Rank `rank`'s columns of a weight."""

    def columns(part):
        return np.split(np.asarray(part), tp, axis=1)[rank]

    return Weight(*(None if part is None else jnp.asarray(columns(part)) for part in weight))


@pytest.mark.parametrize(("dtype", "fmt"), [("float32", "dense"), ("bfloat16", "mxfp8")])
def test_slices_have_the_same_bits_at_every_tensor_parallel_width(dtype, fmt):
    """Eight slices over all ranks, whatever the number of ranks."""
    x = np.asarray(checks.normal(0, 5, 256, dtype=dtype))
    weight = checks.weight(1, 48, 256, fmt=fmt, dtype=dtype)
    run = jax.jit(op.row_linear, static_argnames=("slices", "quantize_input"))
    whole = run(x, weight, slices=8, quantize_input=True)
    for tp in (2, 4, 8):
        own = [
            np.asarray(run(part, _cut(weight, tp, rank), slices=8 // tp, quantize_input=True))
            for rank, part in enumerate(np.split(x, tp, axis=1))
        ]
        assert checks.same_bits(np.concatenate(own, axis=1), whole), f"tp={tp}"


@checks.row_counts("float32", "bfloat16")
def test_rows_do_not_depend_on_their_number(variant, counts):
    checks.assert_row_counts(
        lambda x, w: op.row_linear(x, w, slices=8, quantize_input=False),
        checks.normal(1, checks.ALL_ROWS, 256, dtype=variant),
        checks.weight(2, 96, 256, dtype=variant),
        counts,
    )
