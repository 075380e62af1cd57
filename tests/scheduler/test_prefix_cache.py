"""What is matched, what stays apart, and what is evicted first."""

import pytest

from jaxserve.scheduler.pages import PagePool
from jaxserve.scheduler.prefix_cache import PrefixCache

PAGE = 4


def finish(loop, request):
    loop.scheduler.add(request)
    loop.drain()
    return request


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (11, 8), (12, 8), (13, 12)])
def test_a_repeated_prompt_hits_all_but_its_last_token(fake, length, cached):
    scheduler = fake.scheduler()
    loop = fake.Loop(scheduler, PAGE, 0)
    first = finish(loop, fake.request("a", length, max_tokens=1))
    again = finish(loop, fake.request("b", length, max_tokens=1))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, cached)
    assert again.token_ids == first.token_ids
    stats = scheduler.stats()
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (2 * length, cached)


def test_outputs_are_matched_too(fake):
    scheduler = fake.scheduler()
    loop = fake.Loop(scheduler, PAGE, 0)
    first = finish(loop, fake.request("a", 6, max_tokens=7))
    turn = finish(loop, fake.request("b", [*first.token_ids, 1, 2], max_tokens=1))
    assert turn.num_cached_tokens == 12


@pytest.mark.parametrize(
    ("scheduler_options", "request_options"),
    [
        ({}, {"cache_domain": ("adapter", 1)}),
        ({}, {"reads_prefix_cache": False}),
        ({"enable_prefix_caching": False}, {}),
    ],
)
def test_what_must_not_share_does_not(fake, scheduler_options, request_options):
    scheduler = fake.scheduler(**scheduler_options)
    loop = fake.Loop(scheduler, PAGE, 0)
    finish(loop, fake.request("a", 20))
    assert finish(loop, fake.request("b", 20, **request_options)).num_cached_tokens == 0


def test_nothing_is_matched_after_a_reset_not_even_what_was_under_way(fake):
    scheduler = fake.scheduler()
    loop = fake.Loop(scheduler, PAGE, 0)
    finish(loop, fake.request("done", [9] * 8, max_tokens=1))
    under_way = fake.request("under way", 10, max_tokens=8)
    scheduler.add(under_way)
    loop.step()
    assert scheduler.reset_prefix_cache() == 2
    scheduler.check_invariants()
    loop.drain()
    assert scheduler.stats().num_cached_pages == 0
    assert finish(loop, fake.request("again", 10)).num_cached_tokens == 0
    assert finish(loop, fake.request("once more", 10)).num_cached_tokens == 8


def test_a_running_request_that_began_before_its_first_full_page_is_barred_by_reset(fake):
    scheduler = fake.scheduler()
    loop = fake.Loop(scheduler, PAGE, 0)
    scheduler.add(fake.request("a", 3, max_tokens=6))
    loop.step()
    scheduler.reset_prefix_cache()
    loop.drain()
    assert scheduler.stats().num_cached_pages == 0


def cached_chain(cache: PrefixCache, pool: PagePool, chunks: list[tuple[int, ...]], domain: int = 0) -> list[int]:
    """Computes and gives back one request with these chunks; its pages."""
    path = cache.longest_match(domain, [token for chunk in chunks for token in chunk], len(chunks) * 2)
    pages = [node.pages[0] for node in path[1:]]
    for chunk in chunks[len(pages) :]:
        pages += pool.take(1)
        assert cache.extend(path, chunk, pages[-1:], beside_equal=True)
    cache.release(path, [pages])
    return pages


def test_least_recently_used_leaves_are_evicted_first():
    pool = PagePool(6)
    cache = PrefixCache(pool, 2)
    a = cached_chain(cache, pool, [(1, 1), (2, 2), (3, 3)])
    b = cached_chain(cache, pool, [(7, 7), (8, 8)])
    cached_chain(cache, pool, [(1, 1)])  # uses the first page of the first chain once more
    pool.take(1)
    assert pool.take(2) == [a[1], a[2]]  # the deeper page left first; the free list hands out the last one freed
    assert pool.take(2) == [b[0], b[1]]
    assert pool.num_cached == 1
    assert cached_chain(cache, pool, [(1, 1)]) == [a[0]]
    cache.check_invariants()


def test_held_pages_are_never_evicted():
    pool = PagePool(3)
    cache = PrefixCache(pool, 2)
    cached_chain(cache, pool, [(1, 1), (2, 2)])
    path = cache.longest_match(0, [1, 1, 2, 2], 4)
    assert pool.num_available == 1
    pool.take(1)
    with pytest.raises(AssertionError, match="1 pages wanted, 0 available"):
        pool.take(1)
    cache.release(path, cache.pages_of(path))
    assert pool.num_available == 2


def test_the_first_of_two_equal_pages_is_the_one_that_is_shared():
    pool = PagePool(4)
    cache = PrefixCache(pool, 2)
    paths = [cache.longest_match(0, [1, 1], 2) for _ in range(2)]
    first, second = pool.take(1), pool.take(1)
    assert cache.extend(paths[0], (1, 1), first, beside_equal=True)
    assert cache.extend(paths[1], (1, 1), second, beside_equal=True)
    cache.release(paths[0], [first])
    assert (pool.num_cached, pool.num_running) == (0, 2)  # the second path still holds the first page
    cache.release(paths[1], [second])
    assert (pool.num_cached, pool.num_free) == (1, 3)
    assert cache.longest_match(0, [1, 1], 2)[1].pages == first


def test_an_empty_tree_leaves_no_domain_behind():
    pool = PagePool(1)
    cache = PrefixCache(pool, 2)
    for domain in range(5):
        cached_chain(cache, pool, [(1, 1)], domain)
    assert list(cache._roots) == [4]
