"""Where running requests live: their slot, their pages and their path in the prefix cache, taken and given back.

Knows how, not when: which request gets or loses a place is decided in scheduler.py.
"""

import sys
from collections.abc import Iterable
from itertools import pairwise

from jaxserve.scheduler.page_need import ALL_PAGES, SequenceNeed
from jaxserve.scheduler.pages import NO_PAGE, PagePool
from jaxserve.scheduler.prefix_cache import Node, PrefixCache
from jaxserve.scheduler.request import Request
from jaxserve.scheduler.step_plan import PageUpdate

_NEVER = sys.maxsize


class Placement:
    """A fixed set of slots and pages, and the requests placed in them."""

    __slots__ = (
        "_cache",
        "_caches_prefixes",
        "_free_slots",
        "_need",
        "_num_slots",
        "_set_sizes",
        "column_pages",
        "num_left_pages",
        "page_size",
        "pool",
    )

    def __init__(self, *, num_pages: int, need: SequenceNeed, num_slots: int, caches_prefixes: bool) -> None:
        self.page_size = need.page_size
        self.pool = PagePool(num_pages)
        self._need = need
        self._set_sizes = tuple(kind.num_tables for kind in need.kinds)
        self.column_pages = need.num_tables
        self.num_left_pages = 0  # of all requests, since the start
        self._cache = PrefixCache(self.pool, need.page_size, tuple(kind.reach for kind in need.kinds))
        self._caches_prefixes = caches_prefixes
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def has_free_slot(self) -> bool:
        """True when one more request can be placed."""
        return bool(self._free_slots)

    def columns_for(self, num_tokens: int) -> int:
        """Columns of the page tables that so many tokens of one request fill."""
        return -(-num_tokens // self.page_size)

    def most_tokens(self, max_model_len: int) -> int:
        """The tokens a sequence may have for its pages to fit, up to max_model_len."""
        return self._need.longest(self.pool.num_pages, max_model_len)

    def room(self, request: Request) -> int:
        """Columns the request may fill more than it does, before some have left its window."""
        return ALL_PAGES if self._need.windowed is None else self._most_columns(request) - request.num_held_pages

    def _most_columns(self, request: Request) -> int:
        """Columns a request holds at most for layers with a window, so that all pages of its tokens fit."""
        windowed = self._need.windowed
        if windowed is None:
            return ALL_PAGES
        full = self._need.num_full_tables * self.columns_for(len(request.token_ids))
        return min(windowed.most, (self.pool.num_pages - full) // windowed.num_tables)

    def num_pages_of(self, request: Request) -> int:
        """Pages the request holds in all its page tables."""
        need = self._need
        return need.num_full_tables * request.num_columns + need.num_windowed_tables * request.num_held_pages

    def lacking(self, request: Request) -> int:
        """Pages that the request's known tokens still want at a time, beside those it holds."""
        return self._lacking(request, request.num_columns, request.num_left_pages)

    def lacking_beside(self, path: list[Node], request: Request) -> int:
        """Pages that the request's known tokens would want beside those of its matched path."""
        return self._lacking(request, len(path[1:]), self._num_left(len(path[1:])))

    def _lacking(self, request: Request, num_columns: int, num_left: int) -> int:
        need, wanted = self._need, self.columns_for(len(request.token_ids))
        full = need.num_full_tables * max(0, wanted - num_columns)
        windowed = min(wanted - num_left, self._most_columns(request)) - (num_columns - num_left)
        return full + need.num_windowed_tables * max(0, windowed)

    def _num_left(self, num_columns: int) -> int:
        """Pages of so many full ones that no token behind them sees in a layer with a window."""
        return 0 if self._need.windowed is None else max(0, num_columns - self._need.windowed.reach)

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
        request.tables = self._cache.pages_of(path)
        request.num_columns = len(request.tables[0])
        request.num_left_pages = self._num_left(request.num_columns)
        request.next_left_at = self._next_left_at(request)
        cached = request.num_columns * self.page_size
        request.num_computed_tokens = request.num_scheduled_tokens = cached
        request.next_cached_at = cached + self.page_size if path else _NEVER

    def _next_left_at(self, request: Request) -> int:
        return _NEVER if self._need.windowed is None else self._need.windowed.leaves_at(request.num_left_pages)

    def grow(self, request: Request, num_columns: int) -> list[PageUpdate]:
        """Gives the request the pages of so many more columns; the change of the page tables, as in StepPlan."""
        first = request.num_columns
        request.num_columns = first + num_columns
        if self.column_pages == 1:  # most models: nothing to go through
            assert request.slot is not None
            some = self.pool.take(num_columns)
            request.tables[0] += some
            return [(0, request.slot, first, some)]
        for pages, size in zip(request.tables, self._set_sizes, strict=True):
            pages += self.pool.take(num_columns, size)
        return self.updates_from(request, first)

    def updates_from(self, request: Request, first: int) -> list[PageUpdate]:
        """The request's row in each page table from a column on, as in StepPlan."""
        assert request.slot is not None
        updates: list[PageUpdate] = []
        for pages, size in zip(request.tables, self._set_sizes, strict=True):
            some = pages[first:]
            updates.append((len(updates), request.slot, first, some))
            for number in range(1, size):
                others = [page if page == NO_PAGE else self.pool.pages_of(page)[number] for page in some]
                updates.append((len(updates), request.slot, first, others))
        return updates

    def remove(self, request: Request) -> None:
        """Takes slot and pages back; the request starts anew if it is placed again. Nothing if it has no place."""
        if request.slot is None:
            return
        self._cache.release(request.cache_path, request.tables)
        self._free_slots.append(request.slot)
        request.slot = None
        request.tables, request.cache_path, request.num_columns, request.num_left_pages = [], [], 0, 0
        request.num_computed_tokens = request.num_scheduled_tokens = 0

    def cache_full_pages(self, request: Request) -> None:
        """Puts the pages that the computed tokens filled into the prefix cache."""
        size = self.page_size
        path, tables, token_ids = request.cache_path, request.tables, request.token_ids
        # Holding equal pages twice can outgrow the pool; starting anew cures that only for those who read the cache.
        beside_equal = request.reads_prefix_cache
        while request.next_cached_at <= request.num_computed_tokens:
            end = request.next_cached_at
            chunk = tuple(token_ids[end - size : end])
            pages = [table[len(path) - 1] for table in tables]
            if not self._cache.extend(path, chunk, pages, beside_equal=beside_equal):
                request.next_cached_at = _NEVER
                return
            request.next_cached_at = end + size

    def free_left_pages(self, request: Request) -> list[PageUpdate]:
        """Gives back the pages that no token to come sees; the change of the page tables, as in StepPlan.

        To be called once computed tokens reach next_left_at, and after `cache_full_pages`. A step in flight is no
        obstacle: all of its tokens are to come.
        """
        need = self._need
        assert request.slot is not None
        assert need.windowed is not None
        kind, first = len(need.kinds) - 1, request.num_left_pages
        pages = request.tables[kind]
        while request.next_left_at <= request.num_computed_tokens:
            index = request.num_left_pages
            self._cache.leave_page(request.cache_path, kind, pages[index], index)
            pages[index] = NO_PAGE
            request.num_left_pages = index + 1
            request.next_left_at = self._next_left_at(request)
        gone = [NO_PAGE] * (request.num_left_pages - first)
        self.num_left_pages += len(gone) * need.num_windowed_tables
        return [(table, request.slot, first, gone) for table in range(need.num_full_tables, need.num_tables)]

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
            for kind, table in enumerate(request.tables):
                for index, page in enumerate(table):
                    if page != NO_PAGE:
                        self._count(references, private, request.cache_path[index + 1 : index + 2], kind, page)
            self._check_tables(request)
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or used twice"
        assert all(references[page] == 1 for page in private), "a private page is shared"
        self.pool.check_invariants(references)
        self._cache.check_invariants()

    @staticmethod
    def _count(references: list[int], private: set[int], node: list[Node], kind: int, page: int) -> None:
        """Adds what a request holds at one index, where its path has this node or none, for one kind of layers."""
        references[page] += 1
        if node and node[0].pages[kind] == page:
            return
        assert page not in private, f"page {page} has two owners"
        private.add(page)
        if node:
            references[node[0].pages[kind]] += 1

    def _check_tables(self, request: Request) -> None:
        computed, scheduled = request.num_computed_tokens, request.num_scheduled_tokens
        for table, need in zip(request.tables, self._need.kinds, strict=True):
            assert len(table) == self.columns_for(scheduled), "pages do not match the scheduled tokens"
            num_left = 0 if need.window is None else max(0, computed + 1 - need.window) // self.page_size
            assert set(table[:num_left]) <= {NO_PAGE}, "pages do not match the window"
            held = table[num_left:]
            assert len(set(held)) == len(held), "a page stands twice in one table"
            assert NO_PAGE not in held, "a page that a token to come sees is gone"
            assert len(held) <= need.most, "more pages than a window and two chunks need"
            assert need.window is None or num_left == request.num_left_pages
        assert request.num_columns == self.columns_for(scheduled)
        assert computed <= scheduled
        # The draws that a finished request still has in flight are dropped, never committed.
        known = len(request.token_ids) + request.num_draws_in_flight
        assert request.is_finished or scheduled <= known, "a position is scheduled before its token is drawn"
        path = request.cache_path
        assert max(len(path) - 1, 0) <= computed // self.page_size, "an uncommitted page is in the cache"
        for parent, node in pairwise(path):
            assert node.parent is parent, "a path is broken"
