"""Models whose every layer has a sliding window: pages that left it go back, and nothing else changes."""

import pytest

from jaxserve.errors import PromptTooLong
from jaxserve.scheduler.page_need import page_need

PAGE, WINDOW = 4, 10
REACH = 3  # pages that hold the nine tokens before a page boundary


def windowed(fake, overlap=0, **options):
    scheduler = fake.scheduler(**{"window": WINDOW, "max_model_len": 400, **options})
    return scheduler, fake.Loop(scheduler, PAGE, overlap, WINDOW)


def finish(loop, request):
    loop.scheduler.add(request)
    loop.drain()
    return request


def most_held(loop, request, pages_of):
    """Runs the request; the largest figure while a step is in flight."""
    loop.scheduler.add(request)
    most = 0
    while loop.scheduler.has_work:
        loop.schedule()
        loop.scheduler.check_invariants()
        most = max(most, pages_of())
        is_last = request.num_scheduled_tokens + 1 >= request.max_total_tokens
        while loop.in_flight and (is_last or len(loop.in_flight) > loop.overlap):
            loop.commit()
    return most


@pytest.mark.parametrize(("window", "reach"), [(1, 0), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3)])
def test_what_a_window_needs(window, reach):
    need = page_need(window, PAGE, 8)
    assert (need.reach, need.least) == (reach, reach + 1)
    assert need.of_tokens(3) == 1
    assert need.of_tokens(10**6) == need.most
    # The first page is 0 .. 3: the last token that sees position 3 stands window - 1 behind it.
    assert need.leaves_at(0) == 3 + window
    without = page_need(None, PAGE, 8)
    assert without.of_tokens(10**6) == 250_000
    assert without.leaves_at(0) > 10**9


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_pages_in_use_stay_bounded(fake, caching, overlap):
    """Five pages for a sequence of a hundred: a window of ten touches four, and a step in flight one more."""
    scheduler, loop = windowed(fake, overlap, num_pages=5, max_num_batched_tokens=4, enable_prefix_caching=caching)
    request = fake.request("a", [1, 2, 3] * 30, max_tokens=300)
    assert most_held(loop, request, lambda: scheduler.stats().num_running_pages) == 4 + overlap
    assert request.num_preemptions == 0
    assert request.token_ids[90:] == fake.outputs_alone(request, 400)[0]
    stats = scheduler.stats()
    assert stats.num_left_pages == (389 - WINDOW + 1) // PAGE
    assert stats.num_running_pages == 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_long_prompt_takes_a_window_and_two_chunks_at_most(fake, overlap):
    _, loop = windowed(fake, overlap, max_num_batched_tokens=16)
    request = fake.request("a", [1, 2, 3] * 50, max_tokens=2)
    held = most_held(loop, request, lambda: request.num_held_pages)
    assert (1 + overlap) * 16 // PAGE < held <= page_need(WINDOW, PAGE, 16).most == 12
    assert max(max(plan.lengths) for plan in loop.plans) == 16
    assert request.token_ids[150:] == fake.outputs_alone(request, 400)[0]


@pytest.mark.parametrize("window", [9, 10])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_pool_of_the_least_pages_runs_any_length(fake, overlap, window):
    """And never starts anew: where the step in flight keeps the page that the next one lacks, that one waits."""
    num_pages = page_need(window, PAGE, 64).least
    scheduler = fake.scheduler(window=window, max_model_len=400, num_pages=num_pages)
    request = finish(fake.Loop(scheduler, PAGE, overlap, window), fake.request("a", [5] * 100, max_tokens=200))
    assert request.token_ids[100:] == fake.outputs_alone(request, 400)[0]
    assert request.num_preemptions == 0


def test_fewer_pages_than_a_window_needs_hold_short_sequences(fake):
    small, _ = windowed(fake, 1, num_pages=REACH)
    with pytest.raises(PromptTooLong, match="need 300 tokens; the KV cache holds 12;"):
        small.add(fake.request("a", [5] * 100, max_tokens=200))


def test_more_sequences_run_than_pages_would_hold_at_full_length(fake):
    scheduler, loop = windowed(fake, num_pages=40, max_num_batched_tokens=16)
    requests = [fake.request(str(i), [i] * 5, max_tokens=200) for i in range(8)]  # 8 times 52 pages at their end
    for request in requests:
        scheduler.add(request)
    for _ in range(30):
        loop.step()
    assert scheduler.num_running == 8
    loop.drain()
    assert scheduler.stats().num_preemptions == 0


def test_a_hit_wants_the_last_window_alone(fake):
    """Pages before it are evicted first; the nodes that lost them lead to those that are left."""
    scheduler, loop = windowed(fake, num_pages=16)
    first = finish(loop, fake.request("a", 60, max_tokens=1))
    finish(loop, fake.request("other", [9] * 30, max_tokens=1))
    assert scheduler.stats().num_cached_pages < 60 // PAGE + 30 // PAGE
    again = finish(loop, fake.request("b", 60, max_tokens=5))
    assert (again.num_cached_tokens, again.token_ids[:61]) == (56, first.token_ids)
    assert again.token_ids[60:] == fake.outputs_alone(again, 400)[0]
    # A prefix whose own window is gone is none, although what follows it is cached.
    assert finish(loop, fake.request("c", 30, max_tokens=1)).num_cached_tokens == 0


def test_a_prefix_computed_again_fills_the_gaps(fake):
    scheduler, loop = windowed(fake, num_pages=16)
    finish(loop, fake.request("a", 60, max_tokens=1))
    finish(loop, fake.request("other", [9] * 30, max_tokens=1))
    finish(loop, fake.request("c", 30, max_tokens=1))
    assert finish(loop, fake.request("d", 30, max_tokens=1)).num_cached_tokens == 28
    scheduler.check_invariants()


def test_requests_with_one_prompt_share_its_pages(fake):
    scheduler, loop = windowed(fake)
    finish(loop, fake.request("a", 41, max_tokens=1))
    requests = [fake.request(f"fork {i}", 41, max_tokens=30) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    loop.step()
    assert scheduler.stats().num_running_pages == (REACH - 1) + 3  # one has left by now
    loop.drain()
    assert [request.num_cached_tokens for request in requests] == [40] * 3
    assert len({tuple(request.token_ids) for request in requests}) == 1


def test_nothing_stays_in_the_tree_for_pages_that_are_gone(fake):
    scheduler, loop = windowed(fake, num_pages=8)
    for i in range(20):
        finish(loop, fake.request(str(i), [i] * 40, max_tokens=3, cache_domain=i))
    roots = scheduler._placement._cache._roots
    assert 1 <= len(roots) <= 3
