"""Text in and out of an engine: prompts, completions, stop strings that span tokens and steps."""

import functools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from m31jax import CheckpointError, Engine, RequestError, SamplingParams
from tests import engines

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = "abé bad cafe é dead"


def tokenizer(size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of `size` ids, trained on random words of a few letters, one of two bytes."""
    draw = random.Random(4)
    words = ["".join(draw.choices("abcdefé", k=draw.randint(1, 6))) for _ in range(400)]
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size - 2, show_progress=False, initial_alphabet=[])
    made.train_from_iterator([" ".join(words)], trainer)
    made.add_special_tokens(["<bos>", "<eos>"])
    assert made.get_vocab_size() == size
    return made


@functools.cache
def folder(size: int = 96) -> Path:
    """`mini` with tokenizer files."""
    plain = engines.checkpoint("mini", "bf16")
    copy = plain.with_name(f"mini-text-{size}")
    shutil.copytree(plain, copy)
    tokenizer(size).save(str(copy / "tokenizer.json"))
    declared = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (copy / "tokenizer_config.json").write_text(json.dumps(declared))
    return copy


@functools.cache
def engine() -> Engine:
    return Engine.load(folder(), max_seq_len=128, progress=False)


def run(params, prompt=PROMPT):
    return engine().generate([prompt], params)[0]


def joined(params) -> tuple[str, list[int], list]:
    """Text, ids and pieces of a stream."""
    pieces = list(engine().stream(PROMPT, params))
    ids = [token for piece in pieces for token in piece.token_ids]
    return "".join(piece.text for piece in pieces), ids, pieces


def test_text_prompts_and_completions():
    ids = engine().encode(PROMPT)
    assert 3 < len(ids) < len(PROMPT.encode())
    out, same = run(GREEDY), run(GREEDY, ids)
    assert out.token_ids == same.token_ids
    assert out.usage.prompt_tokens == len(ids)
    assert engine().tokenizer is not None
    assert out.text == same.text == engine().tokenizer.decode(out.token_ids) != ""
    assert joined(GREEDY)[:2] == (out.text, out.token_ids)
    plain = engines.mini(max_seq_len=128).generate([ids], GREEDY)[0]
    assert (plain.token_ids, plain.text) == (out.token_ids, "")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(RequestError, match="empty"):
        run(GREEDY, "")


def cuts() -> list[tuple[str, int, str]]:
    """(stop string, tokens until it is complete, text before it) in the greedy text.

    Inside one token, over two, and over three; each such string occurs there for the first time.
    """
    ids = run(GREEDY).token_ids
    backend = engine().tokenizer
    assert backend is not None
    ends = [len(backend.decode(ids[: i + 1])) for i in range(len(ids))]
    text, found = backend.decode(ids), {}
    for spread in (1, 2, 3):
        for last in range(spread + 1, len(ids) - 1):
            start = ends[last - spread] - (spread > 1)  # a character of the first token
            stop = text[start : ends[last - 1] + 1] if spread > 1 else text[start : ends[last]]
            whole = "\ufffd" not in text[: ends[last] + 2]
            if whole and len(stop) >= spread and text.find(stop) == start:
                found[spread] = (stop, last + 1, text[:start])
                break
    assert set(found) == {1, 2, 3}
    return [found[spread] for spread in (1, 2, 3)]


@pytest.mark.parametrize("case", range(3))
def test_a_stop_string_ends_everything_where_it_ends(case):
    """Field report: the text was cut, but ids, log-probabilities and usage went on."""
    stop, count, text = cuts()[case]
    ids = run(GREEDY).token_ids
    params = replace(GREEDY, stop=["never there", stop], logprobs=1)
    out = run(params)
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert (out.text, out.token_ids) == (text, ids[:count])
    assert len(out.logprobs or ()) == out.usage.completion_tokens == count
    streamed, streamed_ids, pieces = joined(params)
    assert (streamed, streamed_ids) == (text, ids[:count])
    assert all(stop[0] not in piece.text[len(text) :] for piece in pieces)
    assert pieces[-1].stop_reason == stop
    assert engine().scheduler.num_running == 0


def test_a_stop_string_too_early_is_text():
    stop, count, _ = cuts()[1]
    out = run(replace(GREEDY, stop=stop, min_tokens=count + 1))
    assert len(out.token_ids) > count
    assert stop in out.text


def test_withheld_text_comes_out_at_the_end():
    """Text that could still become a stop string is sent once the length limit ends it."""
    stop, count, text = cuts()[2]
    params = replace(GREEDY, stop=stop, max_tokens=count - 1)
    streamed, ids, pieces = joined(params)
    assert pieces[-1].finish_reason == "length"
    assert len(ids) == count - 1
    assert streamed.startswith(text)
    assert streamed == run(replace(GREEDY, max_tokens=count - 1)).text


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="ids up to 99 and the model's vocab_size is 96"):
        Engine.load(folder(100), progress=False)
