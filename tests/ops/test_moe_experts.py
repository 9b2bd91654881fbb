"""moe_experts: CELLS against a float64 loop, the NVFP4 input rules, padding, and zero blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from m31jax.ops import moe_experts as op
from m31jax.ops.mlp import SwiGLU
from m31jax.ops.weight import Weight
from tests.ops import checks, loops
from tests.ops.test_mlp import WRONG_NUMBERS, clamp_crossing

STEM = "moe_experts"
VENDOR, MXFP8, DENSE = 1, 2, 3
RUN = jax.jit(op.moe_experts, static_argnames=("swiglu", "slices", "quantize_input"))
OPTIONS = dict(swiglu=SwiGLU(1.702, 7.0, 1.0), slices=4)


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    out, spec = checks.run(STEM, cell), op.CELLS[cell].spec
    assert out.shape == (spec["T"], spec["S"], spec["D"])
    loops.close(out, loops.moe_experts(**checks.inputs(STEM, cell)), 64)


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


def _scaled(weight, change):
    return Weight(weight.data, weight.scale, change(weight.scale_2))


WRONG = {
    "up before gate": lambda a: dict(
        gate_up=Weight(*(None if p is None else p[:, ::-1] for p in a["gate_up"]))
    ),
    "reciprocal outer scale": lambda a: dict(gate_up=_scaled(a["gate_up"], lambda s: 1 / s)),
    "outer scales of other experts": lambda a: dict(
        down=_scaled(a["down"], lambda s: jnp.roll(s, 1))
    ),
    "group scales shifted": lambda a: dict(
        down=a["down"]._replace(scale=jnp.roll(a["down"].scale, 1, axis=-1))
    ),
    "nibbles swapped": lambda a: dict(
        down=a["down"]._replace(data=(a["down"].data >> 4) | (a["down"].data << 4))
    ),
    "weights of another expert": lambda a: dict(weights=a["weights"][:, ::-1]),
    "other experts": lambda a: dict(ids=(a["ids"] + 1) % 16),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong):
    changed = wrong(checks.inputs(STEM, VENDOR))
    checks.assert_teeth(STEM, VENDOR, checks.run(STEM, VENDOR, **changed))


def test_teeth_of_a_forgotten_input_rule():
    args = checks.inputs(STEM, VENDOR) | dict(quantize_input=False)
    checks.assert_teeth(STEM, VENDOR, RUN(**args))


@pytest.mark.parametrize(
    ("fmt", "quantize"), [("dense", False), ("mxfp8", True), ("nvfp4", False), ("nvfp4", True)]
)
def test_every_clamp_is_crossed(fmt, quantize):
    """One expert whose gate and up lie below, at and above the limit: the formula in float64."""
    x, gate, up = clamp_crossing()
    both = np.stack([gate, up])[None]
    shape = both.shape
    if fmt == "nvfp4":
        codes = np.searchsorted(loops.E2M1, np.abs(both)) + 8 * (both < 0)
        packed = jnp.asarray(codes[..., 0::2] | codes[..., 1::2] << 4, jnp.uint8)
        scale = jnp.ones((*shape[:-1], 4), jnp.float8_e4m3fn)
        gate_up = Weight(packed, scale, jnp.ones((1, 2)))
    elif fmt == "mxfp8":
        power = jnp.full((*shape[:-1], 2), 127, jnp.uint8)
        gate_up = Weight(jnp.asarray(both, jnp.float8_e4m3fn), power)
    else:
        gate_up = Weight(jnp.asarray(both))
    np.testing.assert_array_equal(loops.weight_values(gate_up), both)
    args = dict(
        x=x,
        ids=jnp.zeros((2, 1), jnp.int32),
        weights=jnp.asarray([[1.0], [0.5]]),
        gate_up=gate_up,
        down=checks.weight(0, 1, 64, 32, fmt=fmt),
        quantize_input=quantize,
        **OPTIONS | dict(slices=2),
    )
    out = RUN(**args)
    loops.close(out, loops.moe_experts(**args), 32)
    for name, numbers in WRONG_NUMBERS.items():
        # The quantised forms share the dense one's activation: one number is enough for them.
        if fmt == "dense" or name == "offset dropped":
            with pytest.raises(AssertionError):
                op.compare(RUN(**args | dict(swiglu=numbers)), out)


@pytest.mark.parametrize("cell", [VENDOR, MXFP8])
def test_zero_rows_are_zero_and_touch_nobody(cell):
    """Rows of zeros, of values whose reciprocal overflows, and a zero group inside a row."""
    args = checks.inputs(STEM, cell)
    x = args["x"].at[0].set(0.0).at[2, 32:64].set(0.0)
    out, plain = checks.run(STEM, cell, x=x), checks.run(STEM, cell)
    assert not out[0].any()
    assert checks.same_bits(out[1], plain[1])
    loops.close(out, loops.moe_experts(**args | dict(x=x)), 64)
    tiny = checks.run(STEM, cell, x=x.at[0].set(1e-38).at[1].set(0.0).at[1, 3].set(1e-36))
    assert not tiny[0].any()
    assert np.abs(tiny[1]).max() < 1e-30
    assert checks.same_bits(tiny[2], out[2])


def test_one_tiny_value_in_a_zero_row_keeps_its_size():
    """1e-30 alone in its row: the row's own scale carries it through FC1."""
    x = jnp.zeros((2, 64)).at[0, 5].set(1e-30).at[1, 5].set(1.0)
    codes, factor = jax.jit(op.quantize_fc1)(x)
    np.testing.assert_array_equal(codes[0], codes[1])
    assert codes[0, 5] == 2688
    np.testing.assert_allclose(codes[:, 5] * factor[:, 0], [1e-30, 1.0], rtol=2.0**-8)
    assert not codes[:, :5].any()


def test_tiny_groups_of_a_row_become_zero():
    """A group far below its row's maximum has a scale that rounds to zero."""
    row = jnp.concatenate([jnp.full((1, 16), 1.0), jnp.full((1, 16), 1e-9)], axis=1)
    codes, _ = jax.jit(op.quantize_fc1)(row)
    assert codes[0, :16].all()
    assert not codes[0, 16:].any()


@pytest.mark.parametrize("seed", range(3))
def test_fc1_rule_bit_for_bit(seed):
    """Also rows whose quotients sit on ties, which a product with a reciprocal would miss."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((4, 512), np.float32) * np.float32(3)
    x[3] = rng.integers(-24, 25, 512) / np.float32(4)
    x = x.astype(ml_dtypes.bfloat16)
    codes, factor = jax.jit(op.quantize_fc1)(jnp.asarray(x))
    want = [loops.vendor_fc1(row) for row in x.astype(np.float64)]
    np.testing.assert_array_equal(codes, [row for row, _ in want])
    np.testing.assert_array_equal(factor[:, 0], [f for _, f in want])


@pytest.mark.parametrize("seed", range(3))
def test_fc2_rule_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    z = rng.standard_normal((4, 512), np.float32) * np.float32([[0.01], [1], [30], [1000]])
    z[1, ::2] = rng.integers(-24, 25, 256) / np.float32(4)
    z[0, :16] = 0
    got = jax.jit(op.quantize_fc2)(jnp.asarray(z))
    np.testing.assert_array_equal(got, [loops.vendor_fc2(row) for row in z.astype(np.float64)])


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_padding_rows_are_zero_whatever_they_hold():
    args = checks.inputs(STEM, DENSE)
    assert args["ids"][-1].tolist() == [-1, -1]
    loud = checks.run(
        STEM, DENSE, x=args["x"].at[-1].set(jnp.nan), weights=args["weights"].at[-1].set(jnp.nan)
    )
    assert not loud[-1].any()
    assert checks.same_bits(loud, checks.run(STEM, DENSE))


def test_experts_that_nobody_chose_are_not_read():
    """NaN weights of unchosen experts change nothing."""
    args = checks.inputs(STEM, MXFP8)
    ids = jnp.asarray([[0, 2], [0, 2], [2, 3]], jnp.int32)
    nan = Weight(args["down"].data, args["down"].scale.at[1].set(255))
    assert checks.same_bits(
        checks.run(STEM, MXFP8, ids=ids, down=nan), checks.run(STEM, MXFP8, ids=ids)
    )


def test_rows_do_not_see_each_others_experts():
    """A row alone, and among rows that wake every expert, has the same bits."""
    args = checks.inputs(STEM, DENSE)
    ids = jnp.full_like(args["ids"], -1).at[4].set(args["ids"][4])
    assert checks.same_bits(checks.run(STEM, DENSE, ids=ids)[4], checks.run(STEM, DENSE)[4])


@checks.row_counts(("float32", "dense", False), ("bfloat16", "nvfp4", True))
def test_rows_do_not_depend_on_their_number(variant, counts):
    dtype, fmt, quantize = variant
    rng = np.random.default_rng(0)
    ids = np.sort(rng.permuted(np.tile(np.arange(6), (checks.ALL_ROWS, 1)), axis=1)[:, :2], axis=1)
    rows = (
        checks.normal(1, checks.ALL_ROWS, 64, dtype=dtype) * 4,
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.random(ids.shape, np.float32)),
    )
    weights = (
        checks.weight(2, 6, 2, 64, 64, fmt=fmt, dtype=dtype),
        checks.weight(3, 6, 64, 64, fmt=fmt, dtype=dtype),
    )
    checks.assert_row_counts(
        lambda rows, w: op.moe_experts(*rows, *w, quantize_input=quantize, **OPTIONS),
        rows,
        weights,
        counts,
    )
