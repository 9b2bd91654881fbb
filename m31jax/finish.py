"""The one finish rule: where a request's tokens end, and which text is safe to send.

Every mode feeds a request's tokens, in order, to one `Finish`: one at a time, or the several that a
speculative step accepts. Tokens are walked one by one, so the result does not depend on how they
were grouped into steps. The first position where something fires ends the request; whatever follows
is dropped. At one position a stop string wins over a stop id, and a stop id over the length limit.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from .errors import RequestError
from .request import FinishReason, SamplingParams


class Detokenizer(Protocol):
    """Turns one request's ids into text, in pieces."""

    def push(self, ids: list[int]) -> str:
        """Add ids; return the text that became complete. Unfinished characters are held."""
        ...

    def flush(self) -> str:
        """Return what is held, as U+FFFD where it is no character. A later push starts afresh."""
        ...


@dataclasses.dataclass(frozen=True)
class Step:
    """What one group of tokens came to.

    Attributes:
      token_ids: the accepted ids: those pushed, cut after the one that ended the request.
      text: text that can be sent now. Joined over the steps it is the request's text.
      finish_reason: None while the request goes on.
      stop_reason: the stop string or stop id, when `finish_reason` is "stop".
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class Finish:
    """Decides where one request ends. Feed it every token the model gives, in order.

    The token that completes a stop string, and a stop or end-of-sequence id, are counted and
    returned in `token_ids`; the text ends before the stop string, or before the stop id's own text.
    Before `min_tokens` tokens neither fires; a stop string that is complete by then is ordinary
    text.

    Args:
      params: the request's limits and stops.
      eos_token_ids: the model's end-of-sequence ids.
      detokenizer: this request's own; None when the model has no tokenizer (text is then empty).
    Raises:
      RequestError: stop strings without a detokenizer.
    """

    def __init__(
        self,
        params: SamplingParams,
        eos_token_ids: Iterable[int],
        detokenizer: Detokenizer | None,
    ):
        if params.stop and detokenizer is None:
            raise RequestError(f"stop={params.stop!r} needs a tokenizer; use stop_token_ids")
        self.token_count = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._max_tokens = params.max_tokens
        self._min_tokens = params.min_tokens
        eos = () if params.ignore_eos else eos_token_ids
        self._stop_ids = frozenset(params.stop_token_ids) | frozenset(eos)
        self._detokenizer = detokenizer
        self._matcher = _StopMatcher(params.stop)

    def push(self, token_ids: Sequence[int]) -> Step:
        """Take the next tokens; return how far they count. After the end all are dropped."""
        accepted: list[int] = []
        text: list[str] = []
        for token_id in token_ids:
            if self.finish_reason is not None:
                break
            accepted.append(token_id)
            text.append(self._take(token_id))
        return Step(tuple(accepted), "".join(text), self.finish_reason, self.stop_reason)

    def abort(self) -> Step:
        """End the request from outside and return the text still withheld. Does nothing twice."""
        text = ""
        if self.finish_reason is None:
            self.finish_reason = "abort"
            can_stop = self.token_count >= self._min_tokens
            text = self._matcher.feed(self._flush(), can_stop)[0] + self._matcher.held
        return Step((), text, self.finish_reason, self.stop_reason)

    def _take(self, token_id: int) -> str:
        """Walk one position: return the text it sets free, and set the finish reason if it ends."""
        self.token_count += 1
        can_stop = self.token_count >= self._min_tokens
        if can_stop and token_id in self._stop_ids:
            return self._take_stop_id(token_id)
        released, stop = self._matcher.feed(self._push(token_id), can_stop)
        if stop is None and self.token_count >= self._max_tokens:
            # The last position also owns the characters that never completed.
            tail, stop = self._matcher.feed(self._flush(), can_stop)
            released += tail
            if stop is None:
                self.finish_reason = "length"
                return released + self._matcher.held
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        return released

    def _take_stop_id(self, token_id: int) -> str:
        """End at a stop id. Its text is dropped, unless that text completes a stop string."""
        self.finish_reason = "stop"
        released, stop = self._matcher.feed(self._flush(), can_stop=True)
        if stop is None:
            tail = self._matcher.held
            if self._matcher.has_stops:
                own_text = self._push(token_id) + self._flush()
                before_stop, stop = self._matcher.feed(own_text, can_stop=True)
                tail = tail if stop is None else before_stop
            released += tail
        self.stop_reason = token_id if stop is None else stop
        return released

    def _push(self, token_id: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push([token_id])

    def _flush(self) -> str:
        return "" if self._detokenizer is None else self._detokenizer.flush()


class _StopMatcher:
    """Finds stop strings in text that comes in pieces, and withholds what may still become one.

    An Aho-Corasick automaton: after each character its state is the longest suffix of the text so
    far that is a prefix of some stop string. So a character costs the same however long the output
    is, and a match may begin anywhere.
    """

    def __init__(self, stops: Sequence[str]):
        self.has_stops = bool(stops)
        self.held = ""  # the end of the text, not yet released
        self._state = 0
        self._children: list[dict[str, int]] = [{}]
        self._fallback = [0]  # state of the longest proper suffix
        self._match: list[str | None] = [None]  # longest stop string that ends at this state
        self._num_held = [0]  # length of the longest suffix that can still grow into a stop string
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._children[state]:
                    self._children[state][char] = len(self._children)
                    self._children.append({})
                    self._fallback.append(0)
                    self._match.append(None)
                    self._num_held.append(0)
                state = self._children[state][char]
            self._match[state] = stop
        self._link()

    def _link(self) -> None:
        # Breadth first: a shorter state is complete before a longer one falls back to it.
        queue = deque((state, 1) for state in self._children[0].values())
        while queue:
            state, depth = queue.popleft()
            fallback = self._fallback[state]
            self._match[state] = self._match[state] or self._match[fallback]
            self._num_held[state] = depth if self._children[state] else self._num_held[fallback]
            for char, child in self._children[state].items():
                self._fallback[child] = self._advance(fallback, char)
                queue.append((child, depth + 1))

    def _advance(self, state: int, char: str) -> int:
        while state and char not in self._children[state]:
            state = self._fallback[state]
        return self._children[state].get(char, 0)

    def feed(self, text: str, can_stop: bool) -> tuple[str, str | None]:
        """Add text; return (text now safe, None) or (text before the stop string, stop string).

        The stop string that ends first wins; of several that end together, the longest. With
        `can_stop` false a stop string that becomes complete is ordinary text.
        """
        if not self.has_stops:
            return text, None
        pending = self.held + text
        for end, char in enumerate(text, start=len(self.held) + 1):
            self._state = self._advance(self._state, char)
            stop = self._match[self._state]
            if stop is not None and can_stop:
                self.held = ""
                return pending[: end - len(stop)], stop
        split = len(pending) - self._num_held[self._state]
        self.held = pending[split:]
        return pending[:split], None
