"""The cache pool is updated in place: one buffer for the life of an engine, whatever its size."""

import re
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax import Engine, SamplingParams
from tests import engines
from tests.long_limit import MILLION, PROMPT, SMALL, engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
STEPS = 40


def mini() -> Engine:
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


def compiled(one: Engine, name: str) -> str:
    """HLO of a step as generate runs it, over the widest page bucket."""
    state, pages = one.runner.state, one.memory.spec.pages_per_slot
    if name == "decode":
        slots = np.zeros(8, np.int32)
        lowered = one.steps.decode.lower(one.params, state, slots, pages=pages, is_greedy=True)
    else:
        scalars = np.int32(0), np.int32(1), np.bool_(True)
        ids = np.zeros(64, np.int32)
        lowered = one.steps.prefill.lower(
            one.params, state, np.int32(0), ids, *scalars, pages=pages
        )
    return lowered.compile().as_text()


def whole_pools(text: str, state) -> list[str]:
    """Instructions that make another pool: copies, and conversions to another number type."""
    found = []
    for lane in state.lanes.values():
        shape = ",".join(map(str, lane.shape))
        assert f"[{shape}]" in text  # the pool is there under this shape
        found += re.findall(rf"\S+ = \w+\[{shape}\]\S* (?:copy|copy-start|convert)\(.*", text)
    return found


@pytest.mark.parametrize(
    ("one", "name"),
    [(mini, "decode"), (mini, "prefill"), (lambda: engine(SMALL), "decode")],
    ids=["f32-decode", "f32-prefill", "nvfp4-decode"],
)
def test_no_second_pool_in_the_compiled_step(one, name):
    text = compiled(one(), name)
    assert whole_pools(text, one().runner.state) == []
    assert "input_output_alias" in text


def test_the_search_finds_a_copy_and_a_conversion():
    """In a step that also gives the old pool back, and in one that scatters 8-bit floats on CPU."""
    state = mini().runner.state

    def keep(lanes):
        return lanes, {name: lane.at[:, 1].set(1) for name, lane in lanes.items()}

    def scatter(lanes):
        at = jnp.array([1, 3])
        eight = {name: lane.astype(jnp.float8_e4m3fn) for name, lane in lanes.items()}
        return {name: lane.at[:, at].set(2) for name, lane in eight.items()}

    for step, word in ((keep, "copy"), (scatter, "convert")):
        text = jax.jit(step).lower(state.lanes).compile().as_text()
        assert any(f" {word}(" in line for line in whole_pools(text, state))


def test_step_time_does_not_grow_with_the_pool():
    """94 MB against a sixteenth of it; steps of both alternate, so that both see one machine."""
    times: dict[int, list[float]] = {SMALL: [], MILLION: []}
    states = {}
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
