"""Models with a window in some layers: each kind has page tables of its own, and pages come from one pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.errors import PromptTooLong
from jaxserve.scheduler.page_need import ALL_PAGES, sequence_need
from jaxserve.scheduler.pages import NO_PAGE, PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache

PAGE, WINDOW, TABLES = 4, 10, (1, 2)
REACH = 3  # pages that hold the nine tokens before a page boundary


def mixed(fake, overlap=0, tables=TABLES, **options):
    scheduler = fake.scheduler(**{"window": WINDOW, "tables": tables, "max_model_len": 400, **options})
    return scheduler, fake.Loop(scheduler, PAGE, overlap, WINDOW, tables)


def finish(loop, request):
    loop.scheduler.add(request)
    loop.drain()
    return request


@given(
    window=st.integers(1, 12),
    page_size=st.integers(1, 5),
    tables=st.tuples(st.integers(0, 3), st.integers(1, 3)),
    num_pages=st.integers(0, 80),
    in_chunks=st.booleans(),
)
def test_the_longest_sequence_is_the_last_that_fits(window, page_size, tables, num_pages, in_chunks):
    need = sequence_need(window, page_size, 2, tables)
    longest = need.longest(num_pages, 200, in_chunks=in_chunks)
    assert need.least_for(longest) <= num_pages
    if not in_chunks:
        assert longest == 200 or need.least_for(longest + 1) > num_pages
    elif tables[0] and need.windowed is not None and longest >= need.windowed.most * page_size:
        assert need.of_tokens(longest) <= num_pages
        assert longest == 200 or need.of_tokens(longest + 1) > num_pages


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_window_pages_in_use_stay_bounded(fake, caching, overlap):
    """A hundred columns of one full page each, and five at most of two pages for layers with a window."""
    scheduler, loop = mixed(fake, overlap, num_pages=110, max_num_batched_tokens=4, enable_prefix_caching=caching)
    request = fake.request("a", [1, 2, 3] * 30, max_tokens=300)
    scheduler.add(request)
    while scheduler.has_work:
        loop.step()
        scheduler.check_invariants()
        assert request.num_held_pages <= 4 + overlap
        assert scheduler.stats().num_running_pages == request.num_columns + 2 * request.num_held_pages
    assert request.num_preemptions == 0
    assert request.token_ids[90:] == fake.outputs_alone(request, 400)[0]
    stats = scheduler.stats()
    assert stats.num_left_pages == 2 * ((389 - WINDOW + 1) // PAGE)
    assert stats.num_running_pages == 0


@pytest.mark.parametrize("tables", [(1, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_the_least_pages_run_the_longest_sequence(fake, overlap, tables):
    need = sequence_need(WINDOW, PAGE, 64, tables)
    scheduler, loop = mixed(fake, overlap, tables, num_pages=need.least_for(300))
    request = finish(loop, fake.request("a", [5] * 100, max_tokens=200))
    assert request.token_ids[100:] == fake.outputs_alone(request, 400)[0]
    assert request.num_preemptions == 0
    with pytest.raises(PromptTooLong, match="need 301 tokens; the KV cache holds 300;"):
        scheduler.add(fake.request("b", [5] * 100, max_tokens=201))


def test_short_requests_run_side_by_side_where_all_their_pages_would_not_fit(fake):
    """Eight sequences of 52 columns: 8 * 52 * 3 pages at their end if all were kept."""
    scheduler, loop = mixed(fake, num_pages=8 * 52 + 8 * 2 * 6, max_num_batched_tokens=16)
    for i in range(8):
        scheduler.add(fake.request(str(i), [i] * 5, max_tokens=200))
    most_running = 0
    while scheduler.has_work:
        loop.step()
        most_running = max(most_running, scheduler.num_running)
    assert (most_running, scheduler.stats().num_preemptions) == (8, 0)


def test_a_hit_wants_all_full_pages_and_the_last_windows(fake):
    scheduler, loop = mixed(fake, num_pages=70)
    first = finish(loop, fake.request("a", 60, max_tokens=1))
    finish(loop, fake.request("other", [9] * 40, max_tokens=1))  # takes pages that left a window first
    assert scheduler.stats().num_free_pages < 3
    again = finish(loop, fake.request("b", 60, max_tokens=5))
    assert (again.num_cached_tokens, again.token_ids[:61]) == (56, first.token_ids)
    assert again.token_ids[60:] == fake.outputs_alone(again, 400)[0]
    # The full pages of a shorter prefix are there, its window's pages are not.
    assert finish(loop, fake.request("c", 20, max_tokens=1)).num_cached_tokens == 0
    # But now they are, beside full pages that took the place of the first ones.
    assert finish(loop, fake.request("d", 20, max_tokens=1)).num_cached_tokens == 16


def test_computing_a_cached_prefix_again_holds_no_page_twice(fake):
    scheduler, loop = mixed(fake, num_pages=70)
    finish(loop, fake.request("a", 60, max_tokens=1))
    finish(loop, fake.request("other", [9] * 40, max_tokens=1))
    request = fake.request("c", 20, max_tokens=30)
    scheduler.add(request)
    for _ in range(6):
        loop.step()
        scheduler.check_invariants()
    assert request.num_cached_tokens == 0
    assert scheduler.stats().num_running_pages == request.num_columns + 2 * request.num_held_pages


@pytest.mark.parametrize("tables", [(1, 2), (0, 1)])
def test_a_long_generation_does_not_drive_out_what_others_left(fake, tables):
    """Pages that leave its window are taken again before those of a prompt that ended long before."""
    scheduler, loop = mixed(fake, tables=tables, num_pages=130 if tables[0] else 40)
    first = finish(loop, fake.request("first turn", [3] * 60, max_tokens=1))
    finish(loop, fake.request("long", [9] * 10, max_tokens=200))
    assert scheduler.stats().num_free_pages < 5
    second = finish(loop, fake.request("second turn", [*first.token_ids, 1, 2], max_tokens=1))
    assert second.num_cached_tokens == 60


@pytest.mark.parametrize("tables", [(1, 2), (0, 1)])
def test_a_prefix_where_prompts_part_stays_for_the_third(fake, tables):
    scheduler, loop = mixed(fake, tables=tables, num_pages=110 if tables[0] else 30)
    shared = [1, 2, 3, 4] * 5
    for name, other in (("first", 5), ("second", 6), ("third", 7)):
        finish(loop, fake.request(f"long {name}", [other + 3] * 10, max_tokens=60))
        request = finish(loop, fake.request(name, shared + [other] * 60, max_tokens=1))
        assert scheduler.stats().num_free_pages < 5 or name == "first"
    assert request.num_cached_tokens == 20


def test_sets_of_pages_live_and_die_together():
    pool = PagePool(7)
    first, second = pool.take(2, 3)
    assert len({*pool.pages_of(first), *pool.pages_of(second)}) == 6
    assert pool.num_running == 6
    pool.keep(first)
    pool.release(first)
    assert (pool.num_cached, pool.num_running, pool.num_available) == (3, 3, 4)
    pool.retain(first)
    assert (pool.num_cached, pool.num_running) == (0, 6)
    pool.release(first)
    expected = [0] * 7
    expected[second] = 1
    pool.check_invariants(expected)
    assert set(pool.take(4)).isdisjoint(pool.pages_of(second))  # evicts the set
    assert (pool.num_cached, pool.num_free) == (0, 0)


def test_a_node_that_loses_its_full_page_loses_the_other_one():
    pool = PagePool(4)
    cache = PrefixCache(pool, 2, (ALL_PAGES, 1))
    path = cache.longest_match(0, [], 0)
    tables = [pool.take(2), pool.take(2)]
    for index, chunk in enumerate([(1, 1), (2, 2)]):
        assert cache.extend(path, chunk, [table[index] for table in tables], beside_equal=True)
    cache.release(path, tables)
    assert pool.num_cached == 4
    pool.take(1)  # the deepest full page goes first, and what lay beside it
    assert (pool.num_cached, pool.num_free) == (2, 1)
    assert [node.pages for node in cache.longest_match(0, [1, 1, 2, 2], 4)[1:]] == [[tables[0][0], tables[1][0]]]


def test_a_node_that_loses_its_windows_page_stays():
    pool = PagePool(4)
    cache = PrefixCache(pool, 2, (ALL_PAGES, 1))
    path = cache.longest_match(0, [], 0)
    tables = [pool.take(2), pool.take(2)]
    for index, chunk in enumerate([(1, 1), (2, 2)]):
        assert cache.extend(path, chunk, [table[index] for table in tables], beside_equal=True)
    cache.release_page(path, 1, tables[1][0], 0)
    tables[1][0] = NO_PAGE
    assert pool.take(1)
    assert path[1].pages == [tables[0][0], NO_PAGE]
    cache.check_invariants()
    cache.release(path, tables)
    assert len(cache.longest_match(0, [1, 1, 2, 2], 4)) == 3
    assert len(cache.longest_match(0, [1, 1, 3, 3], 4)) == 1  # its full page is there, its window's is not
