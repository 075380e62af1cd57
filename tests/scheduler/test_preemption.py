"""Who gives way when pages or slots run out, and that the work goes on afterwards."""

import pytest


def two_in_a_tight_pool(fake, overlap: int):
    """Two requests of 3 pages in a pool of 4, run until the first preemption."""
    scheduler = fake.scheduler(num_pages=4, enable_prefix_caching=False)
    loop = fake.Loop(scheduler, 4, overlap)
    first, second = fake.request("a", [1] * 3, max_tokens=8), fake.request("b", [2] * 3, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    while not scheduler.stats().num_preemptions:
        loop.step()
    return scheduler, loop, first, second


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_later_request_gives_way_and_still_ends_right(fake, overlap):
    scheduler, loop, first, second = two_in_a_tight_pool(fake, overlap)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    scheduler.check_invariants()
    loop.drain()
    for request in (first, second):
        assert (request.token_ids[3:], request.finish_reason) == fake.outputs_alone(request, 100)
    assert second.num_preemptions == 1, "resumed too early, only to be preempted again"


def test_a_preempted_request_keeps_its_pages_until_its_step_commits(fake):
    scheduler = fake.scheduler(num_pages=4, enable_prefix_caching=False)
    first, second = fake.request("a", [1] * 3, max_tokens=8), fake.request("b", [2] * 3, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    plans = []
    while not second.num_preemptions:
        plans.append(scheduler.schedule())
    assert second.num_in_flight_steps > 0
    assert second.slot is not None
    assert second.num_columns == len(second.tables[0]) == 2
    assert scheduler.num_waiting == 1
    for plan in plans:
        if plan is not None:
            scheduler.commit(plan, [5] * len(plan.requests))
    assert (second.slot, second.tables, second.num_computed_tokens) == (None, [], 0)
    assert second.num_output_tokens > 0  # what was drawn in flight is kept
    scheduler.check_invariants()


def test_a_better_priority_takes_the_only_slot(fake):
    scheduler = fake.scheduler(max_num_seqs=1)
    loop = fake.Loop(scheduler, 4, 0)
    usual, urgent = fake.request("usual", 3, max_tokens=6), fake.request("urgent", 3, max_tokens=6, priority=-1)
    scheduler.add(usual)
    loop.step()
    scheduler.add(urgent)
    loop.step()  # still computes the token of the one that gives way
    loop.step()
    assert (usual.num_preemptions, scheduler.num_waiting) == (1, 1)
    loop.drain()
    assert [event.request for event in loop.events if event.finish_reason] == [urgent, usual]
    assert urgent.num_preemptions == 0


def test_equal_priority_waits_for_its_turn(fake):
    scheduler = fake.scheduler(max_num_seqs=1)
    loop = fake.Loop(scheduler, 4, 0)
    for name in "ab":
        scheduler.add(fake.request(name, 3, max_tokens=6))
    loop.drain()
    assert scheduler.stats().num_preemptions == 0


def test_no_useless_preemption_for_a_prompt_that_would_not_fit_anyway(fake):
    scheduler = fake.scheduler(num_pages=12, enable_prefix_caching=False)
    loop = fake.Loop(scheduler, 4, 0)
    best = fake.request("best", [1] * 30, max_tokens=4, priority=-2)
    small = fake.request("small", [2] * 3, max_tokens=12)
    scheduler.add(best)
    scheduler.add(small)
    loop.step()
    scheduler.add(fake.request("large", [3] * 30, max_tokens=2, priority=-1))
    loop.step()
    assert small.num_preemptions == 0
    loop.drain()


def test_a_prompt_waits_when_it_would_take_the_last_pages(fake):
    scheduler = fake.scheduler(num_pages=8, enable_prefix_caching=False)
    loop = fake.Loop(scheduler, 4, 0)
    scheduler.add(fake.request("a", [1] * 16, max_tokens=2))
    scheduler.add(fake.request("b", [2] * 16, max_tokens=2))
    loop.step()
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    loop.drain()
    assert scheduler.stats().num_preemptions == 0


def test_one_request_that_holds_equal_pages_twice_starts_anew(fake):
    # Both compute the same prompt side by side; the survivor holds its own pages and the first one's.
    scheduler = fake.scheduler(num_pages=8)
    loop = fake.Loop(scheduler, 4, 0)
    scheduler.add(fake.request("a", 12, max_tokens=2))
    survivor = fake.request("b", 12, max_tokens=20)
    scheduler.add(survivor)
    loop.drain()
    assert survivor.num_preemptions == 1
    assert survivor.token_ids[12:] == fake.outputs_alone(survivor, 100)[0]


def test_a_request_that_must_not_read_the_cache_never_holds_pages_twice(fake):
    scheduler = fake.scheduler(num_pages=8)
    loop = fake.Loop(scheduler, 4, 0)
    for name in "ab":
        request = fake.request(name, 12, max_tokens=20, reads_prefix_cache=False)
        scheduler.add(request)
        loop.drain()
        assert (request.num_preemptions, request.num_cached_tokens) == (0, 0)


def test_a_preempted_request_is_not_resumed_while_its_token_is_in_flight(fake):
    scheduler = fake.scheduler(max_num_seqs=2)
    ending, resumed = fake.request("ending", [1] * 3, max_tokens=1), fake.request("resumed", [2] * 3)
    scheduler.add(ending)
    scheduler.add(resumed)
    first = scheduler.schedule()
    scheduler.add(fake.request("urgent", [3] * 3, priority=-1))
    second = scheduler.schedule()  # holds resumed, which then gives way
    assert (second.requests, resumed.num_preemptions) == ([resumed], 1)
    scheduler.commit(first, [5, 6])
    scheduler.abort("urgent")  # now a slot and pages are free
    assert scheduler.schedule() is None
    assert [event.token_ids for event in scheduler.commit(second, [7])] == [(7,)]
    third = scheduler.schedule()
    # Its one full page, [2, 2, 2, 6], was cached when it gave way.
    assert (third.requests, third.starts, third.token_ids) == ([resumed], [4], [7])
    scheduler.check_invariants()
