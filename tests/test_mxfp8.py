"""MXFP8 against outside producers, against exact arithmetic, and on values that break scales."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from m31jax import mxfp8
from tests.golden import golden_dir

E4M3_DTYPE = ml_dtypes.float8_e4m3fn
E4M3 = np.arange(256, dtype=np.uint8).view(E4M3_DTYPE).astype(np.float32)
F32_MAX = float(np.finfo(np.float32).max)
# Compiled once: a new lambda in each example of a property would compile each time.
QUANTIZE = jax.jit(mxfp8.quantize)
ROUND_TRIP = jax.jit(lambda x: mxfp8.dequantize(*mxfp8.quantize(x)))


def raw(x: Any) -> np.ndarray:
    """An array's bytes as unsigned integers, so that NaN, -0 and float8 compare exactly."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


def agree(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of fn as NumPy, after checking that eager and jitted runs give the same bits."""
    eager, compiled = fn(*args), jax.jit(fn)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(raw(a), raw(b)), eager, compiled)
    return jax.tree.map(np.asarray, compiled)


def exact_byte(amax: float) -> int:
    """clamp(ceil(log2(amax / 448)) + 127, 0, 254) without rounding: 448 = 7 * 2^6."""
    if amax == 0:
        return 0
    numerator, denominator = float(amax).as_integer_ratio()
    byte = 0
    while byte < 254 and numerator * 2**127 > 448 * denominator * 2**byte:
        byte += 1
    return byte


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(golden_dir() / "quant.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("prefix", ["mxfp8_f32", "mxfp8_bf16"])
def test_golden(golden, prefix):
    x = golden[f"{prefix}/x"]
    data, scale = agree(mxfp8.quantize, x)
    np.testing.assert_array_equal(scale, golden[f"{prefix}/scale_e8m0"])
    np.testing.assert_array_equal(scale, golden[f"{prefix}/torchao_scale_e8m0"])
    # Two groups hold float32 subnormals only, which count as zero here; the producers disagree on
    # them among themselves.
    subnormal = np.zeros(x.shape, bool)
    subnormal[7:9, :32] = True
    assert (np.abs(x[subnormal]) < 2.0**-126).all()
    assert not raw(data)[subnormal].any()
    for producer in ("data_e4m3", "torchao_data_e4m3"):
        theirs = golden[f"{prefix}/{producer}"]
        np.testing.assert_array_equal(raw(data)[~subnormal], theirs[~subnormal])
    decoded = agree(mxfp8.dequantize, data, scale)
    np.testing.assert_array_equal(decoded[~subnormal], golden[f"{prefix}/dequant"][~subnormal])
    assert not decoded[subnormal].any()


def test_scale_byte_is_exact_around_every_power():
    """448 * 2^k and its neighbours, over all of float32; 448 * 2^k itself belongs to k."""
    edges = [math.ldexp(448, k) for k in range(-134, 120)]
    bits = np.array(edges, np.float32).view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)
    amax = bits.view(np.float32).reshape(-1)
    x = np.zeros((amax.size, 32), np.float32)
    x[:, 11] = -amax
    data, scale = agree(mxfp8.quantize, x)
    np.testing.assert_array_equal(scale[:, 0], [exact_byte(float(a)) for a in amax])
    scaled = np.abs(data.astype(np.float32)[:, 11])
    inside = scale[:, 0] > 0
    assert (scaled[inside] >= 224).all()
    assert (scaled <= 448).all()


def test_scale_byte_equals_the_product_rule_for_every_mantissa():
    """Producers round amax * (1/448) up to a power of two; here it is a comparison of mantissas."""
    mantissa = np.arange(1 << 23, dtype=np.uint32)
    amax = (mantissa | np.uint32(130 << 23)).view(np.float32)
    product = (amax * np.float32(1 / 448)).view(np.uint32)
    theirs = (product >> 23) + ((product & 0x7FFFFF) != 0)
    ours = np.asarray(jax.jit(mxfp8._scale_byte)(amax))
    assert (ours == theirs).all()


def test_data_equals_exact_scaling_in_numpy():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(256, 64)) * 2.0 ** rng.integers(-90, 90, size=(256, 1))).astype("f4")
    data, scale = agree(mxfp8.quantize, x)
    power = 127.0 - scale.astype(np.float64).repeat(32, axis=-1)
    expected = np.clip(x * 2.0**power, -448, 448).astype(np.float32).astype(E4M3_DTYPE)
    np.testing.assert_array_equal(raw(data), raw(expected))


@pytest.mark.parametrize(
    ("value", "byte", "decoded"),
    [
        (0.0, 0, 0.0),
        (1e-40, 0, 0.0),  # a float32 subnormal
        (2.0**-126, 0, 2.0**-126),
        (3 * 2.0**-126, 0, 3 * 2.0**-126),
        (448 * 2.0**-127, 0, 448 * 2.0**-127),  # the most that byte 0 holds
        (1e-30, 19, 320 * 2.0**-108),  # 1e-30 is 324.5 * 2^-108; steps of 32 there
        (448.0, 127, 448.0),
        (-449.0, 128, -448.0),
        (3e38, 247, 224 * 2.0**120),
        (F32_MAX, 247, np.inf),  # rounds to 2^128
        (np.inf, 254, np.inf),
        (-np.inf, 254, -np.inf),
        (np.nan, 0, 0.0),
    ],
)
def test_stated_results(value, byte, decoded):
    """A group of zeros and one value, and normal groups on both sides that must not notice."""
    x = np.random.default_rng(1).normal(size=(96,)).astype(np.float32)
    around_it = QUANTIZE(x)
    x[32:64] = 0
    x[40] = value
    data, scale = agree(mxfp8.quantize, x)
    assert scale[1] == byte
    values = agree(mxfp8.dequantize, data, scale)
    expected = np.zeros(32, np.float32)
    expected[8] = decoded
    np.testing.assert_array_equal(raw(values[32:64]), raw(expected))
    assert np.isfinite(data.astype(np.float32)).all()
    for group in (0, 2):
        assert scale[group] == around_it[1][group]
        here = slice(32 * group, 32 * group + 32)
        np.testing.assert_array_equal(raw(data[here]), raw(around_it[0][here]))


def test_zero_row_between_normal_rows():
    x = np.random.default_rng(2).normal(size=(3, 64)).astype(np.float32)
    x[1] = 0
    data, scale = agree(mxfp8.quantize, x)
    decoded = agree(mxfp8.dequantize, data, scale)
    assert (raw(decoded[1]) == 0).all()  # +0.0, bit for bit
    for row in (0, 2):
        alone = QUANTIZE(x[row])
        np.testing.assert_array_equal(raw(data[row]), raw(alone[0]))
        np.testing.assert_array_equal(scale[row], alone[1])
        np.testing.assert_allclose(decoded[row], x[row], atol=np.abs(x[row]).max() / 16)


def test_nan_leaves_the_rest_of_its_group_alone():
    x = np.random.default_rng(3).normal(size=(32,)).astype(np.float32)
    x[3] = 0
    clean = agree(mxfp8.quantize, x)
    x[3] = np.nan
    dirty = agree(mxfp8.quantize, x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(raw(a), raw(b)), clean, dirty)


def test_infinity_takes_its_group():
    x = np.full(32, 1e6, np.float32)
    x[0], x[1] = np.inf, 2.0**127
    data, scale = agree(mxfp8.quantize, x)
    assert scale.tolist() == [254]
    assert data.astype(np.float32)[:3].tolist() == [448, 1, 0]


def test_every_scale_byte_decodes():
    scale = np.arange(256, dtype=np.uint8)
    decoded = agree(mxfp8.e8m0_decode, scale)
    expected = np.ldexp(np.float32(1), np.arange(255) - 127).astype(np.float32)
    np.testing.assert_array_equal(raw(decoded[:255]), raw(expected))
    assert decoded.view(np.uint32)[0] == 1 << 22  # 2^-127, subnormal
    assert np.isnan(decoded[255])


def test_every_data_byte_and_scale_byte_decodes():
    """All pairs against float64; a subnormal result is zero, one past float32 infinite."""
    data = np.tile(np.arange(256, dtype=np.uint8).view(E4M3_DTYPE), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    exact = E4M3.astype(np.float64) * 2.0 ** (np.arange(256)[:, None] - 127)
    exact[255] = np.nan
    exact = np.where(np.abs(exact) < 2.0**-126, np.copysign(0, exact), exact)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    for decode in (mxfp8.dequantize, jax.jit(mxfp8.dequantize)):
        np.testing.assert_array_equal(decode(data, scale), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_leading_axes_and_dtypes(dtype):
    x = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3, 4, 64)), dtype)
    data, scale = QUANTIZE(x)
    assert data.shape == (2, 3, 4, 64)
    assert scale.shape == (2, 3, 4, 2)
    flat = QUANTIZE(np.asarray(x).astype(np.float32).reshape(24, 64))
    np.testing.assert_array_equal(raw(data).reshape(24, 64), raw(flat[0]))
    np.testing.assert_array_equal(np.asarray(scale).reshape(24, 2), flat[1])
    mapped = jax.jit(jax.vmap(mxfp8.quantize))(x)
    np.testing.assert_array_equal(raw(data), raw(mapped[0]))


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda: mxfp8.quantize(np.ones((2, 48), np.float32)), ["(2, 48)", "32"]),
        (lambda: mxfp8.quantize(np.float32(1)), ["()", "32"]),
        (
            lambda: mxfp8.dequantize(np.ones(32, np.uint8), np.ones(1, np.uint8)),
            ["data is uint8", "float8_e4m3fn"],
        ),
        (
            lambda: mxfp8.dequantize(np.ones(32, E4M3_DTYPE), np.ones(1, np.float32)),
            ["scale is float32", "uint8"],
        ),
        (
            lambda: mxfp8.dequantize(np.ones(64, E4M3_DTYPE), np.ones(1, np.uint8)),
            ["(64,)", "(1,)"],
        ),
        (
            lambda: mxfp8.dequantize(np.ones(32, E4M3_DTYPE), np.uint8(1)),
            ["(32,)", "()"],
        ),
        (lambda: mxfp8.e8m0_decode(np.ones(3, np.int32)), ["int32", "uint8"]),
    ],
)
def test_errors_name_what_is_wrong(call, names):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the parts are checked below)
        call()
    for name in names:
        assert name in str(caught.value)


FLOATS = st.floats(width=32, allow_subnormal=False)
GROUPS = hnp.arrays(np.float32, (3, 64), elements=FLOATS)
# Within what decodes to finite values: the largest value rounds to 2^128 and decodes to infinity.
FINITE = hnp.arrays(np.float32, (3, 64), elements=st.floats(-(2.0**127), 2.0**127, width=32))


@given(FINITE)
def test_property_data_is_nearest_on_its_stored_scale(x):
    x = np.where(np.abs(x) < 2.0**-126, 0, x)
    data, scale = QUANTIZE(x)
    step = 2.0 ** (np.asarray(scale).astype(np.float64) - 127).repeat(32, axis=-1)
    grid = np.sort(E4M3[np.isfinite(E4M3)].astype(np.float64))
    scaled = x.astype(np.float64) / step
    best = np.abs(scaled[..., None] - grid).min(axis=-1)
    got = np.abs(scaled - np.asarray(data).astype(np.float64))
    np.testing.assert_array_equal(got, best)


@given(FINITE)
def test_property_round_trip_keeps_decoded_values(x):
    """Quantising what was decoded changes no value, though a maximum of 224 may move one byte."""
    once = ROUND_TRIP(x)
    assert np.isfinite(np.asarray(once)).all()
    np.testing.assert_array_equal(ROUND_TRIP(once), once)


@given(GROUPS)
def test_property_data_is_finite_and_the_byte_is_a_number(x):
    data, scale = QUANTIZE(x)
    assert np.isfinite(np.asarray(data).astype(np.float32)).all()
    assert (np.asarray(scale) <= 254).all()


@given(GROUPS, st.integers(0, 2), st.integers(0, 1), hnp.arrays(np.float32, 32, elements=FLOATS))
def test_property_groups_are_independent(x, row, group, other):
    before = QUANTIZE(x)
    changed = x.copy()
    changed[row, 32 * group : 32 * group + 32] = other
    after = QUANTIZE(changed)
    rest = np.ones((3, 2), bool)
    rest[row, group] = False
    np.testing.assert_array_equal(np.asarray(before[1])[rest], np.asarray(after[1])[rest])
    data = (raw(part).reshape(3, 2, 32)[rest] for part in (before[0], after[0]))
    np.testing.assert_array_equal(*data)
