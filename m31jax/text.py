"""Text and ids: a checkpoint's tokenizer and chat template, and incremental detokenising."""

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import CheckpointError, RequestError

THINK_OPEN: Final = "<mm:think>"
THINK_CLOSE: Final = "</mm:think>"
TOOL_PREFIX: Final = "]<]minimax[>["
"""Precedes every tag of a tool call."""

_SHOWN_TAGS: Final = frozenset((THINK_OPEN, THINK_CLOSE, TOOL_PREFIX))
_SPECIAL_NAMES: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
_REPLACEMENT: Final = "\ufffd"


class Tokenizer:
    """A checkpoint's tokenizer. Made by `from_dir`; shared by all requests and threads.

    Attributes:
      special_tokens: text of `bos_token`, `eos_token`, `pad_token`, `unk_token`, those declared.
      chat_template: Jinja source of the default template, or None.
      vocab_size: highest id plus one. A model's vocabulary may be larger; ids past this one have no
        text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        add_bos: bool,
        source: Path,
    ):
        # A tokenizer.json may carry the truncation and padding of some training run.
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_templates.get("default")
        self._backend = backend
        self._source = source
        self._add_bos = add_bos
        self._templates = {name: _compile(t, source) for name, t in chat_templates.items()}
        used = set(backend.get_vocab(with_added_tokens=True).values())
        self.vocab_size = max(used, default=-1) + 1
        self._holes = frozenset(range(self.vocab_size)) - used
        added = backend.get_added_tokens_decoder()
        self._hidden = self._holes | {
            i for i, token in added.items() if token.special and token.content not in _SHOWN_TAGS
        }
        self.bos_id = self._declared("bos_token")
        self.eos_id = self._declared("eos_token")
        self.pad_id = self._declared("pad_token")

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> Self | None:
        """The tokenizer of a model directory; None where there is no `tokenizer.json`.

        Reads tokenizer.json; special tokens from tokenizer_config.json, what is missing there from
        special_tokens_map.json; the chat template from chat_template.jinja, else from the
        `chat_template` key of tokenizer_config.json (one template, or a list of named ones).

        Raises:
          CheckpointError: a file is damaged, or declares a special token that is not one id.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        content = _read(file)
        try:
            backend = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the binding raises no narrower class
            raise CheckpointError(f"{file} is damaged: {error}; download it again") from error
        config_file = folder / "tokenizer_config.json"
        config = _read_json(config_file)
        older = _read_json(folder / "special_tokens_map.json")
        special = {}
        for name in _SPECIAL_NAMES:
            text = _token_text(config.get(name)) or _token_text(older.get(name))
            if text:
                special[name] = text
        template_file = folder / "chat_template.jinja"
        if template_file.is_file():
            templates = {"default": _read(template_file)}
            source = template_file
        else:
            templates = _templates(config.get("chat_template"), config_file)
            source = config_file
        return cls(
            backend,
            special_tokens=special,
            chat_templates=templates,
            add_bos=config.get("add_bos_token") is True,
            source=source if templates else file,
        )

    def check_vocab_size(self, vocab_size: int) -> None:
        """Check that every id of the tokenizer is one of the model's.

        A model may have more rows than the tokenizer has ids (a padded vocabulary).

        Raises:
          CheckpointError: the tokenizer has an id that the model lacks.
        """
        if self.vocab_size > vocab_size:
            raise CheckpointError(
                f"the tokenizer has ids up to {self.vocab_size - 1} and the model's vocab_size is "
                f"{vocab_size}; the tokenizer files belong to another checkpoint"
            )

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of text. Special tokens written out in the text become their ids.

        Args:
          text: any text; an empty one may give no ids.
          add_special: add what the tokenizer adds to a whole text: its post-processor's tokens, and
            the beginning-of-sequence token where tokenizer_config.json sets `add_bos_token`. The
            ids then never begin with two of those. False for a rendered chat template, which
            writes its own.
        Raises:
          RequestError: text holds half a surrogate pair, which no encoding can represent.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text has a lone surrogate {text[error.start]!r} at character {error.start}; "
                "send whole Unicode characters"
            ) from error
        ids = self._backend.encode(text, add_special_tokens=add_special).ids
        if add_special and self.bos_id is not None:
            if self._add_bos and ids[:1] != [self.bos_id]:
                ids.insert(0, self.bos_id)
            while ids[:2] == [self.bos_id, self.bos_id]:
                del ids[0]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD; ids without a token, nothing.

        Args:
          ids: token ids.
          skip_special: leave out special tokens, except the reasoning tags and the tool prefix,
            which are part of a reply's text whether or not the tokenizer calls them special.
        Raises:
          RequestError: an id is negative.
        """
        return self.decode_visible(self.visible(ids, skip_special=skip_special))

    def visible(self, ids: Iterable[int], *, skip_special: bool = True) -> list[int]:
        """Those of the ids that have text; see `decode`."""
        hidden = self._hidden if skip_special else self._holes
        kept = []
        for i in ids:
            if i < 0:
                raise RequestError(f"token id {i} is negative; ids start at 0")
            if i < self.vocab_size and i not in hidden:
                kept.append(int(i))
        return kept

    def decode_visible(self, ids: list[int]) -> str:
        """Text of ids that `visible` returned."""
        return self._backend.decode(ids, skip_special_tokens=False)

    def token_id(self, text: str) -> int:
        """The one id of a token written as `text`, such as a reasoning tag.

        Raises:
          CheckpointError: the tokenizer writes it with no id or several.
        """
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise CheckpointError(
                f"{text!r} is {len(ids)} ids {ids} in this tokenizer and must be one; "
                f"the tokenizer files in {self._source.parent} are not those of this model"
            )
        return ids[0]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render messages with the checkpoint's own template, in a sandbox.

        Encode the result with `add_special=False`: templates write the beginning-of-sequence token
        themselves.

        Args:
          messages: as in a chat request: dicts with `role`, `content` and whatever the template
            reads.
          tools: function schemas; a template named `tool_use` is taken for them if there is one.
          add_generation_prompt: end with the opening of the assistant's turn.
          kwargs: further names that the template reads, such as `thinking_mode`.
        Raises:
          RequestError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(
                "this checkpoint has no chat template; send a raw prompt or token ids, or add "
                "chat_template.jinja to the model directory"
            )
        if "messages" in kwargs:
            raise RequestError("chat template argument 'messages' is taken by the messages")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        values = {"documents": None, **self.special_tokens, **kwargs}
        values |= {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._templates[name].render(values)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template adds, indexes and compares what the request holds, so that messages of a
            # shape it does not expect raise Python's own errors.
            raise RequestError(f"the chat template refused the messages: {error}") from error

    def _declared(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)


class Detokenizer:
    """Turns one request's ids into text, piece by piece.

    The pieces, the last `flush` included, join to `decode` of all ids, however they were grouped
    (for byte-level vocabularies, such as this model's). A piece never ends inside a character: its
    bytes are held until they are complete, or become U+FFFD at `flush`.

    It decodes a sliding window of recent ids and returns what was not returned before, so that
    rules about neighbours (leading spaces) hold and the cost of a token does not grow with the
    text. In the window at most three U+FFFD at the end can still change, one for each byte of an
    unfinished character; some decoders write one for all.

    Args:
      tokenizer: the checkpoint's.
      skip_special: as in `Tokenizer.decode`.
    """

    # Ids kept when the window slides. Each has a byte or more. The window may now start inside a
    # character: its first three bytes may then decode to other text, the remaining 13 decode to
    # the same four characters or more as before, and only the last three decide what is held.
    _KEEP: Final = 16

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._window: list[int] = []
        self._sent = 0  # characters of the window's text that were returned

    def push(self, ids: Iterable[int]) -> str:
        """Add ids; return the text that became complete. Unfinished characters are held.

        Raises:
          RequestError: an id is negative.
        """
        new = self._tokenizer.visible(ids, skip_special=self._skip_special)
        if not new:
            return ""
        self._window += new
        text = self._tokenizer.decode_visible(self._window)
        end = _settled(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        if len(self._window) > 2 * self._KEEP:
            del self._window[: -self._KEEP]
            self._sent = _settled(self._tokenizer.decode_visible(self._window))
        return piece

    def flush(self) -> str:
        """Return what is held, as U+FFFD where it is no character. A later push starts afresh."""
        text = self._tokenizer.decode_visible(self._window)[self._sent :]
        self._window, self._sent = [], 0
        return text


def _settled(text: str) -> int:
    """Length of the part of a window's text that later ids cannot change."""
    replaced = len(text) - len(text.rstrip(_REPLACEMENT))
    return len(text) - min(replaced, 3)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only renders it."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _compile(template: str, source: Path) -> jinja2.Template:
    """A template with the helpers that Hugging Face templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the chat template in {source} is not valid Jinja: line {error.lineno}: {error}"
        ) from error


def _templates(value: Any, source: Path) -> dict[str, str]:
    """Templates by name from the `chat_template` key: absent, a string, or a list of named ones."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    named = isinstance(value, list) and all(
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
        for entry in value
    )
    if not named or "default" not in (names := [entry["name"] for entry in value]):
        raise CheckpointError(
            f"chat_template in {source} is neither a string nor a list of "
            '{"name", "template"} with one named "default"'
        )
    return dict(zip(names, (entry["template"] for entry in value), strict=True))


def _token_text(value: Any) -> str | None:
    """A special token's text: written as a string, or as an object with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is damaged: {error}; download it again") from error


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is absent."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read(file))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{file} is damaged: {error}; download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object")
    return value
