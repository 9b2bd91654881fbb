"""Requests check themselves: what is accepted, how it is stored, what the refusals say."""

import dataclasses
import types

import numpy as np
import pytest

from m31jax.errors import RequestError
from m31jax.request import Completion, Request, SamplingParams, Usage

CONFIG = types.SimpleNamespace(vocab_size=100)
ALL_FIELDS = frozenset(f.name for f in dataclasses.fields(SamplingParams))


def request(prompt=(1, 2, 3), **params):
    return Request("r", prompt, SamplingParams(**params))


def validate(request, *, max_seq_len=64, tokenizer_present=True, supported=ALL_FIELDS):
    request.validate_for(CONFIG, max_seq_len, tokenizer_present, supported)


def test_fields_and_defaults():
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 16,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "min_tokens": 0,
        "logprobs": None,
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "bad_words": (),
        "allowed_token_ids": None,
    }


def test_values_are_stored_in_one_form():
    params = SamplingParams(
        stop="END",
        stop_token_ids=np.array([7, 3]),
        top_k=-1,
        temperature=np.float32(0.5),
        logit_bias={np.int32(4): -100},
        allowed_token_ids=[1],
        bad_words=None,  # type: ignore[arg-type]
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (7, 3)
    assert all(type(x) is int for x in params.stop_token_ids)
    assert params.top_k == 0
    assert type(params.temperature) is float
    assert params.logit_bias == {4: -100.0}
    assert params.allowed_token_ids == (1,)
    assert params.bad_words == ()
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_params_do_not_share_the_callers_objects():
    bias, stop = {1: 2.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2], stop[0] = 3.0, "y"
    assert params.logit_bias == {1: 2.0}
    assert params.stop == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3  # type: ignore[misc]
    assert dataclasses.replace(params, seed=3).logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}, stop="x"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 1),
        ("max_tokens", 10**6),
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", 10**9),
        ("min_p", 0),
        ("min_p", 1),
        ("seed", -(2**63)),
        ("seed", 2**63 - 1),
        ("stop", ["x"] * 16),
        ("stop", []),
        ("stop", None),
        ("min_tokens", 16),
        ("logprobs", 0),
        ("logprobs", 20),
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 0.01),
        ("logit_bias", {5: 100, 6: -100}),
        ("ignore_eos", True),
    ],
)
def test_limits_are_inclusive(field, value):
    SamplingParams(**{field: value})


NAN, INF = float("nan"), float("inf")
REFUSED = {
    "max_tokens": [0, -1, 1.0, "16", None, True, NAN],
    "temperature": [-0.1, 2.01, NAN, INF, -INF, "1", None, True, 10**400],
    "top_p": [0, -0.5, 1.01, NAN, "1", False],
    "top_k": [-2, 1.5, True, NAN, "5"],
    "min_p": [-0.01, 1.01, NAN, None],
    "seed": [2**63, -(2**63) - 1, 1.0, True, "7"],
    "stop": ["", [""], ["a", ""], [1], [None], 5, b"x", {"a": 1}, ["x"] * 17, "x" * 4097],
    "stop_token_ids": [5, "5", [-1], [1.0], [True], ["1"], [[1]]],
    "ignore_eos": [1, 0, "true", None],
    "min_tokens": [-1, 17, 1.5, True],
    "logprobs": [-1, 21, True, 1.0],
    "n": [0, -1, True, 1.5],
    "presence_penalty": [-2.1, 2.1, NAN, INF, True],
    "frequency_penalty": [-2.1, 2.1, NAN, "0"],
    "repetition_penalty": [0, -1, 101, NAN, INF, 10**400],
    "logit_bias": [[(1, 2)], {-1: 0}, {"1": 0}, {True: 0}, {1: 101}, {1: NAN}, {1: None}, 3],
    "bad_words": ["word", [""], [3]],
    "allowed_token_ids": [[], [-1], [True], 4, "4"],
}


def test_every_field_has_refusals():
    assert set(REFUSED) == ALL_FIELDS


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in REFUSED.items() for value in values]
)
def test_refusals_name_the_field_and_the_way_out(field, value):
    with pytest.raises(RequestError, match=rf"^{field}\b.*; .+"):
        SamplingParams(**{field: value})


def test_refusal_states_value_and_limit():
    with pytest.raises(RequestError, match=r"temperature=2\.5 is not in \[0, 2\]"):
        SamplingParams(temperature=2.5)
    with pytest.raises(RequestError, match=r"logit_bias\[3\]=101 is not in \[-100, 100\]"):
        SamplingParams(logit_bias={3: 101})
    with pytest.raises(RequestError, match="stop has 17 strings, the limit is 16"):
        SamplingParams(stop=["x"] * 17)


@pytest.mark.parametrize(
    ("params", "is_greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-5}, True),
        ({"temperature": 2e-5}, False),
        ({"top_k": 1}, True),
        ({"top_k": 2}, False),
        ({}, False),
    ],
)
def test_is_greedy(params, is_greedy):
    assert SamplingParams(**params).is_greedy is is_greedy


def test_prompt_ids_are_stored_as_ints():
    stored = Request("r", np.array([5, 6], np.int32)).prompt_ids  # type: ignore[arg-type]
    assert stored == (5, 6)
    assert all(type(x) is int for x in stored)


@pytest.mark.parametrize("prompt", ["text", [1, 2.0], [True], [-1], 7, [[1]]])
def test_prompt_ids_of_the_wrong_type(prompt):
    with pytest.raises(RequestError, match="prompt_ids"):
        Request("r", prompt)


def test_params_of_the_wrong_type():
    with pytest.raises(RequestError, match="params="):
        Request("r", (1,), {"max_tokens": 3})  # type: ignore[arg-type]


def test_requests_compare_by_identity():
    a, b = request(), request()
    assert a == a
    assert a != b


def test_valid_request_passes():
    validate(
        request(
            (0, 99),
            max_tokens=62,
            stop="x",
            stop_token_ids=[99],
            logit_bias={99: 1},
            allowed_token_ids=[0, 99],
        )
    )


def test_empty_prompt():
    with pytest.raises(RequestError, match="prompt_ids is empty"):
        validate(request(()))


def test_prompt_and_max_tokens_must_fit():
    validate(request([1] * 60, max_tokens=4))
    with pytest.raises(
        RequestError, match=r"60 tokens and max_tokens=5.*64; lower max_tokens to 4"
    ):
        validate(request([1] * 60, max_tokens=5))
    with pytest.raises(RequestError, match=r"64 tokens and max_tokens=1\b.*shorten the prompt"):
        validate(request([1] * 64, max_tokens=1))


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("prompt_ids", request((1, 100))),
        ("stop_token_ids", request(stop_token_ids=[100])),
        ("logit_bias", request(logit_bias={100: 1.0})),
        ("allowed_token_ids", request(allowed_token_ids=[3, 100])),
    ],
)
def test_ids_outside_the_vocabulary(field, bad):
    with pytest.raises(RequestError, match=rf"{field}: id 100 .*vocabulary of 100 ids; use ids 0 "):
        validate(bad)


@pytest.mark.parametrize("field", ["stop", "bad_words"])
def test_text_fields_need_a_tokenizer(field):
    asked = request(**{field: ["word"]})
    validate(asked)
    with pytest.raises(RequestError, match=rf"{field}=\('word',\) needs a tokenizer"):
        validate(asked, tokenizer_present=False)


NON_DEFAULT = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 0,
    "logprobs": 0,
    "n": 2,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.1,
    "logit_bias": {1: 1.0},
    "bad_words": ["x"],
    "allowed_token_ids": [1],
}


@pytest.mark.parametrize("field", NON_DEFAULT)
def test_a_field_the_engine_cannot_honour_is_refused(field):
    asked = request(**{field: NON_DEFAULT[field]})
    validate(asked, supported=frozenset({field}))
    with pytest.raises(RequestError, match=rf"^{field}=.* cannot be honoured .*leave out {field} "):
        validate(asked, supported=ALL_FIELDS - {field})


def test_defaults_and_finish_fields_are_always_honoured():
    fields = {"max_tokens": 3, "min_tokens": 1, "stop": "x", "stop_token_ids": [1]}
    assert set(fields) | {"ignore_eos"} | set(NON_DEFAULT) == ALL_FIELDS
    validate(request(ignore_eos=True, **fields), supported=frozenset())


def test_completion_defaults_are_not_shared():
    one, two = (Completion([1], "a", "length") for _ in range(2))
    one.stats["steps"] = 3
    assert two.stats == {}
    assert one.usage == Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
