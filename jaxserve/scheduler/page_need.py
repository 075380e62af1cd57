"""How many pages one sequence needs at a time: all of its own, or those that a sliding window still reaches."""

import sys
from dataclasses import dataclass

ALL_PAGES = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNeed:
    """Pages of one sequence of any length in each page table of one kind of layers. Without a window every figure is
    ALL_PAGES.

    reach: full pages right before a page boundary that the tokens behind it see. least: with so many it can run, in
    steps of one token at worst. most: it never holds more, with one chunk in flight and the next being scheduled.
    """

    page_size: int
    window: int | None
    reach: int
    least: int
    most: int
    num_tables: int = 1

    def of_tokens(self, num_tokens: int) -> int:
        """The most that a sequence of so many tokens holds at a time."""
        return min(-(-num_tokens // self.page_size), self.most)

    def leaves_at(self, num_left: int) -> int:
        """Computed tokens from which on no token sees the page after num_left others that nobody sees any more."""
        return ALL_PAGES if self.window is None else (num_left + 1) * self.page_size + self.window - 1


def page_need(window: int | None, page_size: int, max_chunk: int, num_tables: int = 1) -> PageNeed:
    """The need of layers that see a token and the window - 1 before it; None: that see all."""
    every = {"page_size": page_size, "num_tables": num_tables}
    if window is None:
        return PageNeed(window=None, reach=ALL_PAGES, least=ALL_PAGES, most=ALL_PAGES, **every)
    assert window >= 1, "a token sees itself"
    reach = -(-(window - 1) // page_size)
    most = -(-(window - 1 + 2 * max_chunk) // page_size) + 1
    return PageNeed(window=window, reach=reach, least=reach + 1, most=most, **every)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceNeed:
    """Pages of one sequence in all page tables: of `full`, the layers that see all tokens, and of `windowed` ones.

    At least one of the two is there. A column of the tables is what they have at one index: one page each.
    """

    full: PageNeed | None
    windowed: PageNeed | None

    @property
    def kinds(self) -> tuple[PageNeed, ...]:
        """Those that are there; their page tables are numbered in this order."""
        return tuple(need for need in (self.full, self.windowed) if need is not None)

    @property
    def page_size(self) -> int:
        return self.kinds[0].page_size

    @property
    def num_full_tables(self) -> int:
        return 0 if self.full is None else self.full.num_tables

    @property
    def num_windowed_tables(self) -> int:
        return 0 if self.windowed is None else self.windowed.num_tables

    @property
    def num_tables(self) -> int:
        """The pages of one column."""
        return self.num_full_tables + self.num_windowed_tables

    def of_tokens(self, num_tokens: int) -> int:
        """The most that a sequence of so many tokens holds at a time."""
        return sum(need.num_tables * need.of_tokens(num_tokens) for need in self.kinds)

    def least_for(self, num_tokens: int) -> int:
        """Pages with which a sequence of so many tokens can run, alone."""
        num_columns = -(-num_tokens // self.page_size)
        return sum(need.num_tables * min(num_columns, need.least) for need in self.kinds)

    def longest(self, num_pages: int, max_tokens: int, *, in_chunks: bool = False) -> int:
        """The tokens a sequence may have for so many pages to do, up to max_tokens; in_chunks: and leave room for whole
        chunks of its prompt beside what all its tokens need."""
        num_columns = num_pages // self.num_tables
        if self.windowed is not None:
            window_pages = self.windowed.most if in_chunks and self.full is not None else self.windowed.least
            if num_columns >= window_pages:
                if self.full is None:
                    return max_tokens
                num_columns = (num_pages - self.windowed.num_tables * window_pages) // self.full.num_tables
        return min(max_tokens, num_columns * self.page_size)


def sequence_need(
    window: int | None, page_size: int, max_chunk: int, tables: tuple[int, int] | None = None
) -> SequenceNeed:
    """The need of a model. window: the widest of the layers that have one. tables: page tables of the layers without
    and with a window; when None, one for all layers, which have the window or, where that is None too, see all."""
    num_full, num_windowed = tables or ((1, 0) if window is None else (0, 1))
    assert num_full + num_windowed, "a model has a page table"
    assert (window is not None) == (num_windowed > 0), "a window is for the layers that have it"
    return SequenceNeed(
        full=page_need(None, page_size, max_chunk, num_full) if num_full else None,
        windowed=page_need(window, page_size, max_chunk, num_windowed) if num_windowed else None,
    )
