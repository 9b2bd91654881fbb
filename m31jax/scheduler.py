"""Who runs next, in which slot, on which pages. Plain host code: no threads, I/O or device arrays.

A request's way through it:

1. `add`: the request is QUEUED. One that could never fit is refused here, so nothing waits for
   ever.
2. `next_work` admits from the head of the queue: as soon as a slot is free and the pool has every
   page that the request can ever need, it gets both and is PREFILLING. Nothing is taken from a
   running request later, and nobody overtakes.
3. `next_work` hands out its prompt as `Prefill` chunks, oldest request first. While other slots
   decode, a decode step runs between two chunks, so a long prompt delays running requests by one
   chunk a step and no more.
4. `commit` of its last chunk brings its first token; it is DECODING, and each `Decode` step brings
   one token, or up to 1 + `reserve_tokens` of them.
5. Its `Finish` decides where it ends, inside `commit`. It is FINISHED: no step touches it again,
   and its slot and pages are still its own, so that the cache can be read. `release` takes them
   back.

`abort` ends a request in phases 1 to 4 and gives back at once whatever it held. The driver's loop:

    while work := scheduler.next_work():
        tokens = run(work, scheduler.page_row, scheduler.context_pages)  # {slot: new token ids}
        for progress in scheduler.commit(work, tokens):
            deliver(progress.request, progress.step)
            if progress.step.finish_reason is not None:
                reset_on_device(progress.slot)
                scheduler.release(progress.request.request_id)
"""

import dataclasses
import enum
import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from .errors import RequestError, TargetError
from .finish import Finish, Step
from .request import Request, check_length

GUARD_PAGE = 0
_NO_SLOT = -1


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Run prompt tokens [start, start + length) of one request.

    After the chunk with `is_last` the request's first token is sampled.
    """

    request: Request
    slot: int
    start: int
    length: int
    is_last: bool


@dataclasses.dataclass(frozen=True)
class Decode:
    """Run one decode step for these slots, ascending; `requests[i]` holds `slots[i]`."""

    slots: tuple[int, ...]
    requests: tuple[Request, ...]


Work = Prefill | Decode


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one `commit` or `abort` did to one request.

    Attributes:
      request: whose.
      slot: its slot; None if it was aborted before it had one.
      step: accepted tokens, text to send and, at the end, why it ended.
    """

    request: Request
    slot: int | None
    step: Step


class PagePool:
    """Free pages of the cache. Page 0 is a guard: in the pool's arrays, but never handed out.

    Whatever writes through an unset entry of a page table (those hold 0) hits the guard, which
    nobody reads, and not some request's keys. Taking and giving back cost O(pages moved), whatever
    the size of the pool.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, GUARD_PAGE, -1))
        self._is_free = bytearray(b"\1") * num_pages
        self._is_free[GUARD_PAGE] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages; the caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back; they are the next to be handed out, in the same order."""
        for page in reversed(pages):
            assert page != GUARD_PAGE, "the guard page belongs to nobody"
            assert not self._is_free[page], f"page {page} is free already"
            self._is_free[page] = 1
            self._free.append(page)


class _Phase(enum.Enum):
    QUEUED = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


@dataclasses.dataclass(eq=False)
class _Entry:
    """One request inside the scheduler.

    `num_rows` is how many of its tokens have their keys and values in the cache: the prompt tokens
    run so far, later every token but the newest, which the next step writes.
    """

    request: Request
    finish: Finish
    phase: _Phase = _Phase.QUEUED
    slot: int = _NO_SLOT
    pages: list[int] = dataclasses.field(default_factory=list)
    num_rows: int = 0


class Scheduler:
    """Slots, pages and turns for the requests of one engine.

    Args:
      num_slots: requests that can run at once.
      num_pages: pages of the pool, the guard included.
      page_size: tokens a page holds.
      max_seq_len: most tokens of a request, prompt and output together.
      prefill_chunk: most prompt tokens of one `Prefill`.
      reserve_tokens: rows that a decode step may write beyond the newest token's: 0, or the
        number of draft tokens.
    Raises:
      TargetError: a size is too small to serve anything.
    """

    def __init__(
        self,
        num_slots: int,
        num_pages: int,
        page_size: int,
        max_seq_len: int,
        prefill_chunk: int,
        reserve_tokens: int = 0,
    ):
        _at_least(1, num_slots=num_slots, page_size=page_size, prefill_chunk=prefill_chunk)
        _at_least(2, num_pages=num_pages, max_seq_len=max_seq_len)
        _at_least(0, reserve_tokens=reserve_tokens)
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.prefill_chunk = prefill_chunk
        self.reserve_tokens = reserve_tokens
        self.pages_per_slot = -(-max_seq_len // page_size)
        self._pool = PagePool(num_pages)
        self._entries: dict[str, _Entry] = {}
        self._queue: deque[_Entry] = deque()
        self._prefilling: deque[_Entry] = deque()
        self._slots: list[_Entry | None] = [None] * num_slots
        self._free_slots = list(range(num_slots))  # a heap: the lowest slot first
        self._issued: Work | None = None
        self._last_was_prefill = False

    @property
    def num_queued(self) -> int:
        """Requests that wait for a slot or for pages."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot, finished ones that are not released included."""
        return self.num_slots - len(self._free_slots)

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds; the guard is not one of them."""
        return self._pool.num_free

    def add(self, request: Request, finish: Finish) -> None:
        """Queue a request; `finish` is its own and decides where it ends.

        Raises:
          RequestError: its id is in use, or it can never fit.
        """
        name = f"request {request.request_id!r}"
        if request.request_id in self._entries:
            raise RequestError(f"{name} is already here; give each request an id of its own")
        prompt, max_tokens = len(request.prompt_ids), request.params.max_tokens
        check_length(prompt, max_tokens, self.max_seq_len)
        needed, available = self._pages_needed(request), self.num_pages - 1
        if needed > available:
            raise RequestError(
                f"{name}: a prompt of {prompt} tokens and max_tokens={max_tokens} need {needed} "
                f"pages of {self.page_size} tokens, and the pool has {available}; shorten the "
                f"prompt, lower max_tokens, or load the engine with num_pages={needed + 1} or more"
            )
        entry = _Entry(request, finish)
        self._entries[request.request_id] = entry
        self._queue.append(entry)

    def next_work(self) -> Work | None:
        """Admit what fits and say what to run next; None when every request is finished.

        Run it and `commit` it. Asked again before that, it plans afresh and the earlier answer is
        void.
        """
        self._admit()
        decoding = [e for e in self._slots if e is not None and e.phase is _Phase.DECODING]
        if self._prefilling and not (decoding and self._last_was_prefill):
            self._issued = self._next_chunk(self._prefilling[0])
        elif decoding:
            self._issued = Decode(
                tuple(e.slot for e in decoding),
                tuple(e.request for e in decoding),
            )
        else:
            self._issued = None
            if self._queue:
                held = [e.request.request_id for e in self._slots if e is not None]
                raise RuntimeError(f"{len(self._queue)} requests wait for release of {held}")
        return self._issued

    def commit(self, work: Work, tokens: Mapping[int, Sequence[int]]) -> list[Progress]:
        """Take the results of the work that `next_work` gave last.

        Args:
          work: that work.
          tokens: new token ids by slot, in order: one for a last chunk, none for another, 1 to
            1 + `reserve_tokens` for each slot of a decode step. Slots aborted meanwhile are passed
            over.
        Returns:
          One `Progress` for each request that got tokens, by ascending slot.
        Raises:
          ValueError: other work, or tokens that do not match it; nothing has changed then.
        """
        if work is not self._issued:
            raise ValueError(
                f"this {type(work).__name__} is not what next_work gave last; commit each work once"
            )
        if isinstance(work, Prefill):
            slots = (work.slot,)
            low = high = int(work.is_last)
        else:
            slots = work.slots
            low, high = 1, 1 + self.reserve_tokens
        if not tokens.keys() <= set(slots):
            raise ValueError(f"tokens for slots {sorted(tokens)}, but the work had {slots}")
        # An aborted slot is empty: only next_work fills slots, and it would have voided this work.
        live = [e for slot in slots if (e := self._slots[slot]) is not None]
        for entry in live:
            count = len(tokens.get(entry.slot, ()))
            if not low <= count <= high:
                raise ValueError(f"{count} tokens for slot {entry.slot}, not {low} to {high}")
        self._issued = None
        self._last_was_prefill = isinstance(work, Prefill)
        progress = []
        for entry in live:
            if isinstance(work, Prefill):
                entry.num_rows += work.length
                if not work.is_last:
                    continue
                self._prefilling.remove(entry)
                entry.phase = _Phase.DECODING
                step = entry.finish.push(tokens[entry.slot])
            else:
                step = entry.finish.push(tokens[entry.slot])
                entry.num_rows += len(step.token_ids)
            if step.finish_reason is not None:
                entry.phase = _Phase.FINISHED
            progress.append(Progress(entry.request, entry.slot, step))
        return progress

    def abort(self, request_id: str) -> Progress | None:
        """End a request in whatever phase it is, and give back its place, slot and pages at once.

        A step that is under way may still write to those pages. Whoever gets them next writes after
        it, as long as device programs run in the order they were started. Its slot must be reset on
        the device before the next work.

        Returns:
          Its last `Progress`; None if it is not here or has finished by itself (an abort then does
          nothing).
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.phase is _Phase.FINISHED:
            return None
        slot = None if entry.slot == _NO_SLOT else entry.slot
        progress = Progress(entry.request, slot, entry.finish.abort())
        if entry.phase is _Phase.QUEUED:
            self._queue.remove(entry)
        elif entry.phase is _Phase.PREFILLING:
            self._prefilling.remove(entry)
        self._drop(entry)
        return progress

    def release(self, request_id: str) -> None:
        """Take back the slot and pages of a finished request.

        Raises:
          ValueError: the request is not here, or not finished.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.phase is not _Phase.FINISHED:
            state = "not here" if entry is None else entry.phase.name
            raise ValueError(f"request {request_id!r} is {state}; release takes finished ones")
        self._drop(entry)

    def page_row(self, slot: int) -> np.ndarray:
        """The slot's row of the page table: int32 [pages_per_slot], its pages, then guards.

        It is fixed from the request's first `Prefill` to its end. An empty slot has guards only.
        """
        row = np.full(self.pages_per_slot, GUARD_PAGE, np.int32)
        entry = self._slots[slot]
        if entry is not None:
            row[: len(entry.pages)] = entry.pages
        return row

    def context_pages(self, slots: Iterable[int]) -> int:
        """Most pages that the next step of any of these slots reads or writes.

        The page-table width that the step is compiled for must be at least this.
        """
        entries = (self._slots[slot] for slot in slots)
        return max((self._live_pages(e) for e in entries if e is not None), default=0)

    def _live_pages(self, entry: _Entry) -> int:
        rows = entry.num_rows
        if entry.phase is _Phase.PREFILLING:
            rows += self._next_chunk(entry).length
        elif entry.phase is _Phase.DECODING:
            rows += 1 + self.reserve_tokens
        return min(-(-rows // self.page_size), len(entry.pages))

    def _pages_needed(self, request: Request) -> int:
        # The last token is never fed back, so it has no row; no row lies past max_seq_len.
        rows = len(request.prompt_ids) + request.params.max_tokens - 1 + self.reserve_tokens
        return -(-min(rows, self.max_seq_len) // self.page_size)

    def _admit(self) -> None:
        while self._queue and self._free_slots:
            entry = self._queue[0]
            needed = self._pages_needed(entry.request)
            if needed > self._pool.num_free:
                return  # smaller requests behind it wait too: overtaking could starve it
            self._queue.popleft()
            entry.pages = self._pool.allocate(needed)
            entry.slot = heapq.heappop(self._free_slots)
            entry.phase = _Phase.PREFILLING
            self._slots[entry.slot] = entry
            self._prefilling.append(entry)

    def _next_chunk(self, entry: _Entry) -> Prefill:
        left = len(entry.request.prompt_ids) - entry.num_rows
        length = min(left, self.prefill_chunk)
        return Prefill(entry.request, entry.slot, entry.num_rows, length, is_last=length == left)

    def _drop(self, entry: _Entry) -> None:
        del self._entries[entry.request.request_id]
        if entry.slot != _NO_SLOT:
            self._slots[entry.slot] = None
            heapq.heappush(self._free_slots, entry.slot)
            self._pool.free(entry.pages)


def _at_least(low: int, **sizes: int) -> None:
    for name, value in sizes.items():
        if value < low:
            raise TargetError(f"{name}={value} is below {low}; use {low} or more")
