"""Tokenizer files, chat templates, and text that comes piece by piece."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from m31jax.errors import CheckpointError, RequestError
from m31jax.text import Detokenizer, Tokenizer

BOS, EOS = "]~!b[", "[e~["
SPECIAL = [BOS, EOS, "]~b]", "<mm:think>", "</mm:think>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind",
    "größe façade naïve Ωμέγα привет мир",
    "日本語のテキスト 中文文本 한국어 텍스트 नमस्ते दुनिया",
    "😀😃😄 👩‍👩‍👧 🇯🇵🇰🇷 🎉🎉",
] * 20


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE; its merges make tokens that begin or end inside a character."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["]<]minimax[>[", "]<]start of image[>["])
    return backend


def with_bos(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return backend


def write(
    folder: Path,
    backend: tokenizers.Tokenizer | None = None,
    config: Any = None,
    **files: Any,
) -> Path:
    """A model directory: tokenizer.json, tokenizer_config.json and other files by stem."""
    folder.mkdir(exist_ok=True)
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for stem, content in files.items():
        if stem == "chat_template":
            (folder / "chat_template.jinja").write_text(content)
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    return folder


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    return load(write(folder, byte_level(), {"bos_token": BOS, "eos_token": {"content": EOS}}))


def templated(tmp_path: Path, template: str) -> Tokenizer:
    return load(write(tmp_path, byte_level(), {"bos_token": BOS}, chat_template=template))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id a byte."""
    letters = {i: chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))}
    rest = (i for i in range(256) if i not in letters)
    letters |= {i: chr(256 + k) for k, i in enumerate(rest)}
    return [tokenizer._backend.token_to_id(letters[i]) for i in data]


# Files


def test_no_tokenizer_is_none(tmp_path):
    assert Tokenizer.from_dir(tmp_path) is None
    assert Tokenizer.from_dir(write(tmp_path, config={"bos_token": BOS})) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b'{"model"'),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\n"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b'{"bos_token": '),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "x", "template": ""}]}'),
        ("tokenizer_config.json", b'{"chat_template": "{{"}'),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content):
    write(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.from_dir(tmp_path)


def test_special_tokens(tmp_path, tokenizer):
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, None)
    older = {"bos_token": "]~b]", "pad_token": {"content": EOS}}
    both = load(
        write(
            tmp_path, byte_level(), {"bos_token": BOS, "pad_token": None}, special_tokens_map=older
        )
    )
    assert both.special_tokens == {"bos_token": BOS, "pad_token": EOS}
    assert both.pad_id == 1


def test_declared_token_that_is_not_one_id(tmp_path):
    write(tmp_path, byte_level(), {"eos_token": "<|missing|>"})
    with pytest.raises(CheckpointError, match=r"'<\|missing\|>' is \d+ ids .* must be one"):
        Tokenizer.from_dir(tmp_path)


def test_vocab_size(tokenizer):
    size = tokenizer.vocab_size
    assert size - 1 == tokenizer.token_id("]<]start of image[>[")  # the last one added
    tokenizer.check_vocab_size(size)
    tokenizer.check_vocab_size(2 * size)
    with pytest.raises(CheckpointError, match=f"ids up to {size - 1} .* is {size - 1};"):
        tokenizer.check_vocab_size(size - 1)


def test_token_id(tokenizer):
    assert tokenizer.token_id("<mm:think>") == 3
    assert tokenizer.token_id("]<]minimax[>[") == tokenizer.vocab_size - 2
    assert tokenizer.token_id("\n") == byte_ids(tokenizer, b"\n")[0]
    for text in ("<think>", ""):
        with pytest.raises(CheckpointError, match=rf"'{text}' is \d+ ids"):
            tokenizer.token_id(text)


# Encoding


@pytest.mark.parametrize(
    ("post_processor", "add_bos_token", "plain"),
    [
        (False, None, []),
        (False, False, []),
        (False, True, [0]),
        (True, None, [0]),
        (True, True, [0]),
    ],
)
def test_bos_is_added_when_asked_and_never_doubled(tmp_path, post_processor, add_bos_token, plain):
    backend = with_bos(byte_level()) if post_processor else byte_level()
    config: dict[str, Any] = {"bos_token": BOS}
    if add_bos_token is not None:
        config["add_bos_token"] = add_bos_token
    tokenizer = load(write(tmp_path, backend, config))
    text = tokenizer.encode("the dog", add_special=False)
    assert 0 not in text
    assert tokenizer.encode("the dog") == plain + text
    assert tokenizer.encode(f"{BOS}the dog") == [0, *text]
    assert tokenizer.encode(f"{BOS}{BOS}the dog") == [0, *text]
    assert tokenizer.encode(f"{BOS}the dog", add_special=False) == [0, *text]
    assert tokenizer.encode("") == plain


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the lazy dog" * 9)) == "the lazy dog" * 9
    assert tokenizer.encode("") == []


def test_lone_surrogate_is_refused(tokenizer):
    with pytest.raises(RequestError, match=r"'\\ud800' at character 3"):
        tokenizer.encode("abc\ud800")


# Decoding


def test_decode_hides_special_tokens_but_not_the_tags(tokenizer):
    text = f"{BOS}<mm:think>why</mm:think>so]<]minimax[>[{EOS}"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == "<mm:think>why</mm:think>so]<]minimax[>["
    assert tokenizer.decode(ids, skip_special=False) == text
    assert tokenizer.decode([]) == ""


def test_ids_without_a_token_have_no_text(tokenizer):
    ids = tokenizer.encode("the dog")
    assert tokenizer.decode([10**9, *ids, tokenizer.vocab_size]) == "the dog"
    with pytest.raises(RequestError, match="-1 is negative"):
        tokenizer.decode([-1])


def test_character_is_held_until_it_is_complete(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = byte_ids(tokenizer, "a😀b".encode())
    assert [detokenizer.push([i]) for i in ids] == ["a", "", "", "", "😀", "b"]
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_unfinished_character_becomes_one_replacement_at_the_end(tokenizer, cut):
    detokenizer = Detokenizer(tokenizer)
    ids = byte_ids(tokenizer, b"a" + "😀".encode()[:cut])
    assert [detokenizer.push([i]) for i in ids] == ["a"] + [""] * cut
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""
    assert detokenizer.push(byte_ids(tokenizer, b"b")) == "b"  # afresh


def test_special_token_inside_a_character_does_not_break_it(tokenizer):
    first, *rest = byte_ids(tokenizer, "é".encode())
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(part) for part in ([first], [1], [10**6], [], rest)] == [""] * 4 + [
        "é"
    ]


def test_special_tokens_shown_on_request(tokenizer):
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    assert detokenizer.push(tokenizer.encode(f"the dog{EOS}")) == f"the dog{EOS}"


class Counting(Tokenizer):
    """Counts the ids that are decoded."""

    longest = total = 0

    def decode_visible(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        self.total += len(ids)
        return super().decode_visible(ids)


@pytest.mark.parametrize(
    "pattern",
    [
        b"dog ",
        b"\x80",  # never a character, never complete
        b"\xf0",
        "\ufffd".encode(),  # a character that looks like a broken one
        b"\xe2\x82",
        "€".encode(),
    ],
)
def test_cost_of_a_token_does_not_grow(tmp_path, pattern):
    tokenizer = Counting.from_dir(write(tmp_path, byte_level()))
    assert isinstance(tokenizer, Counting)
    ids = byte_ids(tokenizer, pattern * (3000 // len(pattern)))
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push([i]) for i in ids]
    assert tokenizer.longest <= 33
    assert tokenizer.total <= 40 * len(ids)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + detokenizer.flush() == whole
    assert len("".join(pieces)) >= len(whole) - 3  # nothing piles up


IDS = st.lists(st.integers(0, 480), max_size=120)
BYTES = st.lists(st.sampled_from([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98]))
CUTS = st.lists(st.integers(0, 40), max_size=120)


def check_pieces(tokenizer: Tokenizer, ids: Sequence[int], sizes: Sequence[int]) -> None:
    """Push ids in groups of the given sizes (the rest one by one); compare at every step."""
    detokenizer = Detokenizer(tokenizer)
    groups, at = [], 0
    for size in sizes:
        groups.append(ids[at : at + size])
        at += size
    groups += [[i] for i in ids[at:]]
    sent, seen = "", []
    for group in groups:
        sent += detokenizer.push(group)
        seen += group
        so_far = tokenizer.decode(seen)
        # What is complete is out at once, and nothing else.
        assert sent == so_far[: len(sent)]
        assert so_far[len(sent) :] == "\ufffd" * min(3, len(so_far) - len(so_far.rstrip("\ufffd")))
    assert sent + detokenizer.flush() == tokenizer.decode(ids)


@given(IDS, CUTS)
def test_property_pieces_join_to_the_whole(tokenizer, ids, sizes):
    check_pieces(tokenizer, ids, sizes)


@given(BYTES, CUTS)
def test_property_pieces_of_broken_utf8_join_to_the_whole(tokenizer, data, sizes):
    check_pieces(tokenizer, byte_ids(tokenizer, bytes(data)), sizes)


@given(st.text(), CUTS)
def test_property_pieces_of_text_join_to_the_text(tokenizer, text, sizes):
    ids = tokenizer.encode(text, add_special=False)
    check_pieces(tokenizer, ids, sizes)
    assert tokenizer.decode(ids, skip_special=False) == text


def test_leading_spaces_survive(tmp_path):
    """A decoder that strips the first word's space gives other text for an id on its own."""
    words = ["\u2581Hello", "\u2581big", "ger", "\u2581world", "!"]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="!")
    )
    backend.decoder = decoders.Metaspace()
    tokenizer = load(write(tmp_path, backend))
    assert tokenizer.decode([3]) == "world"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in range(5)] == ["Hello", " big", "ger", " world", "!"]
    ids = [0, 1, 2, 3, 4] * 30
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push([i]) for i in ids) == tokenizer.decode(ids)


def test_byte_fallback_characters_are_held(tmp_path):
    """This decoder writes one U+FFFD for each byte of an unfinished character."""
    vocab = ["a", *(f"<0x{byte:02X}>" for byte in "😀".encode())]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="a")
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = load(write(tmp_path, backend))
    assert tokenizer.decode([0, 1, 2, 3]) == "a\ufffd\ufffd\ufffd"
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in (0, 1, 2, 3, 4, 0)] == ["a", "", "", "", "😀", "a"]


# Chat templates

TEMPLATE = """\
{%- if tools %}{{ '[tools]' + (tools | tojson) }}{% endif -%}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role not in ('user', 'assistant', 'system') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{{- ']~b]' + ('ai' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{{- '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- ']~b]ai\\n' }}
    {%- if thinking_mode == 'enabled' %}{{- '<mm:think>' }}{% endif %}
{%- endif %}"""


def test_chat_template_renders_a_conversation(tmp_path):
    tokenizer = templated(tmp_path, TEMPLATE)
    messages = [
        {"role": "user", "content": "1 < 2 & 'so'?"},
        {"role": "skip"},
        {"role": "assistant", "content": "yes"},
    ]
    history = "]~!b[]~b]user\n1 < 2 & 'so'?[e~[\n]~b]ai\nyes[e~[\n"
    assert tokenizer.apply_chat_template(messages) == history + "]~b]ai\n"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == history
    thinking = tokenizer.apply_chat_template(messages, thinking_mode="enabled")
    assert thinking == history + "]~b]ai\n<mm:think>"
    assert tokenizer.encode(thinking, add_special=False).count(0) == 1
    tools = [{"name": "f<", "description": "größe"}]
    rendered = tokenizer.apply_chat_template(messages, tools=tools)
    assert rendered.startswith('[tools][{"name": "f<", "description": "größe"}]]~!b[')


def test_template_blocks_are_trimmed_as_hugging_face_does(tmp_path):
    tokenizer = templated(tmp_path, "a\n    {% if true %}\nb\n    {% endif %}\nc")
    assert tokenizer.apply_chat_template([]) == "a\nb\nc"


def test_template_loop_controls_and_scopes(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% set x = m %}{% generation %}{{ x }}{% set x = 9 %}{% endgeneration %}{{ x }},"
        "{% endfor %}"
    )
    tokenizer = templated(tmp_path, template)
    assert tokenizer.apply_chat_template([1, 2, 3]) == "11,22,"  # pyright: ignore


def test_template_helpers(tmp_path):
    template = "{{ strftime_now('%Y') }} {{ {'b': 1, 'a': '<é>'} | tojson(indent=1) }}"
    rendered = templated(tmp_path, template).apply_chat_template([])
    year, rest = rendered.split(" ", 1)
    assert year.isdecimal()
    assert len(year) == 4
    assert rest == '{\n "b": 1,\n "a": "<é>"\n}'
    (tmp_path / "chat_template.jinja").write_text("{{ documents is none }} {{ eos_token }}.")
    assert load(tmp_path).apply_chat_template([]) == "True ."


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('bad turn order') }}", "bad turn order"),
        ("{{ 'x' + messages[0].content }}", "NoneType"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ missing.field }}", "missing"),
        ("{{ strftime_now(3) }}", "str"),
    ],
)
def test_refusals_are_request_errors(tmp_path, template, reason):
    tokenizer = templated(tmp_path, template)
    with pytest.raises(RequestError, match=reason):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])


def test_templates_are_found(tmp_path):
    def rendered(**kwargs: Any) -> str:
        return load(tmp_path).apply_chat_template([], **kwargs)

    write(tmp_path, byte_level())
    with pytest.raises(RequestError, match="no chat template"):
        rendered()
    assert load(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    write(tmp_path, config={"chat_template": named})
    assert (rendered(), rendered(tools=[{}]), rendered(tools=[])) == ("D", "T", "D")
    write(tmp_path, config={"chat_template": "key"})
    assert rendered() == "key"
    write(tmp_path, chat_template="file")
    assert rendered() == "file"
    assert load(tmp_path).chat_template == "file"
    with pytest.raises(RequestError, match="'messages'"):
        rendered(messages=[])
