"""Engine.generate and stream: a request's tokens are its own, and nothing of it is left behind."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax import Engine, RequestError, SamplingParams
from tests import engines

MAX_SEQ_LEN = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7)
UNSEEDED = replace(SAMPLED, seed=None)


def engine() -> Engine:
    """Eight slots of 128 tokens, prompts in chunks of 64."""
    return engines.mini(max_seq_len=MAX_SEQ_LEN)


def run(prompts, params=GREEDY):
    return engine().generate(prompts, params, progress=False)


def tokens(prompt, params=GREEDY) -> list[int]:
    """The tokens of one request that is alone."""
    return run([prompt], params)[0].token_ids


def held() -> tuple[int, int, int]:
    """Requests that wait, requests with a slot, pages taken."""
    scheduler = engine().scheduler
    taken = engine().memory.spec.num_pages - 1 - scheduler.num_free_pages
    return scheduler.num_queued, scheduler.num_running, taken


@pytest.fixture(autouse=True)
def nothing_stays():
    """After every test the slots, the pages, the queue and the inboxes are as they were."""
    yield
    assert held() == (0, 0, 0)
    assert not engine()._inbox
    assert not np.asarray(engine().runner.state.is_active).any()


def mixed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 100 tokens; every third is greedy, the others sample with all filters."""
    rng = np.random.default_rng(11)
    prompts = [engines.prompt(int(rng.integers(1, 101)), seed=i) for i in range(count)]
    params = []
    for i in range(count):
        one = replace(GREEDY, max_tokens=int(rng.integers(1, 13)))
        if i % 3:
            one = replace(one, temperature=0.5 + i % 2, top_p=0.9, top_k=40, min_p=0.01, seed=i)
        params.append(one)
    return prompts, params


def test_hundred_requests_on_eight_slots_give_their_solo_tokens():
    prompts, params = mixed(100)
    together = [out.token_ids for out in run(prompts, params)]
    assert [len(ids) for ids in together] == [one.max_tokens for one in params]
    alone = [tokens(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    assert together == alone
    assert len({tuple(ids) for ids in together}) > 80  # not all the same text


def test_completions_keep_prompt_order_and_count_tokens():
    lengths, limits = (3, 70, 1), (9, 1, 4)
    params = [replace(GREEDY, max_tokens=limit) for limit in limits]
    outs = run([engines.prompt(n) for n in lengths], params)
    assert [out.usage.prompt_tokens for out in outs] == list(lengths)
    assert [out.usage.completion_tokens for out in outs] == list(limits)
    assert [out.finish_reason for out in outs] == ["length"] * 3
    assert all(out.text == "" and out.logprobs is None and out.stop_reason is None for out in outs)
    assert outs[0].stats["steps"] >= 8  # the first of nine tokens comes from prefill


def test_progress_goes_to_stderr_only_for_several_prompts(capsys):
    engine().generate([engines.prompt(3)] * 2, GREEDY)
    shown = capsys.readouterr()
    assert "generate" in shown.err
    assert shown.out == ""
    engine().generate([engines.prompt(3)], GREEDY)
    assert capsys.readouterr().err == ""


# Streams


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_stream_brings_the_tokens_of_generate_one_by_one(params):
    prompt = engines.prompt(70, seed=1)
    pieces = list(engine().stream(prompt, params))
    assert [token for piece in pieces for token in piece.token_ids] == tokens(prompt, params)
    assert [len(piece.token_ids) for piece in pieces] == [1] * 8
    assert [piece.finish_reason for piece in pieces] == [None] * 7 + ["length"]


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_closing_a_stream_frees_its_slot_and_pages_at_once(pieces):
    """`pieces` 0: closed before the first one was asked for."""
    stream = engine().stream(engines.prompt(70), GREEDY)
    for _ in range(pieces):
        next(stream)
    assert held() == ((0, 1, 5) if pieces else (1, 0, 0))
    stream.close()
    assert held() == (0, 0, 0)
    assert not engine()._inbox
    assert tokens(engines.prompt(5)) == tokens(engines.prompt(5))


def test_a_stream_nobody_holds_any_more_ends_too():
    stream = engine().stream(engines.prompt(70), GREEDY)
    next(stream)
    del stream
    assert engine().scheduler.num_running == 0


def test_a_suspended_stream_goes_on_after_other_requests():
    """While it waits, two generates and another stream run in the same batch, one to its end."""
    prompt, long = engines.prompt(20, seed=3), replace(SAMPLED, max_tokens=30)
    expected, other = tokens(prompt, long), engines.prompt(66, seed=4)
    solo = tokens(other)
    stream = engine().stream(prompt, long)
    got = [next(stream).token_ids[0] for _ in range(2)]
    assert run([other] * 9)[-1].token_ids == solo
    second = engine().stream(other, GREEDY)
    inner = [next(second).token_ids[0] for _ in range(3)]
    got += [next(stream).token_ids[0] for _ in range(2)]
    assert tokens(other) == solo
    inner += [piece.token_ids[0] for piece in second]
    got += [piece.token_ids[0] for piece in stream]
    assert got == expected
    assert inner == solo


def test_a_stream_cannot_be_of_several_samples():
    with pytest.raises(RequestError, match="n=3"):
        engine().stream(engines.prompt(3), replace(SAMPLED, n=3))


# Random streams


def test_samples_differ_among_themselves_and_repeat():
    prompt, three = engines.prompt(9), replace(SAMPLED, n=3)
    outs = run([prompt, engines.prompt(4)], [three, GREEDY])
    samples = [out.token_ids for out in outs[:3]]
    assert len(outs) == 4
    assert len({tuple(ids) for ids in samples}) == 3
    assert [out.token_ids for out in run([prompt], three)] == samples
    assert samples[0] == tokens(prompt, SAMPLED)
    assert [out.usage.prompt_tokens for out in outs] == [9, 9, 9, 4]


def test_another_seed_and_no_seed_give_other_tokens():
    prompt, long = engines.prompt(9), replace(SAMPLED, max_tokens=16)
    texts = [tokens(prompt, replace(long, seed=seed)) for seed in (7, 8, None, None)]
    assert len({tuple(ids) for ids in texts}) == 4


def test_a_seed_means_the_same_tokens_in_any_company():
    """Field report: one engine-wide stream made the text depend on neighbours and on uptime."""
    prompt, long = engines.prompt(12, seed=5), replace(SAMPLED, max_tokens=20)
    alone = tokens(prompt, long)
    others = [engines.prompt(10 + 9 * i, seed=20 + i) for i in range(7)]
    params = [replace(UNSEEDED, max_tokens=8 + i) for i in range(7)]
    outs = run([*others[:4], prompt, *others[4:]], [*params[:4], long, *params[4:]])
    assert outs[4].token_ids == alone
    before = engine().runner.timing.decode_steps
    run([engines.prompt(2)] * 40, replace(UNSEEDED, max_tokens=100))
    assert engine().runner.timing.decode_steps - before >= 400
    assert tokens(prompt, long) == alone


# Log-probabilities


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_those_of_a_teacher_forced_pass(temperature):
    """Field report: values after temperature although raw ones were asked."""
    prompt = engines.prompt(64, seed=6)
    params = SamplingParams(
        temperature=temperature, max_tokens=32, logprobs=5, seed=3, ignore_eos=True, top_p=0.95
    )
    busy = [engines.prompt(7 + i) for i in range(3)]
    out = run([*busy, prompt], [UNSEEDED, GREEDY, UNSEEDED, params])[3]
    assert out.logprobs is not None
    assert [entry.token_id for entry in out.logprobs] == out.token_ids
    logits = engine().score([*prompt, *out.token_ids])[len(prompt) - 1 : -1].astype(np.float64)
    reference = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    is_best = []
    for entry, row in zip(out.logprobs, reference, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-5)
        ids, values = [i for i, _ in entry.top], [value for _, value in entry.top]
        np.testing.assert_allclose(values, row[ids], atol=1e-5, rtol=0)
        assert ids[:5] == np.argsort(-row, kind="stable")[:5].tolist()
        assert len(ids) == 5 + (entry.token_id not in ids[:5])
        assert dict(entry.top)[entry.token_id] == entry.logprob  # the same float
        is_best.append(entry.token_id == ids[0])
    assert all(is_best) == (temperature == 0.0)


@pytest.mark.parametrize("listed", [0, 1, 20])
def test_number_of_listed_logprobs(listed):
    """The chosen token is listed even when none was asked for."""
    out = run([engines.prompt(5)], replace(SAMPLED, logprobs=listed))[0]
    assert out.logprobs is not None
    for entry in out.logprobs:
        assert entry.token_id in dict(entry.top)
        assert listed <= len(entry.top) <= listed + 1


def test_logprobs_do_not_change_the_tokens():
    prompt = engines.prompt(30)
    assert tokens(prompt, replace(GREEDY, logprobs=2)) == tokens(prompt)


# Where a request ends


def first_at(ids: list[int], least: int) -> int:
    """Index, `least` or more, of a token that does not occur before it."""
    return next(i for i in range(least, len(ids)) if ids[i] not in ids[:i])


def test_stop_token_ids_end_a_request_and_are_counted():
    prompt, long = engines.prompt(10), replace(GREEDY, max_tokens=20)
    ids = tokens(prompt, long)
    at = first_at(ids, 3)
    out = run([prompt], replace(long, stop_token_ids=[ids[at]], logprobs=0))[0]
    assert out.token_ids == ids[: at + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", ids[at])
    assert out.usage.completion_tokens == len(out.logprobs or ()) == at + 1
    after = replace(long, stop_token_ids=[ids[at]], min_tokens=at + 2)
    assert len(tokens(prompt, after)) > at + 1
    with pytest.raises(RequestError, match="id 96"):
        run([prompt], replace(long, stop_token_ids=[96]))


def with_eos(ids: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(engine(), "config", replace(engine().config, eos_token_ids=ids))


def test_end_of_sequence_ends_a_request_unless_ignored(monkeypatch):
    prompt, long = engines.prompt(10), replace(GREEDY, max_tokens=20)
    ids = tokens(prompt, long)
    at = first_at(ids, 3)
    with_eos((95, ids[at]), monkeypatch)
    assert tokens(prompt, long) == ids
    listening = replace(long, ignore_eos=False)
    out = run([prompt], listening)[0]
    assert out.token_ids == ids[: at + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", ids[at])
    assert len(tokens(prompt, replace(listening, min_tokens=at + 2))) > at + 1


# What is refused


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 1.0),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.5),
        ("logit_bias", {3: 1.0}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1, 2]),
        ("stop", ["x"]),
    ],
)
def test_a_field_that_cannot_be_honoured_is_named_before_anything_runs(field, value, monkeypatch):
    """Field report: such fields were ignored. `stop` is one without a tokenizer."""
    monkeypatch.setattr(engine().runner, "step", lambda: pytest.fail("a step ran"))
    params = [GREEDY, replace(GREEDY, **{field: value})]
    with pytest.raises(RequestError, match=field):
        run([engines.prompt(4)] * 2, params)
    with pytest.raises(RequestError, match=field):
        engine().stream(engines.prompt(4), params[1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "empty"),
        ([1, 96], r"id 96 .*0 to 95"),
        ([1, -1], "-1"),
        ([1.5], "1.5"),
        (5, "prompt_ids=5"),
        (b"ab", "prompt_ids=b'ab'"),
        ("text", r"no tokenizer\.json"),
        ([1] * 121, r"121 tokens and max_tokens=8.*max_seq_len=128.*lower max_tokens to 7"),
    ],
)
def test_one_bad_prompt_among_good_ones(bad, message, monkeypatch):
    monkeypatch.setattr(engine().runner, "step", lambda: pytest.fail("a step ran"))
    with pytest.raises(RequestError, match=message):
        run([engines.prompt(4), bad, engines.prompt(5)])
    assert engine().scheduler.num_queued == 0


def test_a_prompt_that_the_pool_could_never_hold(monkeypatch):
    """Refused by the scheduler, after good ones were queued: those leave the queue again."""
    monkeypatch.setattr(engine().scheduler, "num_pages", 3)
    with pytest.raises(RequestError, match="num_pages=4"):
        run([engines.prompt(4), engines.prompt(40)])


def test_prompts_and_params_must_match():
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        run([engines.prompt(4)], [GREEDY, GREEDY])
    with pytest.raises(RequestError, match="list of prompts"):
        run("text")
    with pytest.raises(RequestError, match="prompt_ids=1 "):
        run([1, 2, 3])
    assert run([]) == []


@pytest.mark.parametrize("length", [1, MAX_SEQ_LEN - 1])
def test_prompts_of_every_allowed_length(length):
    out = run([engines.prompt(length)], replace(GREEDY, max_tokens=MAX_SEQ_LEN - length))[0]
    assert len(out.token_ids) == MAX_SEQ_LEN - length
    assert out.finish_reason == "length"
    scores = engine().score([*engines.prompt(length), *out.token_ids[:-1]])
    assert scores[-1].argmax() == out.token_ids[-1]


@pytest.mark.parametrize("length", [MAX_SEQ_LEN, MAX_SEQ_LEN + 1])
def test_longer_prompts_are_refused(length):
    with pytest.raises(RequestError, match=rf"{length} tokens.*max_seq_len=128; shorten"):
        run([engines.prompt(length)], replace(GREEDY, max_tokens=1))


# Whole passes


def test_score_and_trace_touch_no_request():
    prompt = engines.prompt(64, seed=8)
    expected = tokens(prompt)
    stream = engine().stream(prompt, GREEDY)
    got = [next(stream).token_ids[0] for _ in range(3)]
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(engine().runner.state)]
    logits, trace = engine().score(prompt), engine().trace(prompt)
    after = jax.tree.leaves(engine().runner.state)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, np.asarray(new))
    got += [piece.token_ids[0] for piece in stream]
    assert got == expected
    assert logits.dtype == np.float32
    assert logits[-1].argmax() == expected[0]
    np.testing.assert_array_equal(trace["logits"], logits)
    shapes = {name: array.shape for name, array in trace.items()}
    assert shapes == {
        "hidden": (3, 64, 64),
        "attn_out": (2, 64, 64),
        "mlp_out": (2, 64, 64),
        "block_table": (1, 2, 64, 3),
        "router_ids": (1, 64, 2),
        "router_weights": (1, 64, 2),
        "logits": (64, 96),
    }
    np.testing.assert_allclose(
        trace["hidden"][1:], trace["hidden"][:-1] + trace["attn_out"] + trace["mlp_out"], atol=1e-5
    )
    with pytest.raises(RequestError, match=r"1025 ids.*1024"):
        engine().score([1] * 1025)


# What an earlier tenant left


def test_stale_values_in_free_pages_are_never_read():
    """Pages come back as they were: full of another request's keys, here of NaN."""
    prompts, params = mixed(12)
    expected = [out.token_ids for out in run(prompts, params)]
    state = engine().runner.state
    lanes = {name: lane.at[:, 1:].set(jnp.nan) for name, lane in state.lanes.items()}
    engine().runner._state = replace(state, lanes=lanes)
    try:
        assert [out.token_ids for out in run(prompts, params)] == expected
    finally:
        engine().runner._state = None


def test_warm_up_waits_for_the_requests():
    stream = engine().stream(engines.prompt(4), GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="1 requests run"):
        engine().warm_up()
    stream.close()
