"""What a caller asks for and what comes back: `SamplingParams`, `Request`, `Completion`.

A front end builds a `Request` from a prompt and a `SamplingParams`. Each checks itself when it is
made (types, ranges); `Request.validate_for` then checks it against one loaded model. Everything
refused raises `RequestError`.
"""

import dataclasses
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .errors import RequestError

if TYPE_CHECKING:
    from .config import ModelConfig

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = (
    4096  # text that may still become a stop string is withheld, so its length is bounded
)
MAX_LOGPROBS = 20
GREEDY_TEMPERATURE = 1e-5  # dividing logits by less than this only overflows: the arg-max is meant

FinishReason = Literal["stop", "length", "tool_calls", "abort"]

# Fields that `finish.Finish` acts on, so that every mode honours them.
ALWAYS_SUPPORTED = frozenset({"max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"})


def _integer(field: str, value: Any, low: int, high: int | None, way_out: str) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise RequestError(f"{field}={value!r} is not an integer; {way_out}")
    number = int(value)
    if number < low or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise RequestError(f"{field}={value!r} is not {limit}; {way_out}")
    return number


def _real(field: str, value: Any, low: float, high: float, way_out: str, *, above=False) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise RequestError(f"{field}={value!r} is not a number; {way_out}")
    number: Any = value
    # Written so that NaN, which compares false with everything, is refused.
    if not low <= number <= high or (above and number == low):
        limit = f"{'(' if above else '['}{low:g}, {high:g}]"
        raise RequestError(f"{field}={value!r} is not in {limit}; {way_out}")
    return float(number)


def _items(field: str, value: Any, of_what: str) -> list[Any]:
    if value is None:  # JSON null: not given
        return []
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{field}={value!r} is not a list; pass a list of {of_what}")
    return list(value)


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    way_out = "pass token ids of the model's vocabulary"
    ids = enumerate(_items(field, value, "token ids"))
    return tuple(_integer(f"{field}[{i}]", x, 0, None, way_out) for i, x in ids)


def _strings(field: str, value: Any) -> tuple[str, ...]:
    strings = _items(field, value, "strings")
    for i, x in enumerate(strings):
        if not isinstance(x, str) or not x:
            raise RequestError(f"{field}[{i}]={x!r} is not a non-empty string; leave it out")
    return tuple(strings)


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias={value!r} is not a dict; pass {{token id: bias}}")
    out = {}
    for token, bias in value.items():
        token = _integer("logit_bias key", token, 0, None, "keys are integer token ids")
        out[token] = _real(f"logit_bias[{token}]", bias, -100, 100, "-100 all but bans a token")
    return out


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose and when to stop the tokens of one request. Checked when made; hashable.

    Lists are stored as tuples (a single `stop` string too) and `logit_bias` as a copied dict.

    Attributes:
      max_tokens: most tokens to generate, at least 1.
      temperature: 0 to 2; 0 is greedy.
      top_p: keep the most likely tokens until their mass reaches it; in (0, 1], 1 is off.
      top_k: keep the k most likely tokens; 0 (or -1) is off.
      min_p: drop tokens less likely than this fraction of the most likely one; 0 is off.
      seed: int64; the tokens are then a function of the request alone. None: the engine picks.
      stop: at most 16 strings; the text ends before the first one that appears.
      stop_token_ids: ids that end the text, beside the model's end-of-sequence ids.
      ignore_eos: go on after an end-of-sequence id (ids in `stop_token_ids` still stop).
      min_tokens: no stop string or id ends the text before this many tokens.
      logprobs: None: none. k in 0..20: the chosen token's log-probability and the k best.
      n: samples of the same prompt; sample i draws from a stream of its own.
      presence_penalty, frequency_penalty: -2 to 2; subtracted once per seen id, or per occurrence.
      repetition_penalty: 0.01 to 100; 1 is off.
      logit_bias: {token id: -100..100}, added to the logits.
      bad_words: strings that must not be generated.
      allowed_token_ids: if not None, the only ids that may be generated.
    Raises:
      RequestError: names the field, its value, the limit and the way out.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self):
        checked = {
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, None, "ask for at least one"),
            "temperature": _real(
                "temperature", self.temperature, 0, 2, "0 is greedy, 1 is neutral"
            ),
            "top_p": _real("top_p", self.top_p, 0, 1, "1 turns it off", above=True),
            "top_k": max(0, _integer("top_k", self.top_k, -1, None, "0 turns it off")),
            "min_p": _real("min_p", self.min_p, 0, 1, "0 turns it off"),
            "seed": None
            if self.seed is None
            else _integer("seed", self.seed, -(2**63), 2**63 - 1, "seeds are 64-bit, or None"),
            "stop": self._checked_stop(),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "min_tokens": _integer("min_tokens", self.min_tokens, 0, None, "0 turns it off"),
            "logprobs": None
            if self.logprobs is None
            else _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None turns it off"),
            "n": _integer("n", self.n, 1, None, "ask for at least one sample"),
            "repetition_penalty": _real(
                "repetition_penalty", self.repetition_penalty, 0.01, 100, "1 turns it off"
            ),
            "logit_bias": _logit_bias(self.logit_bias),
            "bad_words": _strings("bad_words", self.bad_words),
        }
        for field in ("presence_penalty", "frequency_penalty"):
            checked[field] = _real(field, getattr(self, field), -2, 2, "0 turns it off")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos={self.ignore_eos!r} is not True or False; pass a bool")
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise RequestError("allowed_token_ids=[] allows no token at all; None allows all")
            checked["allowed_token_ids"] = allowed
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is over max_tokens={self.max_tokens}; lower it"
            )

    def _checked_stop(self) -> tuple[str, ...]:
        strings = _strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop)
        if len(strings) > MAX_STOP_STRINGS:
            raise RequestError(
                f"stop has {len(strings)} strings, the limit is {MAX_STOP_STRINGS}; pass fewer"
            )
        for i, x in enumerate(strings):
            if len(x) > MAX_STOP_CHARS:
                raise RequestError(
                    f"stop[{i}] has {len(x)} characters, the limit is {MAX_STOP_CHARS}; shorten it"
                )
        return strings

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the arg-max, so that no random number is drawn."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1

    def non_default_fields(self) -> tuple[str, ...]:
        """Names of the fields that differ from their default, in order."""
        names = (f.name for f in dataclasses.fields(self))
        return tuple(name for name in names if getattr(self, name) != getattr(_DEFAULTS, name))


_DEFAULTS = SamplingParams()


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt to complete once; n samples are n requests that differ in `sample_index`.

    Compared by identity: two requests with the same content are still two requests.

    Attributes:
      request_id: unique among the requests that one scheduler knows.
      prompt_ids: token ids of the prompt.
      params: how to sample and when to stop.
      sample_index: which of the n samples; the random stream comes from (seed, sample_index).
    """

    request_id: str
    prompt_ids: tuple[int, ...] = dataclasses.field(repr=False)  # logs never show a prompt
    params: SamplingParams = _DEFAULTS
    sample_index: int = 0

    def __post_init__(self):
        object.__setattr__(self, "prompt_ids", _token_ids("prompt_ids", self.prompt_ids))
        if not isinstance(self.params, SamplingParams):
            raise RequestError(f"params={self.params!r} is no SamplingParams; build one")

    def validate_for(
        self,
        config: "ModelConfig",
        max_seq_len: int,
        tokenizer_present: bool,
        supported: frozenset[str],
    ) -> None:
        """Check the request against one loaded model.

        Args:
          config: the model; its `vocab_size` bounds every id.
          max_seq_len: most tokens a slot can hold, prompt and output together.
          tokenizer_present: whether ids can be turned into text.
          supported: `SamplingParams` fields the current mode honours, beside `ALWAYS_SUPPORTED`.
        Raises:
          RequestError: names the field, its value, the limit and the way out.
        """
        params = self.params
        refused = [
            name for name in params.non_default_fields() if name not in supported | ALWAYS_SUPPORTED
        ]
        if refused:
            values = ", ".join(f"{name}={getattr(params, name)!r}" for name in refused)
            raise RequestError(
                f"{values} cannot be honoured by this engine; leave out {', '.join(refused)} "
                f"(it honours {', '.join(sorted(supported | ALWAYS_SUPPORTED))})"
            )
        check_length(len(self.prompt_ids), params.max_tokens, max_seq_len)
        id_fields: dict[str, Iterable[int]] = {
            "prompt_ids": self.prompt_ids,
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for field, ids in id_fields.items():
            for i, token in enumerate(ids):
                if token >= config.vocab_size:
                    raise RequestError(
                        f"{field}: id {token} (entry {i}) is outside the vocabulary of "
                        f"{config.vocab_size} ids; use ids 0 to {config.vocab_size - 1}"
                    )
        if not tokenizer_present:
            for field in ("stop", "bad_words"):
                if getattr(params, field):
                    raise RequestError(
                        f"{field}={getattr(params, field)!r} needs a tokenizer and this model "
                        "directory has none; use stop_token_ids, or add the tokenizer files"
                    )


def check_length(prompt_tokens: int, max_tokens: int, max_seq_len: int) -> None:
    """Refuse a prompt that is empty, or too long to leave room for `max_tokens` more.

    Raises:
      RequestError: states both numbers and the limit.
    """
    if prompt_tokens < 1:
        raise RequestError("prompt_ids is empty; a prompt needs at least 1 token")
    if prompt_tokens + max_tokens > max_seq_len:
        room = max_seq_len - prompt_tokens
        way_out = f"lower max_tokens to {room}" if room > 0 else "shorten the prompt"
        raise RequestError(
            f"the prompt has {prompt_tokens} tokens and max_tokens={max_tokens}: together "
            f"{prompt_tokens + max_tokens}, over the limit max_seq_len={max_seq_len}; {way_out}"
        )


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts of one completion; `cached_tokens`: prompt tokens from a reused prefix."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one generated token, and of the likeliest ones at its position.

    Attributes:
      token_id, logprob: the chosen token; log-softmax of the target's logits.
      top: (id, log-probability), best first, lowest id on ties; contains the chosen token.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass
class Completion:
    """The answer to one request.

    Attributes:
      token_ids: generated ids, up to and including the one that ended the text.
      text: their text, without the stop string or stop id; empty when there is no tokenizer.
      finish_reason: why it ended.
      stop_reason: the stop string or stop id, when `finish_reason` is "stop".
      logprobs: one entry per id of `token_ids`; None if not asked for.
      usage: token counts.
      stats: measurements of the run; a key that does not apply is absent.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    usage: Usage = Usage(0, 0)
    stats: dict[str, Any] = dataclasses.field(default_factory=dict)
