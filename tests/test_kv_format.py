"""How cached vectors are stored: each format against its table of values, neighbours, zeros."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from m31jax import kv_format
from m31jax.kv_format import KVFormat
from tests.ops import checks, loops

FORMATS = list(KVFormat)
ENCODE = jax.jit(kv_format.encode, static_argnames="fmt")
DECODE = jax.jit(kv_format.decode)


def stored(x, fmt):
    return DECODE(ENCODE(x, fmt))


@pytest.mark.parametrize("fmt", FORMATS)
def test_values_are_those_of_the_format(fmt):
    x = np.asarray(checks.normal(0, 5, 64)) * np.float32([[1], [1e-3], [300], [0.1], [30]])
    x[3, ::3] = 0
    np.testing.assert_array_equal(stored(x, fmt), loops.store(x, str(fmt)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_parts_are_what_encode_makes(fmt):
    """Allocation and byte counts walk `parts`; a part that is missing there would not be moved."""
    made = ENCODE(jnp.ones((3, 2, 128)), fmt)
    parts = kv_format.parts(fmt, 128)
    for name, part in made._asdict().items():
        if part is None:
            assert name not in parts
        else:
            width, dtype = parts[name]
            assert (part.shape, part.dtype) == ((3, 2, width), dtype)
    size = sum(width * dtype.itemsize for width, dtype in parts.values())
    assert size == {"f32": 512, "bf16": 256, "fp8": 128, "nvfp4": 72}[fmt]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decoding_is_exact_and_storing_again_changes_nothing(fmt, dtype):
    first = ENCODE(checks.normal(0, 4, 128, dtype=dtype), fmt)
    values = DECODE(first)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, loops.cached_values(first))
    if fmt is KVFormat.NVFP4:
        # A group whose largest code is below 6 gets a finer scale the second time.
        np.testing.assert_allclose(
            stored(values, fmt), values, atol=float(jnp.abs(values).max()) / 12
        )
    else:
        assert checks.same_bits(ENCODE(values, fmt), first)


@pytest.mark.parametrize("fmt", FORMATS)
def test_zeros_are_exact_and_neighbours_keep_their_bytes(fmt):
    """A row of zeros, and one with a lone 1e-30, between two normal ones; and alone in a group."""
    x = np.array(checks.normal(0, 4, 64))
    before = ENCODE(x, fmt)
    x[1], x[2] = 0, 0
    x[2, 5] = 1e-30
    x[3, 16:32] = 0
    after, values = ENCODE(x, fmt), np.asarray(stored(x, fmt))
    assert not values[1].any()
    assert not np.delete(values[2], 5).any()
    assert values[2, 5] in (0, np.float32(1e-30), np.asarray(ml_dtypes.bfloat16(1e-30), np.float32))
    assert not values[3, 16:32].any()
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert checks.same_bits(old[0], new[0])
        group = new.shape[-1] // 4  # what 16 of 64 channels take
        others = np.delete(np.arange(new.shape[-1]), np.arange(group, 2 * group))
        assert checks.same_bits(old[3, others], new[3, others])


def test_quantised_formats_saturate_and_never_hold_nan():
    x = np.zeros((4, 32), np.float32)
    x[0], x[1, 3], x[2, 3], x[3] = 1e30, np.nan, -np.inf, 6
    for fmt, largest in ((KVFormat.FP8, 448), (KVFormat.NVFP4, 2688)):
        values = np.asarray(stored(x, fmt))
        assert np.isfinite(values).all()
        np.testing.assert_array_equal(values[0], largest)
        assert not values[1].any()
        assert values[2, 3] == -largest
        np.testing.assert_array_equal(values[3], 6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_vector_does_not_depend_on_those_stored_with_it(fmt):
    """So that a rewrite after a rejection, or a move, restores the same bytes."""
    x = np.asarray(checks.normal(0, 9, 2, 64))
    together = ENCODE(x, fmt)
    for t in (0, 4, 8):
        alone = ENCODE(x[t : t + 1], fmt)
        assert checks.same_bits(alone, jax.tree.map(lambda part, t=t: part[t : t + 1], together))


def test_teeth():
    """Swapped nibbles, a shifted scale and a scale of another head are other values."""
    made = ENCODE(checks.normal(0, 2, 3, 64), KVFormat.NVFP4)
    values = np.asarray(DECODE(made))
    for wrong in (
        made._replace(data=(made.data >> 4) | (made.data << 4)),
        made._replace(scale=jnp.roll(made.scale, 1, axis=-1)),
        made._replace(scale=jnp.roll(made.scale, 1, axis=1)),
    ):
        assert np.abs(np.asarray(DECODE(wrong)) - values).max() > 0.1
