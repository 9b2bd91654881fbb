"""The model against reference data of an outside implementation (float32 on CPU)."""

import numpy as np
import pytest

from m31jax import SamplingParams
from tests import engines

PROMPTS = ("short", "mid", "long")
WHOLE = 600  # no prompt is longer
TOLERANCE = 1e-4  # relative to the largest entry; measured: 3e-6
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def close(out: np.ndarray, ref: np.ndarray) -> None:
    assert out.shape == ref.shape
    error = np.abs(out.astype(np.float64) - ref).max() / np.abs(ref).max()
    assert error < TOLERANCE, f"relative error {error:.2e}"


@pytest.mark.parametrize("tag", PROMPTS)
@pytest.mark.parametrize("which", ["a", "k"])
def test_trace_equals_outside_arrays(which, tag):
    golden = {
        key.removeprefix(f"{tag}/"): value
        for key, value in engines.golden_arrays(which).items()
        if key.startswith(f"{tag}/")
    }
    trace = engines.golden(which).trace(golden["input_ids"].tolist())
    last = min(8, golden["input_ids"].size)
    np.testing.assert_array_equal(trace["block_table"], golden["block_table"])
    np.testing.assert_array_equal(trace["router_ids"], golden["router_ids"])
    close(trace["router_weights"], golden["router_weights"])
    close(trace["logits"][-last:], golden["logits_last8"])
    for key in ("hidden", "attn_out", "mlp_out"):
        close(trace[key][:, -last:], golden[f"{key}_last8"])


@pytest.mark.parametrize("which", ["a", "k"])
def test_a_pass_is_meaningful(which):
    """Ignoring sparsity, or one block more, is seen at this tolerance."""
    golden = engines.golden_arrays(which)
    with pytest.raises(AssertionError, match="relative error"):
        close(golden["long/logits_last8"], golden["long/logits_last8_all_blocks"])


@pytest.mark.parametrize("which", ["a", "k"])
def test_score_logits(which):
    golden = engines.golden_arrays(which)
    logits = engines.golden(which).score(golden["mid/input_ids"].tolist())
    assert logits.dtype == np.float32
    close(logits[-8:], golden["mid/logits_last8"])


def _chunk_sizes(which: str) -> list[int]:
    block = {"a": 16, "k": 128}[which]
    return [1, 7, block - 1, block, block + 1, WHOLE]


QUICK = (("a", 7), ("a", 17), ("k", 1), ("k", 128), ("k", 129))


def _chunk_cells() -> list:
    cells = [(which, chunk) for which in "ak" for chunk in _chunk_sizes(which)]
    return [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.long) for cell in cells]


@pytest.mark.parametrize(("which", "chunk"), _chunk_cells())
def test_greedy_tokens_for_every_prefill_chunk(which, chunk):
    """Paged prefill in chunks, then decode, all three prompts sharing the batch."""
    golden = engines.golden_arrays(which)
    longest = {"a": 384, "k": 640}[which]
    engine = engines.golden(which, prefill_chunk=chunk, max_slots=3, max_seq_len=longest)
    prompts = [golden[f"{tag}/input_ids"].tolist() for tag in PROMPTS]
    for tag, out in zip(PROMPTS, engine.generate(prompts, GREEDY, progress=False), strict=True):
        assert out.token_ids == golden[f"{tag}/greedy_ids"].tolist(), tag
