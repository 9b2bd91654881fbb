"""The scheduler, case by case; `test_scheduler_traffic.py` plays random traffic on it."""

import time

import numpy as np
import pytest

from m31jax.errors import RequestError, TargetError
from m31jax.finish import Finish
from m31jax.request import Request, SamplingParams
from m31jax.scheduler import GUARD_PAGE, Decode, PagePool, Prefill, Scheduler

EOS = 99
PAGE = 4


def make_scheduler(**changed):
    sizes = {"num_slots": 2, "num_pages": 9, "page_size": PAGE, "max_seq_len": 32}
    return Scheduler(**(sizes | {"prefill_chunk": 8} | changed))


def add(scheduler, request_id, prompt=3, max_tokens=4, **params):
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    request = Request(request_id, tuple(range(prompt)), sampling)
    scheduler.add(request, Finish(sampling, (EOS,), None))
    return request


def step(scheduler, token=1, count=1):
    """Run one piece of work; every slot gets `count` tokens. Release what finishes."""
    work = scheduler.next_work()
    if isinstance(work, Prefill):
        tokens = {work.slot: [token]} if work.is_last else {}
    else:
        tokens = {slot: [token] * count for slot in work.slots}
    progress = scheduler.commit(work, tokens)
    for one in progress:
        if one.step.finish_reason is not None:
            scheduler.release(one.request.request_id)
    return work, progress


def assert_baseline(scheduler):
    assert scheduler.num_queued == 0
    assert scheduler.num_running == 0
    assert scheduler.num_free_pages == scheduler.num_pages - 1
    assert scheduler.next_work() is None
    for slot in range(scheduler.num_slots):
        assert not scheduler.page_row(slot).any()


def test_a_request_from_queue_to_release():
    scheduler = make_scheduler()
    request = add(scheduler, "a", prompt=10, max_tokens=3)
    assert (scheduler.num_queued, scheduler.num_running) == (1, 0)

    work = scheduler.next_work()
    assert work == Prefill(request, slot=0, start=0, length=8, is_last=False)
    assert (scheduler.num_queued, scheduler.num_running) == (0, 1)
    assert scheduler.commit(work, {}) == []
    work = scheduler.next_work()
    assert work == Prefill(request, slot=0, start=8, length=2, is_last=True)
    (progress,) = scheduler.commit(work, {0: [5]})
    assert progress.step.token_ids == (5,)

    work = scheduler.next_work()
    assert work == Decode((0,), (request,))
    scheduler.commit(work, {0: [6]})
    work = scheduler.next_work()
    (progress,) = scheduler.commit(work, {0: [7]})
    assert (progress.request, progress.slot) == (request, 0)
    assert progress.step.finish_reason == "length"

    assert scheduler.next_work() is None
    assert scheduler.num_running == 1, "a finished request keeps its slot until it is released"
    assert scheduler.page_row(0).any()
    scheduler.release("a")
    assert_baseline(scheduler)


def test_page_row_is_the_request_s_pages_then_guards():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=6, max_tokens=4)  # rows 0 to 8
    add(scheduler, "b", prompt=3, max_tokens=2)
    assert not scheduler.page_row(0).any()
    scheduler.next_work()
    row = scheduler.page_row(0)
    assert row.dtype == np.int32
    assert row.shape == (scheduler.pages_per_slot,) == (8,)
    assert row.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert scheduler.page_row(1).tolist() == [4, 0, 0, 0, 0, 0, 0, 0]


def test_pages_cover_exactly_what_can_be_written():
    # Rows: the prompt, every token but the last, and what a step may write beyond.
    for prompt, max_tokens, reserve, pages in [
        (4, 1, 0, 1),
        (4, 2, 0, 2),
        (1, 4, 0, 1),
        (1, 4, 1, 2),
        (28, 4, 7, 8),  # never a row past max_seq_len
    ]:
        scheduler = make_scheduler(reserve_tokens=reserve)
        add(scheduler, "a", prompt=prompt, max_tokens=max_tokens)
        scheduler.next_work()
        assert np.count_nonzero(scheduler.page_row(0)) == pages, (prompt, max_tokens, reserve)


def test_context_pages_follow_the_live_length():
    scheduler = make_scheduler(prefill_chunk=4, num_pages=20, reserve_tokens=1)
    add(scheduler, "a", prompt=6, max_tokens=6)
    add(scheduler, "b", prompt=1, max_tokens=20)
    assert scheduler.context_pages((0, 1)) == 0
    seen = []
    while (work := scheduler.next_work()) is not None:
        slots = (work.slot,) if isinstance(work, Prefill) else work.slots
        seen.append((type(work).__name__[0], slots, scheduler.context_pages(slots)))
        tokens = {} if isinstance(work, Prefill) and not work.is_last else {s: [1] for s in slots}
        scheduler.commit(work, tokens)
    # Slot 0 writes rows 0-3, 4-5; then one row and one in reserve from row 6 on.
    assert seen[:5] == [
        ("P", (0,), 1),
        ("P", (0,), 2),
        ("D", (0,), 2),
        ("P", (1,), 1),
        ("D", (0, 1), 3),
    ]
    assert seen[-1] == ("D", (1,), 6), "row 19 and the one after it"


def test_a_decode_step_runs_between_chunks():
    scheduler = make_scheduler(num_pages=40)
    add(scheduler, "a", prompt=2, max_tokens=8)
    step(scheduler)
    add(scheduler, "b", prompt=24, max_tokens=2)
    kinds = [type(step(scheduler)[0]).__name__ for _ in range(7)]
    assert kinds == ["Decode", "Prefill", "Decode", "Prefill", "Decode", "Prefill", "Decode"]


def test_chunks_run_back_to_back_when_nothing_decodes():
    scheduler = make_scheduler(num_pages=40)
    add(scheduler, "a", prompt=24)
    assert [step(scheduler)[0].start for _ in range(3)] == [0, 8, 16]


def test_new_requests_do_not_wait_for_running_ones():
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=20)
    for _ in range(3):
        step(scheduler)
    add(scheduler, "b")
    assert isinstance(step(scheduler)[0], Prefill)
    assert step(scheduler)[0].slots == (0, 1)


def test_nobody_overtakes_a_request_that_waits_for_pages():
    scheduler = make_scheduler(num_slots=3, num_pages=9)
    add(scheduler, "big", prompt=8, max_tokens=13)  # 5 of 8 pages
    add(scheduler, "bigger", prompt=8, max_tokens=17)  # 6 pages: must wait
    add(scheduler, "small", prompt=1, max_tokens=1)
    first_tokens = []
    while scheduler.num_queued or scheduler.num_running:
        _, progress = step(scheduler)
        first_tokens += [p.request.request_id for p in progress]
    assert list(dict.fromkeys(first_tokens)) == ["big", "bigger", "small"]
    assert_baseline(scheduler)


def test_a_request_that_can_never_fit_is_refused():
    scheduler = make_scheduler(num_pages=4)
    with pytest.raises(
        RequestError,
        match=r"request 'a': a prompt of 8 tokens and max_tokens=6 need 4 pages of 4 tokens, "
        r"and the pool has 3; .*num_pages=5 or more",
    ):
        add(scheduler, "a", prompt=8, max_tokens=6)
    add(scheduler, "a", prompt=8, max_tokens=5)
    step(scheduler)
    assert scheduler.num_free_pages == 0


def test_a_request_over_max_seq_len_is_refused():
    with pytest.raises(RequestError, match=r"30 tokens and max_tokens=3.*max_seq_len=32"):
        add(make_scheduler(num_pages=100), "a", prompt=30, max_tokens=3)


def test_reserve_counts_against_the_pool():
    add(make_scheduler(num_pages=3), "a", prompt=4, max_tokens=5)
    with pytest.raises(RequestError, match="need 3 pages"):
        add(make_scheduler(num_pages=3, reserve_tokens=1), "a", prompt=4, max_tokens=5)


def test_ids_are_unique_while_in_use():
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=1)
    with pytest.raises(RequestError, match="request 'a' is already here"):
        add(scheduler, "a")
    step(scheduler)
    add(scheduler, "a")


def test_first_token_may_finish_a_request():
    scheduler = make_scheduler()
    add(scheduler, "a")
    _, (progress,) = step(scheduler, token=EOS)
    assert (progress.step.finish_reason, progress.step.stop_reason) == ("stop", EOS)
    assert_baseline(scheduler)


def test_tokens_after_the_end_of_a_block_are_dropped():
    scheduler = make_scheduler(reserve_tokens=7)
    add(scheduler, "a", max_tokens=20, stop_token_ids=[7])
    step(scheduler)
    (progress,) = scheduler.commit(scheduler.next_work(), {0: [1, 2, 7, 4, 5, 6, 8, 9]})
    assert progress.step.token_ids == (1, 2, 7)
    scheduler.release("a")
    assert_baseline(scheduler)


@pytest.mark.parametrize("phase", ["queued", "chunk 2 of 5", "decoding"])
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_abort_in_each_phase_returns_to_baseline(phase, is_in_flight):
    scheduler = make_scheduler(num_slots=1, num_pages=40, max_seq_len=64)
    for round_number in range(50):
        if phase == "queued":
            other = add(scheduler, "other")
            step(scheduler)
        request = add(scheduler, "cut", prompt=40)
        steps = {"queued": 0, "chunk 2 of 5": 1, "decoding": 6}[phase]
        for _ in range(steps):
            step(scheduler)
        work = scheduler.next_work() if is_in_flight else None
        progress = scheduler.abort("cut")
        assert progress is not None
        assert progress.request is request
        assert progress.slot == (None if phase == "queued" else 0)
        assert progress.step.finish_reason == "abort"
        if phase == "queued":
            assert scheduler.abort("other").request is other
        if work is not None:
            assert scheduler.commit(work, {}) == [], round_number
        assert_baseline(scheduler)
    add(scheduler, "cut", max_tokens=2)
    step(scheduler)
    assert step(scheduler)[1][0].step.finish_reason == "length"
    assert_baseline(scheduler)


def test_abort_of_one_slot_in_flight_leaves_the_others():
    scheduler = make_scheduler()
    kept, _ = add(scheduler, "kept"), add(scheduler, "cut")
    step(scheduler)
    step(scheduler)
    step(scheduler)
    work = scheduler.next_work()
    assert work.slots == (0, 1)
    scheduler.abort("cut")
    (progress,) = scheduler.commit(work, {0: [1], 1: [1]})
    assert progress.request is kept


def test_a_new_request_with_an_aborted_one_s_id_is_another_request():
    scheduler = make_scheduler(num_slots=1)
    add(scheduler, "a")
    step(scheduler)
    work = scheduler.next_work()
    scheduler.abort("a")
    again = add(scheduler, "a")
    assert scheduler.commit(work, {0: [1]}) == []
    assert scheduler.next_work() == Prefill(again, slot=0, start=0, length=3, is_last=True)


def test_abort_of_a_finished_or_unknown_request_does_nothing():
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=1)
    scheduler.commit(scheduler.next_work(), {0: [1]})
    assert scheduler.abort("a") is None
    assert scheduler.num_running == 1
    scheduler.release("a")
    assert scheduler.abort("a") is None
    assert scheduler.abort("never seen") is None
    assert_baseline(scheduler)


def test_release_takes_finished_requests_only():
    scheduler = make_scheduler()
    add(scheduler, "a", max_tokens=2)
    for state in ("QUEUED", "PREFILLING", "DECODING"):
        with pytest.raises(ValueError, match=f"request 'a' is {state}"):
            scheduler.release("a")
        work = scheduler.next_work()
        if state != "QUEUED":
            scheduler.commit(work, {0: [1]})
    scheduler.release("a")
    with pytest.raises(ValueError, match="not here"):
        scheduler.release("a")


def test_a_forgotten_release_is_noticed():
    scheduler = make_scheduler(num_slots=1)
    add(scheduler, "a", max_tokens=1)
    add(scheduler, "b")
    scheduler.commit(scheduler.next_work(), {0: [1]})
    with pytest.raises(RuntimeError, match=r"1 requests wait for release of \['a'\]"):
        scheduler.next_work()


def test_commit_refuses_what_was_not_asked():
    scheduler = make_scheduler(reserve_tokens=1, prefill_chunk=2)
    add(scheduler, "a")
    stale = scheduler.next_work()
    chunk = scheduler.next_work()
    for work, tokens, message in [
        (stale, {}, "not what next_work gave last"),
        (chunk, {0: [1]}, "1 tokens for slot 0, not 0 to 0"),
        (chunk, {1: [1]}, "tokens for slots"),
    ]:
        with pytest.raises(ValueError, match=message):
            scheduler.commit(work, tokens)
    scheduler.commit(chunk, {})
    with pytest.raises(ValueError, match="not what next_work gave last"):
        scheduler.commit(chunk, {})
    last = scheduler.next_work()
    for tokens in ({}, {0: []}, {0: [1, 2]}):
        with pytest.raises(ValueError, match="not 1 to 1"):
            scheduler.commit(last, tokens)
    scheduler.commit(last, {0: [1]})
    decode = scheduler.next_work()
    for tokens in ({}, {0: []}, {0: [1, 2, 3]}):
        with pytest.raises(ValueError, match="not 1 to 2"):
            scheduler.commit(decode, tokens)
    (progress,) = scheduler.commit(decode, {0: [1, 2]})
    assert progress.step.token_ids == (1, 2)


def test_work_that_failed_can_be_asked_for_again():
    scheduler = make_scheduler(prefill_chunk=2)
    add(scheduler, "a")
    step(scheduler)
    assert scheduler.next_work() == scheduler.next_work()
    assert step(scheduler)[0].start == 2


def test_messages_do_not_show_the_prompt():
    scheduler = make_scheduler()
    add(scheduler, "a", prompt=20)
    work = scheduler.next_work()
    assert "10, 11, 12" not in repr(work)


@pytest.mark.parametrize(
    ("name", "low"),
    [
        ("num_slots", 1),
        ("num_pages", 2),
        ("page_size", 1),
        ("max_seq_len", 2),
        ("prefill_chunk", 1),
        ("reserve_tokens", 0),
    ],
)
def test_sizes_too_small_to_serve(name, low):
    make_scheduler(**{name: low})
    with pytest.raises(TargetError, match=f"{name}={low - 1} is below {low}; use {low} or more"):
        make_scheduler(**{name: low - 1})


def test_pool_never_hands_out_the_guard_nor_a_page_twice():
    pool = PagePool(6)
    pages = pool.allocate(5)
    assert sorted(pages) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    pool.free(pages[1:3])
    with pytest.raises(AssertionError, match="is free already"):
        pool.free([pages[1]])
    with pytest.raises(AssertionError, match="guard"):
        pool.free([GUARD_PAGE])
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        pool.allocate(3)
    assert sorted(pool.allocate(2)) == sorted(pages[1:3])


def test_cost_of_admission_does_not_grow_with_the_pool():
    def seconds(num_pages):
        scheduler = make_scheduler(num_pages=num_pages)
        start = time.process_time()
        for _ in range(300):
            add(scheduler, "a", max_tokens=1)
            step(scheduler)
        return time.process_time() - start

    small = min(seconds(9) for _ in range(3))
    large = min(seconds(2_000_000) for _ in range(3))
    assert large < 5 * small + 0.2  # rebuilding such a list once takes 0.01 s
