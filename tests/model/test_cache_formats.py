"""Every cache format: decode after prefill equals prefill of the whole, to the bit."""

import numpy as np
import pytest

from m31jax import SamplingParams
from m31jax.kv_format import KVFormat
from m31jax.model.attention import Rows
from m31jax.runner import slot_sampling
from tests import engines

LENGTH = 56  # the last prompt chunk and the decoded tail lie in one page and cross into the next
FORMATS = [str(fmt) for fmt in KVFormat]


def logits_by(engine, ids, counts):
    """Logits [T, V] of `ids` fed in steps of `counts` rows."""
    state = engine.steps.init_state()
    row = np.arange(1, 1 + engine.memory.spec.pages_per_slot, dtype=np.int32)
    sampling = slot_sampling(SamplingParams(temperature=0.0))
    state = engine.steps.admit(state, np.int32(2), row, sampling)
    out, start = [], 0
    for count in counts:
        token = np.array(ids[start : start + count], np.int32)
        rows = Rows(
            token, np.full(count, 2, np.int32), np.arange(start, start + count, dtype=np.int32)
        )
        state, seen = engine.steps.observe(
            engine.params, state, rows, pages=engine.memory.spec.pages_per_slot, is_traced=False
        )
        out.append(np.asarray(seen.logits))
        start += count
    assert start == len(ids)
    return np.concatenate(out)


@pytest.mark.parametrize(
    ("kv_dtype", "index_dtype"),
    [
        *((fmt, fmt) for fmt in FORMATS),
        pytest.param("nvfp4", "fp8", marks=pytest.mark.long),
        pytest.param("f32", "nvfp4", marks=pytest.mark.long),
    ],
)
def test_decode_after_prefill_equals_one_prefill(kv_dtype, index_dtype):
    """Prefill reads the stored values too, so the quantised formats agree to the bit as well."""
    engine = engines.mini(kv_dtype=kv_dtype, index_dtype=index_dtype, max_seq_len=128)
    ids = engines.prompt(LENGTH, seed=9)
    whole = logits_by(engine, ids, [LENGTH])
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(logits_by(engine, ids, [1] * LENGTH), whole)


def test_formats_differ_by_their_rounding():
    """Each format really stores its own values: coarser ones are further from F32."""
    ids = engines.prompt(LENGTH, seed=9)
    logits = {
        fmt: logits_by(engines.mini(kv_dtype=fmt, index_dtype=fmt, max_seq_len=128), ids, [LENGTH])
        for fmt in FORMATS
    }
    error = {fmt: float(np.abs(out - logits["f32"]).mean()) for fmt, out in logits.items()}
    print("mean logit error by format:", error)
    assert 0 == error["f32"] < error["bf16"] < error["fp8"] < error["nvfp4"]
