"""Drives the scheduler's work through the compiled steps: one call of `step`, one piece of work.

It owns the device state. No threads and no I/O: `Engine.generate` calls it in place, and a server
from its loop.
"""

import hashlib
import secrets
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .finish import Finish
from .model.state import DecodeState, SlotSampling
from .request import Request, SamplingParams, TokenLogprob
from .sampling import Drawn
from .scheduler import Decode, Prefill, Progress, Scheduler, Work
from .steps import Steps, page_buckets

DRAWING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""Sampling fields that choose a token."""

SUPPORTED = DRAWING | {"logprobs", "n"}
"""Sampling fields that the steps honour, beside those of the finish rule."""


@dataclass(frozen=True)
class Delivery:
    """What one step brought one request; `logprobs` has an entry per accepted token, or is None."""

    progress: Progress
    logprobs: list[TokenLogprob] | None


@dataclass
class Timing:
    """Where the time of the steps went, in seconds; `host_s` is scheduling and copying."""

    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    host_s: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


def stream_seed(params: SamplingParams, sample_index: int) -> np.ndarray:
    """uint32 [2] that starts one sample's random stream; without a seed the machine draws it."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    mixed = hashlib.blake2b(struct.pack("<qI", seed, sample_index), digest_size=8).digest()
    return np.frombuffer(mixed, np.uint32)


def slot_sampling(params: SamplingParams, sample_index: int = 0) -> SlotSampling:
    """The device's view of one request's sampling fields, as host values."""
    return SlotSampling(
        temperature=np.float32(params.temperature),  # pyright: ignore[reportArgumentType]
        top_p=np.float32(params.top_p),  # pyright: ignore[reportArgumentType]
        top_k=np.int32(min(params.top_k, 2**31 - 1)),  # pyright: ignore[reportArgumentType]
        min_p=np.float32(params.min_p),  # pyright: ignore[reportArgumentType]
        seed=stream_seed(params, sample_index),  # pyright: ignore[reportArgumentType]
        count=np.int32(0),  # pyright: ignore[reportArgumentType]
    )


def prefill_buckets(chunk: int, row_tile: int) -> tuple[int, ...]:
    """Row counts of a prefill step: the whole chunk, and a quarter of it for short ends."""
    whole = -(-chunk // row_tile) * row_tile
    quarter = -(-whole // 4 // row_tile) * row_tile
    return tuple(sorted({quarter, whole}))


class Runner:
    """Slots of one engine at work.

    Args:
      steps, params: the compiled functions and their parameters.
      scheduler: decides what runs. prefill_rows, decode_rows: row buckets, ascending.
    """

    def __init__(
        self,
        steps: Steps,
        params: Any,
        scheduler: Scheduler,
        prefill_rows: Sequence[int],
        decode_rows: Sequence[int],
    ) -> None:
        self.steps, self.params, self.scheduler = steps, params, scheduler
        self.timing = Timing()
        self._prefill_rows, self._decode_rows = tuple(prefill_rows), tuple(decode_rows)
        self._pages = page_buckets(steps.spec.pages_per_slot)
        self._state: DecodeState | None = None

    @property
    def state(self) -> DecodeState:
        """The live device state, made at first use."""
        if self._state is None:
            self._state = self.steps.init_state()
        return self._state

    def add(self, request: Request, finish: Finish) -> None:
        """Queue a request; RequestError if it can never fit."""
        self.scheduler.add(request, finish)

    def abort(self, request_id: str) -> Progress | None:
        """End a request in any phase; its slot and pages are free at once."""
        progress = self.scheduler.abort(request_id)
        if progress is not None and progress.slot is not None:
            self._state = self.steps.free(self.state, np.int32(progress.slot))
        return progress

    def step(self) -> list[Delivery] | None:
        """Run the scheduler's next piece of work; None when nothing is left to run."""
        start = time.perf_counter()
        work = self.scheduler.next_work()
        if work is None:
            return None
        drawn, rows = self._run(work)
        dispatched = time.perf_counter()
        host = {
            name: np.asarray(part) for name, part in drawn._asdict().items() if part is not None
        }
        copied = time.perf_counter()
        tokens = {slot: (int(host["token"][row]),) for slot, row in rows.items()}
        deliveries = []
        for progress in self.scheduler.commit(work, tokens):
            deliveries.append(Delivery(progress, _logprobs(progress, host, rows)))
            if progress.step.finish_reason is not None and progress.slot is not None:
                self._state = self.steps.free(self.state, np.int32(progress.slot))
                self.scheduler.release(progress.request.request_id)
        self._count(work, len(tokens), start, dispatched, copied)
        return deliveries

    def _run(self, work: Work) -> tuple[Drawn, dict[int, int]]:
        """Start the device work; (its result, row of each slot that got a token)."""
        if isinstance(work, Prefill):
            slots = (work.slot,)
            drawn = self._prefill(work)
            return drawn, {work.slot: 0} if work.is_last else {}
        slots = work.slots
        width = next(r for r in self._decode_rows if r >= len(slots))
        padded = np.full(width, -1, np.int32)
        padded[: len(slots)] = slots
        self._state, drawn = self.steps.decode(
            self.params,
            self.state,
            padded,
            pages=self._page_bucket(slots),
            is_greedy=all(r.params.is_greedy and r.params.logprobs is None for r in work.requests),
        )
        return drawn, {slot: row for row, slot in enumerate(slots)}

    def _prefill(self, work: Prefill) -> Drawn:
        slot = np.int32(work.slot)
        if work.start == 0:
            row = self.scheduler.page_row(work.slot)
            one = slot_sampling(work.request.params, work.request.sample_index)
            self._state = self.steps.admit(self.state, slot, row, one)
        ids = np.zeros(next(r for r in self._prefill_rows if r >= work.length), np.int32)
        ids[: work.length] = work.request.prompt_ids[work.start : work.start + work.length]
        self._state, drawn = self.steps.prefill(
            self.params,
            self.state,
            slot,
            ids,
            np.int32(work.start),
            np.int32(work.length),
            np.bool_(work.is_last),
            pages=self._page_bucket((work.slot,)),
        )
        return drawn

    def _page_bucket(self, slots: Iterable[int]) -> int:
        needed = self.scheduler.context_pages(slots)
        return next(width for width in self._pages if width >= needed)

    def warm_up(self) -> int:
        """Compile every variant by running it on no live row; returns how many ran.

        Changes no slot.

        Raises:
          RuntimeError: a request runs; slot 0 may be its own.
        """
        if self.scheduler.num_running:
            raise RuntimeError(f"{self.scheduler.num_running} requests run; warm up before them")
        ran = 0
        scalar = np.int32(0)
        one = slot_sampling(SamplingParams(seed=0))
        row = np.zeros(self.steps.spec.pages_per_slot, np.int32)
        self._state = self.steps.free(self.steps.admit(self.state, scalar, row, one), scalar)
        for pages in self._pages:
            for rows in self._decode_rows:
                for greedy in (True, False):
                    slots = np.full(rows, -1, np.int32)
                    self._state, _ = self.steps.decode(
                        self.params, self.state, slots, pages=pages, is_greedy=greedy
                    )
                    ran += 1
            for rows in self._prefill_rows:
                self._state, drawn = self.steps.prefill(
                    self.params,
                    self.state,
                    scalar,
                    np.zeros(rows, np.int32),
                    scalar,
                    scalar,
                    np.bool_(False),
                    pages=pages,
                )
                drawn.token.block_until_ready()
                ran += 1
        return ran

    def _count(
        self, work: Work, tokens: int, start: float, dispatched: float, copied: float
    ) -> None:
        timing, device = self.timing, copied - start
        timing.host_s += time.perf_counter() - copied
        if isinstance(work, Decode):
            timing.decode_steps += 1
            timing.decode_s += device
            timing.decode_tokens += tokens
        else:
            timing.prefill_steps += 1
            timing.prefill_s += device
            timing.prefill_tokens += work.length


def _logprobs(
    progress: Progress, host: dict[str, np.ndarray], rows: dict[int, int]
) -> list[TokenLogprob] | None:
    """Entries for the accepted tokens of one request, the chosen token always listed."""
    wanted = progress.request.params.logprobs
    if wanted is None or progress.slot is None:
        return None
    row = rows[progress.slot]
    out = []
    for token in progress.step.token_ids:
        chosen = float(host["logprob"][row])
        listed = zip(
            host["top_ids"][row, :wanted].tolist(),
            host["top_logprobs"][row, :wanted].tolist(),
            strict=True,
        )
        top = tuple(listed)
        if token not in {entry for entry, _ in top}:
            top = (*top, (token, chosen))
        out.append(TokenLogprob(token, chosen, top))
    return out
