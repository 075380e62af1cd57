"""Who holds each page of the KV cache: reference counts, the free list, and cached pages in order of last use.

Knows page numbers only; what a page contains is the prefix cache's business. Pages that live and die together, one for
each of several page tables, are taken as a set, which is known by the number of its first page.
"""

from collections import OrderedDict
from collections.abc import Callable

NO_PAGE = -1
"""Stands where a page left the window: no page has this number, so that kernels read zeros for it."""


class PagePool:
    """num_pages pages, each free, cached (nobody holds it, its content may be matched again) or running (held).

    A page that is given or taken here stands for its set; counts are of all pages. `on_evict(page)` is called when a
    cached page is taken for new content; set by the prefix cache.
    """

    __slots__ = (
        "_cached",
        "_evicted_first",
        "_free",
        "_is_kept",
        "_num_cached",
        "_references",
        "_rest",
        "num_pages",
        "on_evict",
    )

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_kept = bytearray(num_pages)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._evicted_first: OrderedDict[int, None] = OrderedDict()  # cached too, and taken before these
        self._num_cached = 0
        self._rest: dict[int, tuple[int, ...]] = {}  # first page of a set of several -> the others

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content can still be matched."""
        return self._num_cached

    @property
    def num_running(self) -> int:
        """Pages somebody holds."""
        return self.num_pages - len(self._free) - self._num_cached

    @property
    def num_available(self) -> int:
        """Pages `take` can give: free and cached."""
        return len(self._free) + self._num_cached

    def references(self, page: int) -> int:
        """Number of holders of the page."""
        return self._references[page]

    def pages_of(self, page: int) -> tuple[int, ...]:
        """All pages of the set."""
        return (page, *self._rest.get(page, ()))

    def take(self, num_sets: int, size: int = 1) -> list[int]:
        """num_sets sets of so many pages with one reference each; evicts the least recently used cached ones when
        needed."""
        free, num_pages = self._free, num_sets * size
        while len(free) < num_pages:
            assert self._num_cached, f"{num_pages} pages wanted, {len(free)} available"
            self._evict_oldest()
        taken = [free.pop() for _ in range(num_sets)]
        for page in taken:
            self._references[page] = 1
            if size > 1:
                self._rest[page] = tuple(free.pop() for _ in range(size - 1))
        return taken

    def retain(self, page: int) -> None:
        """One more holder; a cached page is running again."""
        if self._references[page] == 0:
            self._uncache(page)
        self._references[page] += 1

    def release(self, page: int, *, evict_first: bool = False) -> None:
        """One holder less; the last one leaves the page cached if it is kept, else free. evict_first: before those
        that were not, whenever they were used."""
        left = self._references[page] - 1
        assert left >= 0, f"page {page} released more often than held"
        self._references[page] = left
        if left:
            return
        if self._is_kept[page]:
            (self._evicted_first if evict_first else self._cached)[page] = None
            self._num_cached += len(self.pages_of(page))
        else:
            self._set_free(page)

    def keep(self, page: int) -> None:
        """The content can be matched from now on: when its last holder leaves, the page is cached."""
        self._is_kept[page] = 1

    def forget(self, page: int) -> int:
        """The content can no longer be matched; number of cached pages that this made free."""
        self._is_kept[page] = 0
        if self._references[page]:
            return 0
        num_free = len(self._free)
        self._uncache(page)
        self._set_free(page)
        return len(self._free) - num_free

    def _uncache(self, page: int) -> None:
        del (self._cached if page in self._cached else self._evicted_first)[page]
        self._num_cached -= len(self.pages_of(page))

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        self._free += self._rest.pop(page, ())

    def _evict_oldest(self) -> None:
        page = next(iter(self._evicted_first or self._cached))
        self._is_kept[page] = 0
        self._uncache(page)
        self._set_free(page)
        if self.on_evict is not None:
            self.on_evict(page)

    def check_invariants(self, expected_references: list[int]) -> None:
        """Asserts that the counts equal these and that every page is in exactly one state."""
        assert self._references == expected_references, "page references differ from what the requests hold"
        free, first_cached = set(self._free), {*self._cached, *self._evicted_first}
        cached = {page for first in first_cached for page in self.pages_of(first)}
        held = [page for page, count in enumerate(self._references) if count]
        running = {page for first in held for page in self.pages_of(first)}
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert len(cached) == self._num_cached, "cached pages are miscounted, or one is in two sets"
        assert len(running) == sum(len(self.pages_of(first)) for first in held), "a page is in two sets"
        assert len(free) + len(cached) + len(running) == self.num_pages, "free + cached + running != total"
        assert len(free | cached | running) == self.num_pages, "a page is in two states"
        assert self._rest.keys() <= first_cached | set(held), "a set outlives its pages"
        assert all(self._is_kept[page] for page in first_cached), "a cached page that cannot be matched"
        assert not any(self._is_kept[page] for page in free), "a free page that can be matched"
