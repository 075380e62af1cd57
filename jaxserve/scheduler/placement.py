"""Where running requests live: their slot, their pages and their path in the prefix cache, taken and given back.

Knows how, not when: which request gets or loses a place is decided in scheduler.py.
"""

import sys
from collections.abc import Iterable
from itertools import pairwise

from jaxserve.scheduler.page_need import PageNeed
from jaxserve.scheduler.pages import NO_PAGE, PagePool
from jaxserve.scheduler.prefix_cache import Node, PrefixCache
from jaxserve.scheduler.request import Request

_NEVER = sys.maxsize


class Placement:
    """A fixed set of slots and pages, and the requests placed in them."""

    __slots__ = (
        "_cache",
        "_caches_prefixes",
        "_free_slots",
        "_most",
        "_need",
        "_num_slots",
        "num_left_pages",
        "page_size",
        "pool",
    )

    def __init__(self, *, num_pages: int, need: PageNeed, num_slots: int, caches_prefixes: bool) -> None:
        self.page_size = need.page_size
        self.pool = PagePool(num_pages)
        self._need = need
        self.num_left_pages = 0  # of all requests, since the start
        self._most = min(need.most, num_pages)
        self._cache = PrefixCache(self.pool, need.page_size, need.reach)
        self._caches_prefixes = caches_prefixes
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        """True when one more request can be placed."""
        return bool(self._free_slots)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens of one request occupy."""
        return -(-num_tokens // self.page_size)

    def most_tokens(self, max_model_len: int) -> int:
        """The tokens a sequence may have for its pages to fit, up to max_model_len."""
        num_pages = self.pool.num_pages
        return max_model_len if num_pages >= self._need.least else min(max_model_len, num_pages * self.page_size)

    def room(self, request: Request) -> int:
        """Pages the request may hold more than it does, before some of those have left its window."""
        return self._most - request.num_held_pages

    def lacking(self, request: Request) -> int:
        """Pages that the request's known tokens still want at a time, beside those it holds."""
        return self._lacking(request, request.num_held_pages, request.num_left_pages)

    def lacking_beside(self, path: list[Node], request: Request) -> int:
        """Pages that the request's known tokens would want beside those of its matched path."""
        pages = self._cache.pages_of(path)
        num_left = pages.count(NO_PAGE)
        return self._lacking(request, len(pages) - num_left, num_left)

    def _lacking(self, request: Request, num_held: int, num_left: int) -> int:
        return max(0, min(self.pages_for(len(request.token_ids)) - num_left, self._most) - num_held)

    def reads_cache(self, request: Request) -> bool:
        """Whether cached pages may serve this request."""
        return self._caches_prefixes and request.reads_prefix_cache

    def match(self, request: Request) -> list[Node]:
        """The request's cached path, held from now on; `put` or `give_up` must follow."""
        if not self._caches_prefixes:
            return []
        # The last token is always computed: its logits give the next one.
        max_tokens = len(request.token_ids) - 1 if request.reads_prefix_cache else 0
        return self._cache.longest_match(request.cache_domain, request.token_ids, max_tokens)

    def give_up(self, path: list[Node]) -> None:
        """Undoes `match`."""
        self._cache.release(path, self._cache.pages_of(path))

    def put(self, request: Request, path: list[Node]) -> None:
        """Gives the request a slot and the pages of its path, whose tokens count as computed."""
        request.slot = self._free_slots.pop()
        request.cache_path = path
        request.pages = self._cache.pages_of(path)
        request.num_left_pages = request.pages.count(NO_PAGE)
        request.next_left_at = self._need.leaves_at(request.num_left_pages)
        cached = len(request.pages) * self.page_size
        request.num_computed_tokens = request.num_scheduled_tokens = cached
        request.next_cached_at = cached + self.page_size if path else _NEVER

    def remove(self, request: Request) -> None:
        """Takes slot and pages back; the request starts anew if it is placed again. Nothing if it has no place."""
        if request.slot is None:
            return
        self._cache.release(request.cache_path, request.pages)
        self._free_slots.append(request.slot)
        request.slot = None
        request.pages, request.cache_path, request.num_left_pages = [], [], 0
        request.num_computed_tokens = request.num_scheduled_tokens = 0

    def cache_full_pages(self, request: Request) -> None:
        """Puts the pages that the computed tokens filled into the prefix cache."""
        size = self.page_size
        path, pages, token_ids = request.cache_path, request.pages, request.token_ids
        # Holding equal pages twice can outgrow the pool; starting anew cures that only for those who read the cache.
        beside_equal = request.reads_prefix_cache
        while request.next_cached_at <= request.num_computed_tokens:
            end = request.next_cached_at
            chunk = tuple(token_ids[end - size : end])
            if not self._cache.extend(path, chunk, pages[len(path) - 1], beside_equal=beside_equal):
                request.next_cached_at = _NEVER
                return
            request.next_cached_at = end + size

    def free_left_pages(self, request: Request) -> tuple[int, int, list[int]]:
        """Gives back the pages that no token to come sees; the change of the page table's row, as in StepPlan.

        To be called once computed tokens reach next_left_at, and after `cache_full_pages`. A step in flight is no
        obstacle: all of its tokens are to come.
        """
        assert request.slot is not None
        first = request.num_left_pages
        while request.next_left_at <= request.num_computed_tokens:
            index = request.num_left_pages
            self._cache.release_page(request.cache_path, request.pages, index)
            request.pages[index] = NO_PAGE
            request.num_left_pages = index + 1
            request.next_left_at = self._need.leaves_at(index + 1)
        count = request.num_left_pages - first
        self.num_left_pages += count
        return request.slot, first, [NO_PAGE] * count

    def reset_cache(self) -> int:
        """Bars everything computed so far from being matched; number of pages that became free."""
        return self._cache.reset()

    def check_invariants(self, placed: Iterable[Request]) -> None:
        """Asserts that pages, slots and paths are exactly what these requests hold."""
        references = [0] * self.pool.num_pages
        private: set[int] = set()
        slots = list(self._free_slots)
        for request in placed:
            assert request.slot is not None
            slots.append(request.slot)
            for index in range(request.num_left_pages, len(request.pages)):
                page = request.pages[index]
                references[page] += 1
                node = request.cache_path[index + 1] if index + 1 < len(request.cache_path) else None
                if node is None or node.page != page:
                    assert page not in private, f"page {page} has two owners"
                    private.add(page)
                if node is not None and node.page != page:
                    references[node.page] += 1
            self._check_tables(request)
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or used twice"
        assert all(references[page] == 1 for page in private), "a private page is shared"
        self.pool.check_invariants(references)
        self._cache.check_invariants()

    def _check_tables(self, request: Request) -> None:
        computed, scheduled = request.num_computed_tokens, request.num_scheduled_tokens
        assert len(request.pages) == self.pages_for(scheduled), "pages do not match the scheduled tokens"
        held = request.pages[request.num_left_pages :]
        assert len(set(held)) == len(held), "a page stands twice in one table"
        assert NO_PAGE not in held, "a page that a token to come sees is gone"
        assert set(request.pages[: request.num_left_pages]) <= {NO_PAGE}
        lowest = computed + 1 - (self._need.window or computed + 1)  # the first position that the next token sees
        assert request.num_left_pages == max(0, lowest) // self.page_size, "pages do not match the window"
        assert computed <= scheduled
        # The draws that a finished request still has in flight are dropped, never committed.
        known = len(request.token_ids) + request.num_draws_in_flight
        assert request.is_finished or scheduled <= known, "a position is scheduled before its token is drawn"
        path = request.cache_path
        assert max(len(path) - 1, 0) <= computed // self.page_size, "an uncommitted page is in the cache"
        for parent, node in pairwise(path):
            assert node.parent is parent, "a path is broken"
