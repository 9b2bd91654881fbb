"""mlp: CELLS against a float64 loop, the three numbers of the activation, and slices over ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import mlp as op
from m31jax.ops.mlp import SwiGLU
from m31jax.ops.weight import Weight
from tests.ops import checks, loops

STEM = "mlp"
RUN = jax.jit(op.mlp, static_argnames=("swiglu", "slices", "quantize_input"))
OPTIONS = dict(swiglu=SwiGLU(1.702, 7.0, 1.0), slices=4)
WRONG_NUMBERS = {
    "offset dropped": SwiGLU(1.702, 7.0, 0.0),
    "plain SiLU": SwiGLU(1.0, 7.0, 1.0),
    "no clamp": SwiGLU(1.702, 1e9, 1.0),
}


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    out, spec = checks.run(STEM, cell), op.CELLS[cell].spec
    assert out.shape == (spec["T"], spec["S"], spec["D"])
    assert out.dtype == jnp.float32
    loops.close(out, loops.mlp(**checks.inputs(STEM, cell)), 64)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


@pytest.mark.parametrize("numbers", WRONG_NUMBERS.values(), ids=WRONG_NUMBERS)
def test_teeth_of_the_activation(numbers):
    wrong = RUN(**checks.inputs(STEM, 1) | dict(swiglu=numbers))
    checks.assert_teeth(STEM, 1, wrong)


def test_teeth_of_operands_and_scales():
    for cell, changed in (
        (1, lambda args: dict(gate=args["up"], up=args["gate"])),
        (1, lambda args: dict(down=Weight(args["down"].data[:, ::-1]))),
        (0, lambda args: dict(up=Weight(args["up"].data, 254 - args["up"].scale))),
    ):
        args = checks.inputs(STEM, cell)
        checks.assert_teeth(STEM, cell, checks.run(STEM, cell, **changed(args)))


def test_swiglu_has_no_defaults():
    """A number that is forgotten is an error, not a plain SiLU."""
    for present in (dict(alpha=1.0), dict(alpha=1.0, limit=7.0), dict(limit=7.0, beta=1.0)):
        with pytest.raises(TypeError):
            SwiGLU(**present)


def clamp_crossing():
    """(rows, gate, up): each gate pre-activation of -20, -7, 0, 7, 20 meets each up of -20, 0, 20.

    Sums of values that every weight format holds exactly; the remaining channel is zero.
    """
    pairs = [(g, u) for g in (-20, -7, 0, 7, 20) for u in (-20, 0, 20)] + [(0, 0)] * 17
    parts = {20: (6, 6, 6, 2), 7: (6, 1), 0: ()}
    gate, up = np.zeros((2, len(pairs), 64), np.float32)
    for channel, pair in enumerate(pairs):
        for weight, value in zip((gate, up), pair, strict=True):
            terms = parts[abs(value)]
            weight[channel, 5 : 5 + len(terms)] = np.sign(value) * np.array(terms)
    return jnp.ones((2, 64)), gate, up


@pytest.mark.parametrize("fmt", ["dense", "mxfp8"])
def test_every_clamp_is_crossed(fmt):
    """Gate and up far below, at and far above the limit: equal to the formula in float64."""
    x, gate, up = clamp_crossing()
    power = np.full((len(gate), 2), 127, np.uint8)
    gate, up = (
        Weight(jnp.asarray(w))
        if fmt == "dense"
        else Weight(jnp.asarray(w, jnp.float8_e4m3fn), jnp.asarray(power))
        for w in (gate, up)
    )
    down = checks.weight(0, 64, 32, fmt=fmt)
    args = dict(x=x, gate=gate, up=up, down=down, quantize_input=fmt == "mxfp8", **OPTIONS)
    out = RUN(**args)
    loops.close(out, loops.mlp(**args), 16)
    for name, numbers in WRONG_NUMBERS.items():
        if fmt == "dense" or name == "offset dropped":  # the activation is the same code
            with pytest.raises(AssertionError):
                op.compare(RUN(**args | dict(swiglu=numbers)), out)


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_loud_rows_stay_alone_and_zero_rows_are_zero():
    x = checks.inputs(STEM, 0)["x"]
    loud = checks.run(STEM, 0, x=x.at[2].set(jnp.nan).at[5].set(0.0).at[6].set(1e-40))
    others = np.array([0, 1, 3, 4, 7])
    assert checks.same_bits(loud[others], checks.run(STEM, 0)[others])
    assert not loud[5:7].any()


def test_bfloat16_rounds_each_product():
    """Gate and up leave as bfloat16, and so does the activation, as in layers of their own."""
    x = checks.normal(0, 3, 64, dtype="bfloat16") * 4
    gate, up = (checks.weight(seed, 32, 64, dtype="bfloat16") for seed in (1, 2))
    identity = Weight(jnp.eye(64, 32, dtype=jnp.bfloat16))
    out = RUN(x, gate, up, identity, quantize_input=False, swiglu=OPTIONS["swiglu"], slices=1)
    products = (loops.linear(x, weight, False).ravel() for weight in (gate, up))
    rounded = (map(loops.to_bf16, product) for product in products)
    want = [
        loops.to_bf16(loops.activation(g, u, *OPTIONS["swiglu"]))
        for g, u in zip(*rounded, strict=True)
    ]
    np.testing.assert_array_equal(out[:, 0, :32], np.reshape(want, (3, 32)))


@pytest.mark.parametrize(("dtype", "fmt"), [("float32", "dense"), ("bfloat16", "mxfp8")])
def test_slices_have_the_same_bits_at_every_tensor_parallel_width(dtype, fmt):
    """Rank r holds run r of the intermediate axis; eight slices over all ranks."""
    x = checks.normal(0, 3, 64, dtype=dtype)
    gate, up = (checks.weight(seed, 256, 64, fmt=fmt, dtype=dtype) for seed in (1, 2))
    down = checks.weight(3, 64, 256, fmt=fmt, dtype=dtype)

    def run(slices, gate, up, down):
        options = OPTIONS | dict(slices=slices)
        return np.asarray(RUN(x, gate, up, down, quantize_input=True, **options))

    def cut(weight, axis, rank):
        parts = (None if p is None else np.split(np.asarray(p), tp, axis)[rank] for p in weight)
        return Weight(*(None if part is None else jnp.asarray(part) for part in parts))

    whole = run(8, gate, up, down)
    for tp in (2, 8) if fmt == "dense" else (8,):
        own = [
            run(8 // tp, cut(gate, 0, rank), cut(up, 0, rank), cut(down, 1, rank))
            for rank in range(tp)
        ]
        assert checks.same_bits(np.concatenate(own, axis=1), whole), f"tp={tp}"


@checks.row_counts("float32", "bfloat16")
def test_rows_do_not_depend_on_their_number(variant, counts):
    weights = [checks.weight(seed, 96, 64, dtype=variant) for seed in (1, 2)]
    checks.assert_row_counts(
        lambda x, w: op.mlp(x, *w, quantize_input=False, **OPTIONS),
        checks.normal(0, checks.ALL_ROWS, 64, dtype=variant),
        [*weights, checks.weight(3, 64, 96, dtype=variant)],
        counts,
    )
