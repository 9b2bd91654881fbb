"""A short request on an engine for a million tokens: path, blocks and tokens of a small one.

Field report: with such a limit short requests became slow and long ones lost blocks, since the path
was chosen from the limit.
"""

import numpy as np
import pytest

from m31jax import SamplingParams
from m31jax.steps import page_buckets
from tests import engines
from tests.long_limit import MILLION, PROMPT, SMALL, engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
BLOCKS = 30  # of 16 tokens: the prompt and 24 fed-back tokens


@pytest.fixture
def widths(monkeypatch):
    """Page-table width of each step that ran, by engine."""
    seen: dict[int, list[int]] = {SMALL: [], MILLION: []}
    for limit, calls in seen.items():
        steps = engine(limit).steps
        for name in ("prefill", "decode"):
            monkeypatch.setitem(steps.__dict__, name, _spy(getattr(steps, name), calls))
    return seen


def _spy(step, calls):
    def spy(*args, pages, **options):
        calls.append(pages)
        return step(*args, pages=pages, **options)

    return spy


def test_thirty_blocks_take_the_same_path(widths):
    big, small = engine(MILLION), engine(SMALL)
    assert big.memory.max_seq_len == MILLION
    assert big.memory.spec.pages_per_slot == 65536
    prompt = engines.prompt(PROMPT)
    out, same = (one.generate([prompt], GREEDY)[0] for one in (big, small))
    assert out.token_ids == same.token_ids
    assert len(out.token_ids) == 25
    assert widths[MILLION] == widths[SMALL] == [32] * 25
    assert next(w for w in page_buckets(65536) if w >= BLOCKS) == 32


def test_thirty_blocks_select_the_same_blocks():
    ids = [token % 90 for token in engines.prompt(PROMPT + 24, seed=2)]
    trace, same = engine(MILLION).trace(ids), engine(SMALL).trace(ids)
    np.testing.assert_array_equal(trace["block_table"], same["block_table"])
    np.testing.assert_array_equal(trace["logits"], same["logits"])
    assert trace["block_table"].max() == BLOCKS - 1
    assert len(np.unique(trace["block_table"])) == BLOCKS + 1  # each was chosen by some row
    assert set(engine(MILLION).scratch) == set(engine(SMALL).scratch) == {32}
