"""Who holds each page of the KV cache: reference counts, the free list, and cached pages in order of last use.

Knows page numbers only; what a page contains is the prefix cache's business.
"""

from collections import OrderedDict
from collections.abc import Callable

NO_PAGE = -1
"""Stands where a page left the window: no page has this number, so that kernels read zeros for it."""


class PagePool:
    """num_pages pages, each free, cached (nobody holds it, its content may be matched again) or running (held).

    `on_evict(page)` is called when a cached page is taken for new content; set by the prefix cache.
    """

    __slots__ = ("_cached", "_free", "_is_kept", "_references", "num_pages", "on_evict")

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] | None = None
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_kept = bytearray(num_pages)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds and whose content can still be matched."""
        return len(self._cached)

    @property
    def num_running(self) -> int:
        """Pages somebody holds."""
        return self.num_pages - len(self._free) - len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages `take` can give: free and cached."""
        return len(self._free) + len(self._cached)

    def references(self, page: int) -> int:
        """Number of holders of the page."""
        return self._references[page]

    def take(self, num_pages: int) -> list[int]:
        """num_pages pages with one reference each; evicts the least recently used cached pages when needed."""
        free = self._free
        while len(free) < num_pages:
            assert self._cached, f"{num_pages} pages wanted, {len(free)} available"
            self._evict_oldest()
        taken = [free.pop() for _ in range(num_pages)]
        for page in taken:
            self._references[page] = 1
        return taken

    def retain(self, page: int) -> None:
        """One more holder; a cached page is running again."""
        if self._references[page] == 0:
            del self._cached[page]
        self._references[page] += 1

    def release(self, page: int) -> None:
        """One holder less; the last one leaves the page cached if it is kept, else free."""
        left = self._references[page] - 1
        assert left >= 0, f"page {page} released more often than held"
        self._references[page] = left
        if left:
            return
        if self._is_kept[page]:
            self._cached[page] = None
        else:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """The content can be matched from now on: when its last holder leaves, the page is cached."""
        self._is_kept[page] = 1

    def forget(self, page: int) -> bool:
        """The content can no longer be matched. True when this made a cached page free."""
        self._is_kept[page] = 0
        if self._references[page]:
            return False
        del self._cached[page]
        self._free.append(page)
        return True

    def _evict_oldest(self) -> None:
        page, _ = self._cached.popitem(last=False)
        self._is_kept[page] = 0
        self._free.append(page)
        if self.on_evict is not None:
            self.on_evict(page)

    def check_invariants(self, expected_references: list[int]) -> None:
        """Asserts that the counts equal these and that every page is in exactly one state."""
        assert self._references == expected_references, "page references differ from what the requests hold"
        free, cached = set(self._free), set(self._cached)
        running = {page for page, count in enumerate(self._references) if count}
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert len(free) + len(cached) + len(running) == self.num_pages, "free + cached + running != total"
        assert len(free | cached | running) == self.num_pages, "a page is in two states"
        assert all(self._is_kept[page] for page in cached), "a cached page that cannot be matched"
        assert not any(self._is_kept[page] for page in free), "a free page that can be matched"
