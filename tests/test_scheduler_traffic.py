"""The scheduler under random traffic, on a simulated cache."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from m31jax.errors import RequestError
from m31jax.finish import Finish
from m31jax.request import Request, SamplingParams
from m31jax.scheduler import GUARD_PAGE, Decode, Prefill, Progress, Scheduler

EOS = 99
PAGE = 4
MAX_SEQ_LEN = 32


class Traffic(RuleBasedStateMachine):
    """Random requests, aborts, block lengths and late releases, on a cache that knows its writers.

    Each request has a token stream fixed by its number, as a seeded model would give. The simulated
    cache holds, for every page and offset, which (request, position) was written there last; before
    a step uses a context, all of it must still be its own.
    """

    ids = Bundle("ids")

    @initialize(
        num_slots=st.integers(1, 4),
        num_pages=st.integers(2, 24),
        prefill_chunk=st.integers(1, 12),
        reserve=st.integers(0, 3),
    )
    def start(self, num_slots, num_pages, prefill_chunk, reserve):
        self.scheduler = Scheduler(num_slots, num_pages, PAGE, MAX_SEQ_LEN, prefill_chunk, reserve)
        self.cache = {}
        self.requests = {}  # id -> request, while it is here
        self.streams = {}  # id -> tokens the model would give it
        self.received = {}  # id -> tokens it got
        self.unreleased = []
        self.in_flight = None
        self.added = 0
        self.first_tokens = []  # ids in the order of their first token
        self.previous = None  # kind of the work committed last

    def expected(self, request_id):
        """The tokens this request must end with."""
        params = self.requests[request_id].params
        stream = self.streams[request_id][: params.max_tokens]
        return stream[: stream.index(EOS) + 1] if EOS in stream else stream

    @rule(
        target=ids,
        prompt=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        eos_at=st.one_of(st.none(), st.integers(0, 11)),
    )
    def add(self, prompt, max_tokens, eos_at):
        self.added += 1
        request_id = f"{self.added:04}"
        params = SamplingParams(max_tokens=max_tokens)
        request = Request(request_id, (1,) * prompt, params)
        rows = min(prompt + max_tokens - 1 + self.scheduler.reserve_tokens, MAX_SEQ_LEN)
        if -(-rows // PAGE) > self.scheduler.num_pages - 1:
            with pytest.raises(RequestError, match="pages"):
                self.scheduler.add(request, Finish(params, (EOS,), None))
            return request_id
        self.scheduler.add(request, Finish(params, (EOS,), None))
        stream = [self.added * 100 + i for i in range(max_tokens + 8)]
        if eos_at is not None:
            stream[min(eos_at, max_tokens)] = EOS
        self.requests[request_id] = request
        self.streams[request_id] = stream
        self.received[request_id] = []
        return request_id

    def write(self, slot, request, position):
        """One row as a step writes it: through the page table. False: it would hit the guard."""
        row = self.scheduler.page_row(slot)
        if position < MAX_SEQ_LEN and (page := row[position // PAGE]) != GUARD_PAGE:
            self.cache[page, position % PAGE] = (request.request_id, position)
            return True
        return False

    def check_context(self, slot, request, length):
        row = self.scheduler.page_row(slot)
        for position in range(length):
            key = (row[position // PAGE], position % PAGE)
            assert self.cache[key] == (request.request_id, position), "context overwritten"

    def run_on_device(self, work):
        """The tokens that this work gives, and its writes."""
        if isinstance(work, Prefill):
            width = self.scheduler.context_pages([work.slot])
            assert work.start + work.length <= width * PAGE
            self.check_context(work.slot, work.request, work.start)
            for position in range(work.start, work.start + work.length):
                assert self.write(work.slot, work.request, position)
            first = self.streams[work.request.request_id][:1]
            return {work.slot: first} if work.is_last else {}
        tokens = {}
        width = self.scheduler.context_pages(work.slots)
        for slot, request in zip(work.slots, work.requests, strict=True):
            done = len(self.received[request.request_id])
            length = len(request.prompt_ids) + done - 1
            self.check_context(slot, request, length)
            assert length + 1 <= width * PAGE
            for position in range(length, length + 1 + self.scheduler.reserve_tokens):
                assert self.write(slot, request, position) or position >= MAX_SEQ_LEN
            stream = self.streams[request.request_id]
            tokens[slot] = stream[done : done + self.block_length(request)]
        return tokens

    def block_length(self, request):
        """1 to 1 + reserve, different for each request and time."""
        seed = int(request.request_id) * 7 + len(self.received[request.request_id]) * 3
        return 1 + seed % (1 + self.scheduler.reserve_tokens)

    @rule()
    def plan(self):
        if self.unreleased and not any(self.has_slot(i) for i in self.requests):
            self.release()  # a driver that waits for release first would see an error
        decoding = {i for i, tokens in self.received.items() if tokens and self.is_running(i)}
        work = self.scheduler.next_work()
        has_prompts = any(not tokens for i, tokens in self.received.items() if self.has_slot(i))
        if work is None:
            assert all(i in self.unreleased for i in self.requests)
            assert self.scheduler.num_queued == 0
        elif isinstance(work, Prefill):
            assert not (decoding and self.previous is Prefill), "two chunks while others decode"
        else:
            assert {r.request_id for r in work.requests} == decoding, "a decoding slot was left out"
            assert not (has_prompts and self.previous is Decode), "a prompt waits for two steps"
        self.in_flight = work
        self.tokens = {} if work is None else self.run_on_device(work)

    @rule()
    def commit(self):
        if self.in_flight is None:
            return
        work, self.in_flight = self.in_flight, None
        self.previous = type(work)
        for progress in self.scheduler.commit(work, self.tokens):
            request_id = progress.request.request_id
            if not self.received[request_id]:
                self.first_tokens.append(request_id)
            self.received[request_id] += progress.step.token_ids
            if progress.step.finish_reason is not None:
                assert self.received[request_id] == self.expected(request_id)
                self.unreleased.append(request_id)

    @rule()
    def release(self):
        for request_id in self.unreleased:
            self.scheduler.release(request_id)
            self.forget(request_id)
        self.unreleased = []

    @rule(request_id=ids)
    def abort(self, request_id):
        is_here = request_id in self.requests and request_id not in self.unreleased
        progress = self.scheduler.abort(request_id)
        assert (progress is not None) == is_here
        if isinstance(progress, Progress):
            assert progress.step.finish_reason == "abort"
            tokens = self.received[request_id]
            assert tokens == self.streams[request_id][: len(tokens)]
            self.forget(request_id)

    def forget(self, request_id):
        for table in (self.requests, self.received, self.streams):
            del table[request_id]

    def is_running(self, request_id):
        return request_id in self.requests and request_id not in self.unreleased

    def has_slot(self, request_id):
        held = (e.request.request_id for e in self.scheduler._slots if e is not None)
        return self.is_running(request_id) and request_id in held

    @invariant()
    def pages_and_slots_add_up(self):
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        owned = [p for slot in range(scheduler.num_slots) for p in scheduler.page_row(slot) if p]
        assert len(owned) == len(set(owned)), "a page has two owners"
        assert len(owned) + scheduler.num_free_pages == scheduler.num_pages - 1
        assert scheduler.num_running + scheduler.num_queued == len(self.requests)
        assert self.first_tokens == sorted(self.first_tokens), "somebody overtook"

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            self.commit()
            self.release()
            self.plan()
            if self.in_flight is None:
                break
        assert not self.requests, "a request never finished"
        assert self.scheduler.num_running == 0
        assert self.scheduler.num_free_pages == self.scheduler.num_pages - 1


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
