"""The pure steps: a caller's own loop gives generate's tokens; writes stay in a slot's pages."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax import Engine, RequestError, SamplingParams, TargetError
from m31jax.model.state import GUARD_PAGE, LANES, DecodeState, lane_shapes
from tests import engines

SAMPLED = SamplingParams(temperature=1.0, seed=3, top_p=0.9)
COUNT = 10


def engine() -> Engine:
    return engines.mini(max_seq_len=128)


def prefill(state, slot: int, ids, sampling=None):
    state, token = engine().prefill(engine().params, state, slot, ids, sampling)
    return state, int(token)


def step(state, count: int = 1, **options):
    """(state, tokens [count, slots])."""
    rows = []
    for _ in range(count):
        state, drawn = engine().step(engine().params, state, **options)
        rows.append(np.asarray(drawn.token))
    return state, np.stack(rows)


def expected(ids, sampling=None) -> list[int]:
    """What generate gives."""
    params = sampling or SamplingParams(temperature=0.0)
    params = replace(params, max_tokens=COUNT, ignore_eos=True)
    return engine().generate([ids], params)[0].token_ids


def prompts() -> dict[int, tuple[list[int], SamplingParams | None]]:
    """Requests of unlike lengths for four of the eight slots."""
    return {
        0: (engines.prompt(5), None),
        2: (engines.prompt(100, seed=1), SAMPLED),
        3: (engines.prompt(64, seed=2), None),
        7: (engines.prompt(1, seed=3), SAMPLED),
    }


def filled() -> tuple[DecodeState, dict[int, list[int]]]:
    state, first = engine().init_state(), {}
    for slot, (ids, sampling) in prompts().items():
        state, token = prefill(state, slot, ids, sampling)
        first[slot] = [token]
    return state, first


def host(state: DecodeState) -> dict[str, np.ndarray]:
    """A copy of every lane."""
    return {name: np.array(lane) for name, lane in state.lanes.items()}


def pages_of(state: DecodeState, slots) -> list[int]:
    return np.asarray(state.page_table)[list(slots)].ravel().tolist()


# Tokens


def test_tokens_equal_generate_with_empty_slots_between():
    state, got = filled()
    state, rows = step(state, COUNT - 1)
    for slot, (ids, sampling) in prompts().items():
        assert got[slot] + rows[:, slot].tolist() == expected(ids, sampling), slot
    lengths = np.asarray(state.lengths)
    assert lengths.tolist() == [14, 0, 109, 73, 0, 0, 0, 10]
    assert np.asarray(state.sampling.count)[[0, 2, 3, 7]].tolist() == [COUNT] * 4


def test_the_greedy_variant_gives_the_same_tokens():
    state, token = prefill(engine().init_state(), 4, engines.prompt(20))
    _, rows = step(state, COUNT - 1, is_greedy=True, context=40)
    assert [token, *rows[:, 4].tolist()] == expected(engines.prompt(20))


def test_freed_slots_stop_and_are_used_again():
    state, got = filled()
    state, before = step(state, 2)
    state = engine().free(state, 2)
    state, between = step(state, 2)
    assert np.asarray(state.lengths)[2] == 0
    late = engines.prompt(33, seed=9)
    state, token = prefill(state, 2, late, SAMPLED)
    state, rows = step(state, COUNT - 1)
    assert [token, *rows[:, 2].tolist()] == expected(late, SAMPLED)
    ids, _ = prompts()[0]
    others = np.concatenate([before, between, rows])[: COUNT - 1, 0].tolist()
    assert got[0] + others == expected(ids)


def test_a_full_slot_is_left_as_it_is():
    """The 128th token is drawn, and no further step moves the slot."""
    state, _ = prefill(engine().init_state(), 1, engines.prompt(127))
    state, _ = step(state)
    assert np.asarray(state.lengths)[1] == 128
    before, token = host(state), np.asarray(state.next_token)[1]
    state, _ = step(state, 2)
    assert np.asarray(state.lengths)[1] == 128
    assert np.asarray(state.next_token)[1] == token
    for name, lane in host(state).items():
        np.testing.assert_array_equal(lane, before[name])


# Movers


def test_a_moved_slot_goes_on_identically():
    """Within one state, over the host, and into a state where other pages belong to the slot."""
    ids, sampling = prompts()[2]
    tokens = expected(ids, sampling)
    state, got = filled()
    state, rows = step(state, 3)
    prefix = engine().extract(state, 2)
    other = engine().init_state()
    table = np.asarray(other.page_table)[::-1].copy()
    other = replace(other, page_table=jax.device_put(table, other.page_table.sharding))
    other, _ = prefill(other, 5, engines.prompt(90, seed=8))  # an earlier tenant
    away = jax.tree.map(np.asarray, prefix)
    state = engine().insert(state, prefix, 6)
    other = engine().insert(other, away, 5)
    state, here = step(state, COUNT - 4)
    other, there = step(other, COUNT - 4)
    start = got[2] + rows[:, 2].tolist()
    assert start + here[:, 6].tolist() == tokens
    assert start + here[:, 2].tolist() == tokens  # the original too
    assert start + there[:, 5].tolist() == tokens


def test_every_lane_moves():
    """Field report: index keys were left behind. All lanes of all pages arrive, and only they."""
    state, _ = prefill(engine().init_state(), 2, engines.prompt(100, seed=1))
    prefix = engine().extract(state, 2)
    assert set(prefix.lanes) == set(lane_shapes(engine().memory.spec)) == {"k", "v", "index_k"}
    before, own = host(state), pages_of(state, [2])
    empty = {name: jnp.zeros_like(lane) for name, lane in state.lanes.items()}
    state = engine().insert(replace(state, lanes=empty), prefix, 6)
    new = pages_of(state, [6])
    rest = sorted(set(range(engine().memory.spec.num_pages)) - set(new))
    for name, lane in host(state).items():
        np.testing.assert_array_equal(lane[:, new], before[name][:, own])
        assert before[name][:, own].any()
        assert not lane[:, rest].any()


def without(lanes, name):
    return {key: lane for key, lane in lanes.items() if key != name}


@pytest.mark.parametrize("name", ["k", "v", "index_k"])
def test_a_prefix_without_a_lane_is_refused(name):
    assert name in {lane.name for lane in LANES}
    state, _ = prefill(engine().init_state(), 2, engines.prompt(9))
    prefix = engine().extract(state, 2)
    with pytest.raises(TargetError, match=f"'{name}'"):
        engine().insert(state, prefix._replace(lanes=without(prefix.lanes, name)), 6)
    mute = replace(state, lanes=without(state.lanes, name))
    with pytest.raises(TargetError, match=f"'{name}'"):
        engine().insert(state, engine().extract(mute, 2), 6)


def test_a_prefix_of_another_kind_is_refused():
    state, _ = prefill(engine().init_state(), 2, engines.prompt(9))
    prefix = engine().extract(state, 2)
    half = {name: lane.astype(jnp.bfloat16) for name, lane in prefix.lanes.items()}
    extra = {**prefix.lanes, "index_k_scale": prefix.lanes["index_k"]}
    flat = {name: lane[:1] for name, lane in prefix.lanes.items()}
    long = {name: jnp.concatenate([lane, lane], 1) for name, lane in prefix.lanes.items()}
    for lanes, message in (
        (half, "bfloat16"),
        (extra, "index_k_scale"),
        (flat, "lanes"),
        (long, "16. pages.* at most 8"),
    ):
        with pytest.raises(TargetError, match=message):
            engine().insert(state, prefix._replace(lanes=lanes), 6)


# Writes


def test_a_step_changes_the_pages_of_live_slots_only():
    state, _ = filled()
    before = host(state)
    live = pages_of(state, prompts())
    rest = sorted(set(range(engine().memory.spec.num_pages)) - set(live))
    state, _ = step(state, 3)
    for name, lane in host(state).items():
        np.testing.assert_array_equal(lane[:, rest], before[name][:, rest])
        assert (lane[:, live] != before[name][:, live]).any()


def test_a_step_writes_one_row_of_one_page_for_each_slot():
    state, _ = filled()
    before, lengths = host(state), np.asarray(state.lengths)
    table = np.asarray(state.page_table)
    state, _ = step(state)
    page = 16
    allowed = {(table[s, lengths[s] // page], lengths[s] % page) for s in prompts()}
    for name, lane in host(state).items():
        changed = (lane != before[name]).any(axis=(0, -1))  # P [K] page
        if changed.ndim == 3:
            changed = changed.any(axis=1)
        assert set(zip(*np.nonzero(changed), strict=True)) == allowed, name


def test_padding_never_writes():
    """Guard, and the page that index -1 would reach, are canaries through padding-heavy steps.

    Every page but the live one is poisoned; a write at -1 or 0 would clear some of it.
    """
    state = engine().init_state()
    last = engine().memory.spec.num_pages - 1
    own = pages_of(state, [3])
    assert GUARD_PAGE not in own
    assert last not in own
    rest = sorted(set(range(last + 1)) - set(own))
    poison = {name: lane.at[:, jnp.array(rest)].set(-77.0) for name, lane in state.lanes.items()}
    state = replace(state, lanes=poison)
    state, token = prefill(state, 3, engines.prompt(65))  # the last chunk: one row, fifteen padding
    state, rows = step(state, COUNT - 1)  # one live row, seven padding
    state = engine().free(state, 3)
    state, _ = step(state)  # padding only
    for name, lane in host(state).items():
        np.testing.assert_array_equal(lane[:, rest], -77.0, err_msg=name)
    assert [token, *rows[:, 3].tolist()] == expected(engines.prompt(65))


def test_the_canary_sees_a_padding_row_that_writes(monkeypatch):
    """A mutant that lets padding through to the scatter fails the check above."""
    from m31jax.ops import pages

    def leaky(page_table, slot, position, page, num_pages):
        return jnp.where(position >= 0, page_table[slot, position // page], -1), position % page

    monkeypatch.setattr(pages, "locate", leaky)
    steps = replace(engine().steps)  # forgets what is compiled
    state = engine().init_state()
    slots = np.full(8, -1, np.int32)
    state, _ = steps.decode(engine().params, state, slots, pages=8, is_greedy=True)
    assert any(np.asarray(lane)[:, -1].any() for lane in state.lanes.values())


def test_the_guard_page_stays_zero_in_the_live_state():
    """Through admission, chunks, growth, aborts and reuse of generate's own pool."""
    params = SamplingParams(max_tokens=20, seed=1)
    engine().generate([engines.prompt(1 + 5 * i) for i in range(20)], params, progress=False)
    stream = engine().stream(engines.prompt(100), params)
    next(stream)
    stream.close()
    engine().generate([engines.prompt(3)], params)
    for name, lane in engine().runner.state.lanes.items():
        assert not np.asarray(lane)[:, GUARD_PAGE].any(), name


# What is refused


@pytest.mark.parametrize("slot", [-1, 8])
def test_slots_outside_the_engine(slot):
    state = engine().init_state()
    for call in (
        lambda: prefill(state, slot, [1]),
        lambda: engine().free(state, slot),
        lambda: engine().extract(state, slot),
        lambda: engine().insert(state, engine().extract(state, 0), slot),
    ):
        with pytest.raises(RequestError, match=rf"slot={slot} is not in 0\.\.7"):
            call()
    state.page_table.block_until_ready()  # not donated by a call that was refused


@pytest.mark.parametrize(
    "field", [{"stop_token_ids": (3,)}, {"min_tokens": 2}, {"n": 2}, {"presence_penalty": 1.0}]
)
def test_fields_that_a_bare_loop_cannot_honour(field):
    with pytest.raises(RequestError, match=next(iter(field))):
        prefill(engine().init_state(), 0, [1], replace(SAMPLED, **field))


def test_prompt_lengths():
    state = engine().init_state()
    for ids, message in (([], "empty"), ([1] * 128, "max_seq_len=128"), ([96], "id 96")):
        with pytest.raises(RequestError, match=message):
            prefill(state, 0, ids)
    _, token = prefill(state, 0, engines.prompt(127))
    assert token == expected_first(engines.prompt(127))


def expected_first(ids) -> int:
    return engine().generate([ids], SamplingParams(temperature=0.0, max_tokens=1))[0].token_ids[0]


def test_a_pool_shared_by_the_slots_has_no_state_of_its_own():
    small = engines.mini(max_seq_len=128, num_pages=20)
    with pytest.raises(TargetError, match="num_pages=65, the pool has 20"):
        small.init_state()
