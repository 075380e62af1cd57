"""Each promise of schedule, commit and abort by itself."""

import pytest

from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.scheduler import IN_FLIGHT_TOKEN, Scheduler, Status, StepPlan


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def test_prompt_then_decodes_until_max_tokens(fake):
    scheduler = fake.scheduler()
    request = fake.request("a", 6, max_tokens=2)
    scheduler.add(request)
    plan = planned(scheduler)
    assert (plan.starts, plan.lengths, plan.samples, plan.num_single_rows) == ([0], [6], [True], 0)
    assert plan.placed == [request]
    assert plan.page_updates == [(0, request.slot, 0, request.tables[0])]
    (event,) = scheduler.commit(plan, [50])
    assert (event.request, event.row, event.token_ids, event.finish_reason) == (request, 0, (50,), None)
    plan = planned(scheduler)
    assert (plan.starts, plan.token_ids, plan.num_single_rows, plan.placed) == ([6], [50], 1, [])
    (event,) = scheduler.commit(plan, [51])
    assert (event.finish_reason, request.token_ids[6:], request.status) == ("length", [50, 51], Status.FINISHED)
    assert not scheduler.has_work
    assert scheduler.schedule() is None


def test_overlap_feeds_the_token_in_flight_and_stops_at_the_predictable_end(fake):
    scheduler = fake.scheduler()
    scheduler.add(fake.request("a", 3, max_tokens=3))
    plans = [planned(scheduler) for _ in range(3)]
    assert [plan.token_ids for plan in plans] == [[0, 1, 2], [IN_FLIGHT_TOKEN], [IN_FLIGHT_TOKEN]]
    assert [plan.starts for plan in plans] == [[0], [3], [4]]
    assert scheduler.schedule() is None
    reasons = [scheduler.commit(plan, [9])[0].finish_reason for plan in plans]
    assert reasons == [None, None, "length"]


def test_a_row_scheduled_before_the_stop_was_known_is_ignored(fake):
    scheduler = fake.scheduler()
    request = fake.request("a", 3, max_tokens=9, eos_token_ids=frozenset({7}))
    scheduler.add(request)
    first, second = planned(scheduler), planned(scheduler)
    (event,) = scheduler.commit(first, [7])
    assert (event.finish_reason, event.stop_reason) == ("stop", None)
    assert scheduler.stats().num_running_pages == 1  # the second step may still write it
    assert scheduler.has_work
    scheduler.check_invariants()
    assert scheduler.commit(second, [8]) == []
    assert request.token_ids[3:] == [7]
    assert scheduler.stats().num_running_pages == 0
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("options", "reason", "stop_reason"),
    [
        ({"stop_token_ids": frozenset({7})}, "stop", 7),
        ({"eos_token_ids": frozenset({7}), "stop_token_ids": frozenset({7})}, "stop", None),
        ({"eos_token_ids": frozenset({7}), "min_tokens": 2}, None, None),
        ({"eos_token_ids": frozenset({7}), "min_tokens": 1}, "stop", None),
        ({"max_tokens": 1}, "length", None),
        ({}, None, None),
    ],
)
def test_finish_reasons(fake, options, reason, stop_reason):
    scheduler = fake.scheduler()
    scheduler.add(fake.request("a", 3, **options))
    (event,) = scheduler.commit(planned(scheduler), [7])
    assert (event.finish_reason, event.stop_reason) == (reason, stop_reason)


def test_length_when_the_model_is_full(fake):
    scheduler = fake.scheduler(max_model_len=8)
    request = fake.request("a", 6, max_tokens=50)
    scheduler.add(request)
    fake_loop = fake.Loop(scheduler, 4, 1)
    fake_loop.drain()
    assert (len(request.token_ids), request.finish_reason) == (8, "length")


def test_decodes_come_first_and_chunks_fill_the_budget(fake):
    scheduler = fake.scheduler(max_num_batched_tokens=8)
    decoding, long, late = fake.request("a", 3), fake.request("b", 12), fake.request("c", [90, 91])
    scheduler.add(decoding)
    scheduler.commit(planned(scheduler), [50])
    scheduler.add(long)
    scheduler.add(late)
    plan = planned(scheduler)
    assert (plan.requests, plan.lengths, plan.samples) == ([decoding, long], [1, 7], [True, False])
    assert [event.request for event in scheduler.commit(plan, [51, 0])] == [decoding]
    plan = planned(scheduler)
    assert (plan.requests, plan.lengths, plan.samples) == ([decoding, long, late], [1, 5, 2], [True] * 3)


def test_one_token_chunks_stand_among_the_single_rows(fake):
    scheduler = fake.scheduler(max_num_batched_tokens=4)
    scheduler.add(fake.request("a", 3))
    scheduler.add(fake.request("b", 5))
    plan = planned(scheduler)
    assert [request.request_id for request in plan.requests] == ["b", "a"]
    assert (plan.lengths, plan.num_single_rows, plan.samples) == ([1, 3], 1, [False, True])
    assert plan.token_ids == [0, 0, 1, 2]


def test_row_and_chunk_limits(fake):
    scheduler = fake.scheduler(max_prefills_per_step=2, max_prefill_chunk=3, max_num_seqs=3)
    for name in "abcd":
        scheduler.add(fake.request(name, 5))
    plan = planned(scheduler)
    assert plan.lengths == [3, 3]
    scheduler.commit(plan, [0, 0])
    assert planned(scheduler).lengths == [2, 2]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)


def test_slots_limit_running_requests_and_are_used_again(fake):
    scheduler = fake.scheduler(max_num_seqs=1)
    scheduler.add(fake.request("a", 3, max_tokens=1))
    scheduler.add(fake.request("b", 3, max_tokens=1))
    first = planned(scheduler)
    assert scheduler.schedule() is None
    scheduler.commit(first, [1])
    second = planned(scheduler)
    assert (second.slots, second.placed[0].request_id) == (first.slots, "b")


def test_priority_then_arrival(fake):
    scheduler = fake.scheduler(max_num_seqs=1)
    for name, priority in (("late", 1), ("a", 0), ("b", 0), ("urgent", -1)):
        scheduler.add(fake.request(name, 3, max_tokens=1, priority=priority))
    order = []
    while scheduler.has_work:
        plan = planned(scheduler)
        order += [request.request_id for request in plan.requests]
        scheduler.commit(plan, [1])
    assert order == ["urgent", "a", "b", "late"]


@pytest.mark.parametrize("phase", ["waiting", "in flight", "running"])
def test_abort_in_any_phase(fake, phase):
    scheduler = fake.scheduler()
    request = fake.request("a", 6)
    scheduler.add(request)
    plan = planned(scheduler) if phase != "waiting" else None
    if plan is not None and phase == "running":
        scheduler.commit(plan, [1])
    assert scheduler.abort("a")
    assert not scheduler.abort("a")
    assert (scheduler.num_running, scheduler.num_waiting, request.finish_reason) == (0, 0, "abort")
    assert scheduler.stats().num_running_pages == (2 if phase == "in flight" else 0)
    scheduler.check_invariants()
    if plan is not None and phase == "in flight":
        assert scheduler.commit(plan, [1]) == []
    assert scheduler.stats().num_running_pages == 0
    assert not scheduler.has_work


def test_an_aborted_id_can_be_used_again_at_once(fake):
    scheduler = fake.scheduler()
    scheduler.add(fake.request("a", 6))
    plan = planned(scheduler)
    scheduler.abort("a")
    again = fake.request("a", 6, max_tokens=1)
    scheduler.add(again)
    second = planned(scheduler)
    assert second.slots != plan.slots
    assert scheduler.commit(plan, [1]) == []
    assert scheduler.commit(second, [2])[0].request is again


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "message"),
    [
        (101, 1, PromptTooLong, "prompt has 101 tokens; this model accepts 99 "),
        (100, 1, PromptTooLong, "prompt has 100 tokens"),
        (20, 21, PromptTooLong, "need 41 tokens; the KV cache holds 40"),
        (0, 1, InvalidRequest, "no tokens"),
    ],
)
def test_what_can_never_run_is_refused(fake, prompt, max_tokens, error, message):
    scheduler = fake.scheduler(num_pages=10)
    with pytest.raises(error, match=message):
        scheduler.add(fake.request("a", prompt, max_tokens=max_tokens))
    assert not scheduler.has_work


def test_a_request_as_large_as_the_pool_runs(fake):
    scheduler = fake.scheduler(num_pages=10)
    request = fake.request("a", 20, max_tokens=20)
    scheduler.add(request)
    fake.Loop(scheduler, 4, 1).drain()
    assert request.num_output_tokens == 20


def test_a_used_id_is_refused(fake):
    scheduler = fake.scheduler()
    scheduler.add(fake.request("a", 3))
    with pytest.raises(InvalidRequest, match="'a' is already in use"):
        scheduler.add(fake.request("a", 3))


def test_plans_commit_in_order(fake):
    scheduler = fake.scheduler()
    scheduler.add(fake.request("a", 3))
    planned(scheduler)
    second = planned(scheduler)
    with pytest.raises(AssertionError, match="in the order"):
        scheduler.commit(second, [1])
