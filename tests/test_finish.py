"""The finish rule, against an oracle that decodes and searches the whole text at every position."""

import codecs
import itertools
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from m31jax.errors import RequestError
from m31jax.finish import Finish, Step
from m31jax.request import SamplingParams

EOS = 0
# Pieces that make stop strings span tokens, begin inside them, overlap, and cut characters apart.
PIECES = [b"", b"a", b"b", b"ab", b"ba", b"aab", b" ", "é".encode(), "é".encode()[:1]]
PIECES += ["é".encode()[1:], "\u2603".encode()[:2], "\u2603".encode()[2:], b"xabx", b"bab"]
STOPS = ["a", "b", "ab", "ba", "aba", "abab", "bb", "é", "a\u2603", "x", "xabxa", " ", "\ufffd"]


class ByteDetokenizer:
    """Each id is a piece of UTF-8; `pieces[EOS]` is empty, as for a special token."""

    def __init__(self, pieces):
        self.pieces = pieces
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids):
        return self.decoder.decode(b"".join(self.pieces[i] for i in ids))

    def flush(self):
        return self.decoder.decode(b"", final=True)


def finish(pieces=PIECES, eos=(EOS,), **params):
    params = {"max_tokens": 64} | params
    return Finish(SamplingParams(**params), eos, ByteDetokenizer(pieces))


def run(rule, groups):
    """Push every group; return the joined result and the texts as they were released."""
    steps = [rule.push(group) for group in groups]
    ids = tuple(x for step in steps for x in step.token_ids)
    texts = [step.text for step in steps]
    return Step(ids, "".join(texts), steps[-1].finish_reason, steps[-1].stop_reason), texts


def words(text):
    """One id per word of `text`, ids from 1; a `|` joins pieces without a space."""
    pieces = [b""] + [x.encode() for x in text.split("|")]
    return pieces, list(range(1, len(pieces)))


def first_stop(text, searched, stops):
    """The stop string that ends first beyond `searched`, the longest on ties, and its start."""
    ends = [
        (start + len(stop), -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > searched
    ]
    if not ends:
        return None, len(text)
    end, minus_length, stop = min(ends)
    return stop, end + minus_length


def oracle(ids, params):
    """The rule by brute force: nothing is kept from one position to the next."""

    def text_of(count, final):
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(PIECES[i] for i in ids[:count]), final)

    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    for count in range(1, len(ids) + 1):
        armed = count >= params.min_tokens
        is_stop_id = armed and ids[count - 1] in stop_ids
        text, final = text_of(count, False), None
        if is_stop_id:
            final = text_of(count - 1, True)
            own = codecs.decode(PIECES[ids[count - 1]], "utf-8", "replace")
            text = final + own
        elif count == params.max_tokens:
            text = final = text_of(count, True)
        stop, start = first_stop(text, len(text_of(count - 1, False)), params.stop)
        if armed and stop is not None:
            return Step(tuple(ids[:count]), text[:start], "stop", stop)
        if is_stop_id:
            return Step(tuple(ids[:count]), final, "stop", ids[count - 1])
        if count == params.max_tokens:
            return Step(tuple(ids[:count]), final, "length", None)
    return None


@st.composite
def cases(draw):
    ids = draw(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=24))
    if draw(st.booleans()):
        ids = [x for x in ids if x != EOS] or [1]
    max_tokens = draw(st.integers(1, len(ids)))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop=draw(st.lists(st.sampled_from(STOPS), max_size=4)),
        stop_token_ids=draw(st.lists(st.integers(0, len(PIECES) - 1), max_size=2)),
        ignore_eos=draw(st.booleans()),
    )
    cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=8)))
    bounds = [0, *cuts, len(ids)]
    return params, [ids[a:b] for a, b in itertools.pairwise(bounds)]


@given(cases())
@example((SamplingParams(stop="ab", max_tokens=2), [[1], [2]]))
def test_any_grouping_gives_what_the_whole_text_says(case):
    params, groups = case
    ids = [x for group in groups for x in group]
    grouped, _ = run(Finish(params, (EOS,), ByteDetokenizer(PIECES)), groups)
    single, _ = run(Finish(params, (EOS,), ByteDetokenizer(PIECES)), [[x] for x in ids])
    assert grouped == single
    assert grouped == oracle(ids, params)


@given(cases())
def test_released_text_is_never_taken_back_and_waits_only_for_a_stop(case):
    params, groups = case
    rule = Finish(params, (EOS,), ByteDetokenizer(PIECES))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    sent = complete = ""
    for token in [x for group in groups for x in group]:
        step = rule.push([token])
        sent += step.text
        complete += decoder.decode(PIECES[token])
        if step.finish_reason is not None:
            break
        assert complete.startswith(sent)
        held = complete[len(sent) :]
        may_grow = any(stop.startswith(held) and stop != held for stop in params.stop)
        assert may_grow or not held, "text is withheld that no stop string begins with"
        for size in range(len(held) + 1, len(complete) + 1):
            suffix = complete[-size:]
            assert not any(stop.startswith(suffix) and stop != suffix for stop in params.stop)


def test_stop_string_inside_an_accepted_block():
    pieces, ids = words("a| |STOP| b| c| d| e| f")
    assert len(ids) == 8
    step = finish(pieces, stop=["STOP"]).push(ids)
    assert step == Step((1, 2, 3), "a ", "stop", "STOP")


@pytest.mark.parametrize("sizes", [[3, 5], [1] * 8, [8], [2, 1, 5], [4, 4]])
def test_stop_string_split_over_steps_never_reaches_the_stream(sizes):
    pieces, ids = words("a| ST|OP| b| c| d| e| f")
    groups = [[ids.pop(0) for _ in range(size)] for size in sizes]
    result, texts = run(finish(pieces, stop=["STOP"]), groups)
    assert result == Step((1, 2, 3), "a ", "stop", "STOP")
    assert all("S" not in text for text in texts)


def test_withheld_text_is_released_once_it_cannot_be_a_stop():
    pieces, ids = words("x S|T|A")
    rule = finish(pieces, stop=["STOP", "TAB"])
    assert [rule.push([i]).text for i in ids] == ["x ", "", "S"]
    assert rule.abort().text == "TA"


def test_withheld_text_is_released_at_the_length_limit():
    pieces, ids = words("x|ST")
    rule = finish(pieces, stop=["STOP"], max_tokens=2)
    assert run(rule, [ids])[0] == Step((1, 2), "xST", "length", None)


def test_stop_string_wins_over_stop_id_and_length():
    pieces, ids = words("ab|c")
    both = finish(pieces, stop=["bc"], stop_token_ids=[2], max_tokens=2)
    assert both.push(ids) == Step((1, 2), "a", "stop", "bc")
    length_only = finish(pieces, stop=["bc"], max_tokens=2)
    assert length_only.push(ids) == Step((1, 2), "a", "stop", "bc")


def test_stop_id_wins_over_length():
    pieces, ids = words("ab|c")
    assert finish(pieces, stop_token_ids=[2], max_tokens=2).push(ids) == Step(
        (1, 2), "ab", "stop", 2
    )


def test_stop_id_is_counted_and_its_text_is_not():
    pieces, ids = words("a|b|c")
    for stop in ([], ["zz"], ["bc"]):
        rule = finish(pieces, stop_token_ids=[2], stop=stop)
        assert rule.push(ids) == Step((1, 2), "a", "stop", 2)
        assert rule.token_count == 2


def test_text_withheld_before_a_stop_id_is_released():
    pieces, ids = words("xST|!|y")
    rule = finish(pieces, stop_token_ids=[2], stop=["STOP", "T!!"])
    assert rule.push(ids) == Step((1, 2), "xST", "stop", 2)


def test_first_token_may_end_the_request():
    assert finish().push([EOS]) == Step((EOS,), "", "stop", EOS)
    assert finish(max_tokens=1).push([1, 2]) == Step((1,), "a", "length", None)


def test_ignore_eos_keeps_stop_token_ids():
    assert finish(ignore_eos=True, max_tokens=3).push([EOS, 1, 2]).finish_reason == "length"
    step = finish(ignore_eos=True, stop_token_ids=[EOS]).push([1, EOS, 1])
    assert step == Step((1, EOS), "a", "stop", EOS)


def test_min_tokens_suppresses_stops_but_not_length():
    assert finish(min_tokens=3).push([EOS, 1, EOS, 1]) == Step((EOS, 1, EOS), "a", "stop", EOS)
    pieces, ids = words("S|S|S|x|S|y")
    step = finish(pieces, stop=["S"], min_tokens=4).push(ids)
    assert step == Step((1, 2, 3, 4, 5), "SSSx", "stop", "S")
    assert finish(min_tokens=2, max_tokens=2).push([EOS, 1, 1]).finish_reason == "length"


def test_a_stop_string_begun_before_min_tokens_may_end_after():
    pieces, ids = words("S|S|S")
    step = finish(pieces, stop=["SS"], min_tokens=3).push(ids)
    assert step == Step((1, 2, 3), "S", "stop", "SS")


def test_of_stop_strings_in_one_token_the_first_to_end_wins_then_the_longest():
    pieces, ids = words("xabcd")
    assert finish(pieces, stop=["abcd", "bc"]).push(ids) == Step((1,), "xa", "stop", "bc")
    assert finish(pieces, stop=["d", "cd", "bcd"]).push(ids) == Step((1,), "xa", "stop", "bcd")


def test_unfinished_character_ends_as_one_replacement():
    snowman = "\u2603".encode()
    pieces = [b"", b"a", snowman[:2], snowman[2:]]
    assert finish(pieces, max_tokens=3).push([1, 2, 3]).text == "a\u2603"
    assert finish(pieces, max_tokens=2).push([1, 2]).text == "a\ufffd"
    assert finish(pieces).push([1, 2, EOS]).text == "a\ufffd"
    rule = finish(pieces)
    assert rule.push([1, 2]).text == "a"
    assert rule.abort().text == "\ufffd"


def test_after_the_end_everything_is_dropped():
    rule = finish(max_tokens=1)
    ended = rule.push([1])
    assert rule.push([2, 2]) == Step((), "", "length", None)
    assert rule.abort() == Step((), "", "length", None)
    assert (rule.token_count, rule.finish_reason) == (1, ended.finish_reason)


def test_abort_ends_the_request():
    rule = finish(stop=["ab"])
    assert rule.push([1]).text == ""
    assert rule.abort() == Step((), "a", "abort", None)
    assert rule.push([2]) == Step((), "", "abort", None)


def test_abort_does_not_send_a_stop_string_made_of_an_unfinished_character():
    rule = finish([b"", b"a", "\u2603".encode()[:2]], stop=["a\ufffd"])
    rule.push([1, 1, 2])
    assert rule.abort() == Step((), "", "abort", None)


def test_without_a_detokenizer():
    rule = Finish(SamplingParams(max_tokens=5, stop_token_ids=[9]), (EOS,), None)
    assert rule.push([4, 5]) == Step((4, 5), "", None, None)
    assert rule.push([9, 4]) == Step((9,), "", "stop", 9)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        Finish(SamplingParams(stop="x"), (EOS,), None)


def test_what_is_kept_does_not_grow_with_the_output():
    # A token's cost is bounded by what it is compared with: the automaton and the withheld text.
    pieces, ids = words("ab ab a")
    rule = finish(pieces, stop=["ab abc", "a" * 50], max_tokens=10**6)

    def kept_bytes():
        return len(pickle.dumps({k: v for k, v in vars(rule).items() if k != "_detokenizer"}))

    rule.push(ids * 10)
    early = kept_bytes()
    rule.push(ids * 20_000)
    assert rule.finish_reason is None
    assert kept_bytes() < early + 16, "16 bytes: the counter's own growth"
