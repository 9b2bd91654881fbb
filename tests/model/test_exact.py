"""A request's logits do not depend on neighbours, row counts or table width: to the bit."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from m31jax.model.attention import Rows
from m31jax.ops import op
from m31jax.request import SamplingParams
from m31jax.runner import slot_sampling
from tests import engines

SLOTS, VERIFY = 8, 8
LENGTHS = (5, 100, 33, 16, 47, 1, 80, 64)
ROW_COUNTS = (1, 2, 3, 7, 8, 9, 64)
NARROW, WIDE = 8, 32  # pages of 16 tokens; the longest request ends at 108


class Batch:
    """Eight prefilled requests of unlike lengths in one state, and eight more tokens for each."""

    def __init__(self, dtype: str, pages: int) -> None:
        engine = engines.mini(dtype=dtype)
        spec = replace(
            engine.memory.spec, slots=SLOTS, num_pages=1 + SLOTS * WIDE, pages_per_slot=WIDE
        )
        self.engine, self.pages = engine, pages
        self.steps = replace(engine.steps, spec=spec)
        self.next = [engines.prompt(VERIFY, seed=100 + slot) for slot in range(SLOTS)]
        state = self.steps.init_state()
        sampling = slot_sampling(SamplingParams(temperature=0.0))
        order = 1 + np.random.default_rng(3).permutation(SLOTS * WIDE).astype(np.int32)
        for slot, length in enumerate(LENGTHS):
            row = order[slot * WIDE : (slot + 1) * WIDE]
            state = self.steps.admit(state, np.int32(slot), row, sampling)
            ids = engines.prompt(length, seed=slot)
            for start in range(0, length, 64):
                part = ids[start : start + 64]
                rows = [(token, slot, start + i) for i, token in enumerate(part)]
                state, _ = self.run(state, rows + [(0, 0, -1)] * (64 - len(part)))
        self.state = state

    def run(self, state, rows):
        """Rows of (token, slot, position) through every layer; (state, logits)."""
        columns = (np.array(column, np.int32) for column in zip(*rows, strict=True))
        state, out = self.steps.observe(
            self.engine.params, state, Rows(*columns), pages=self.pages, is_traced=False
        )
        return state, np.asarray(out.logits)

    def row(self, slot: int, step: int) -> tuple[int, int, int]:
        return self.next[slot][step], slot, LENGTHS[slot] + step

    def copy(self):
        return jax.tree.map(lambda x: x.copy(), self.state)

    def solo(self, steps: int) -> np.ndarray:
        """Logits [slot, step, V] of one-row steps, each request by itself."""
        state, out = self.copy(), []
        for slot in range(SLOTS):
            for step in range(steps):
                state, logits = self.run(state, [self.row(slot, step)])
                out.append(logits[0])
        return np.stack(out).reshape(SLOTS, steps, -1)

    def check(self, solo: np.ndarray, count: int) -> None:
        """One step of `count` rows: some slots absent, from 9 rows on several a request."""
        each = -(-count // SLOTS)
        wanted = [(slot, step) for slot in range(SLOTS) for step in range(each)]
        wanted = sorted(sorted(wanted, key=lambda pair: pair[1])[:count])
        _, logits = self.run(self.copy(), [self.row(*pair) for pair in wanted])
        for row, pair in enumerate(wanted):
            np.testing.assert_array_equal(logits[row], solo[pair], err_msg=f"{count} rows: {pair}")


@pytest.mark.parametrize(
    ("dtype", "narrow", "wide"),
    [
        ("float32", (3, 9, 64), (8,)),
        ("bfloat16", (9,), (1,)),
        pytest.param("float32", ROW_COUNTS, ROW_COUNTS, marks=pytest.mark.long),
        pytest.param("bfloat16", ROW_COUNTS, ROW_COUNTS, marks=pytest.mark.long),
    ],
)
def test_logits_equal_the_solo_run(dtype, narrow, wide):
    """Against one-row steps with the narrow page table, for each row count and both widths."""
    batch = Batch(dtype, NARROW)
    solo = batch.solo(VERIFY)
    assert np.isfinite(solo).all()
    assert solo.std() > 0.1
    for count in narrow:
        batch.check(solo, count)
    other = Batch(dtype, WIDE)
    for count in wide:
        other.check(solo, count)


def test_empty_slots_between_live_ones():
    """Padding rows among the live ones change nothing, in the logits or in the cache."""
    batch = Batch("float32", NARROW)
    live = [batch.row(1, 0), batch.row(4, 0), batch.row(6, 0)]
    plain_state, plain = batch.run(batch.copy(), live)
    padded = [live[0], (7, 0, -1), live[1], (9, 0, -1), (3, 0, -1), live[2], (1, 0, -1)]
    state, logits = batch.run(batch.copy(), padded)
    np.testing.assert_array_equal(logits[[0, 2, 5]], plain)
    for name, lane in state.lanes.items():
        np.testing.assert_array_equal(np.asarray(lane), np.asarray(plain_state.lanes[name]))


def test_a_mutant_without_tiles_fails(monkeypatch):
    """One tile as wide as the rows, as a plain batched step would run: the test above sees it."""
    batch = Batch("float32", NARROW)

    def whole(fn, *rows):
        return fn(*rows)

    for module in _modules_that_tile():
        monkeypatch.setattr(module, "map_tiles", whole)
    batch.steps = replace(batch.steps)  # forgets what is compiled with tiles
    solo = batch.solo(1)
    with pytest.raises(AssertionError, match="8 rows"):
        batch.check(solo, 8)


def _modules_that_tile():
    import importlib

    from m31jax.ops import STEMS

    modules = [importlib.import_module(f"m31jax.ops.{stem}") for stem in STEMS]
    found = [module for module in modules if getattr(module, "map_tiles", None) is op.map_tiles]
    assert len(found) >= 10
    return found
