"""The cache pool is updated in place: one buffer for the life of an engine, whatever its size."""

import re
import statistics
import time

import jax
import numpy as np
import pytest

from m31jax import SamplingParams
from tests import engines
from tests.long_limit import MILLION, PROMPT, SMALL, engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STEPS = 40


def mini():
    return engines.mini(max_seq_len=128)


def pointers(state) -> dict[str, int]:
    return {name: lane.unsafe_buffer_pointer() for name, lane in state.lanes.items()}


def test_lanes_stay_where_they_are():
    """Through admission, chunked prefill, both decode variants and frees."""
    runner = mini().runner
    before = pointers(runner.state)
    assert len(set(before.values())) == len(before) == 3
    prompts = [engines.prompt(length) for length in (100, 7, 64)]
    sampled = SamplingParams(max_tokens=5, seed=1)
    for params in (GREEDY, sampled):
        mini().generate(prompts, params, progress=False)
        assert pointers(runner.state) == before
    assert runner.timing.prefill_steps >= 8
    assert runner.timing.decode_steps >= 7


def test_the_old_state_is_gone_after_a_step():
    state = mini().init_state()
    lane = state.lanes["k"]
    after, _ = mini().step(mini().params, state)
    assert lane.is_deleted()
    assert not after.lanes["k"].is_deleted()
    prefix = mini().extract(after, 0)
    assert not after.lanes["k"].is_deleted()  # reading donates nothing
    mini().insert(after, prefix, 1)
    assert after.lanes["k"].is_deleted()


def compiled(name: str, is_greedy: bool = True) -> str:
    """HLO of one of the steps that generate runs."""
    one, state = mini(), mini().runner.state
    if name == "decode":
        slots = np.zeros(8, np.int32)
        lowered = one.steps.decode.lower(one.params, state, slots, pages=8, is_greedy=is_greedy)
    else:
        scalars = np.int32(0), np.int32(1), np.bool_(True)
        ids = np.zeros(64, np.int32)
        lowered = one.steps.prefill.lower(one.params, state, np.int32(0), ids, *scalars, pages=8)
    return lowered.compile().as_text()


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_no_copy_of_a_pool_in_the_compiled_step(name):
    text = compiled(name)
    for lane in mini().runner.state.lanes.values():
        shape = ",".join(map(str, lane.shape))
        assert f"[{shape}]" in text  # the pool is there under this shape
        found = re.findall(rf"\S+ = f32\[{shape}\]\S* copy(?:-start)?\(.*", text)
        assert not found, found
    assert "input_output_alias" in text


def test_the_search_for_copies_finds_one():
    """The same pattern sees the copy in a step that gives a pool back and keeps the old one."""
    lane = mini().runner.state.lanes["k"]
    step = jax.jit(lambda pool: (pool, pool.at[0, 1].set(1.0)), donate_argnums=0)
    text = step.lower(lane).compile().as_text()
    shape = ",".join(map(str, lane.shape))
    assert re.search(rf"= f32\[{shape}\]\S* copy(?:-start)?\(", text)


def test_step_time_does_not_grow_with_the_pool():
    """A pool 2048 times as large (94 MB); steps of both alternate, so that both see one machine."""
    times: dict[int, list[float]] = {SMALL: [], MILLION: []}
    states, slots = {}, np.zeros(1, np.int32)
    slots = np.array([0] + [-1] * 7, np.int32)
    for limit in times:
        states[limit] = engine(limit).init_state()
        one = engine(limit)
        states[limit], _ = one.prefill(one.params, states[limit], 0, engines.prompt(PROMPT))
    for _ in range(STEPS):
        for limit, taken in times.items():
            one, start = engine(limit), time.perf_counter()
            states[limit], drawn = one.steps.decode(
                one.params, states[limit], slots, pages=32, is_greedy=True
            )
            drawn.token.block_until_ready()
            taken.append(time.perf_counter() - start)
    small, large = (statistics.median(taken[4:]) for taken in times.values())
    print(f"median step: {small * 1e3:.2f} ms, {large * 1e3:.2f} ms with the large pool")
    assert large < 2 * small
    copied = _time_of_a_copy(states[MILLION])
    assert small + copied > 2 * small, "a copy would go unseen: enlarge the pool"


def _time_of_a_copy(state) -> float:
    copy = jax.jit(lambda lanes: jax.tree.map(lambda lane: lane + lane, lanes))
    jax.block_until_ready(copy(state.lanes))
    start = time.perf_counter()
    jax.block_until_ready(copy(state.lanes))
    return time.perf_counter() - start
