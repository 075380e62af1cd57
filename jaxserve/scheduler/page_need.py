"""How many pages one sequence needs at a time: all of its own, or those that a sliding window still reaches."""

import sys
from dataclasses import dataclass

ALL_PAGES = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PageNeed:
    """Pages of one sequence of any length. Without a window every figure is ALL_PAGES.

    reach: full pages right before a page boundary that the tokens behind it see. least: with so many it can run, in
    steps of one token at worst. most: it never holds more, with one chunk in flight and the next being scheduled.
    """

    page_size: int
    window: int | None
    reach: int
    least: int
    most: int

    def of_tokens(self, num_tokens: int) -> int:
        """The most that a sequence of so many tokens holds at a time."""
        return min(-(-num_tokens // self.page_size), self.most)

    def leaves_at(self, num_left: int) -> int:
        """Computed tokens from which on no token sees the page after num_left others that nobody sees any more."""
        return ALL_PAGES if self.window is None else (num_left + 1) * self.page_size + self.window - 1


def page_need(window: int | None, page_size: int, max_chunk: int) -> PageNeed:
    """The need of a model whose every layer sees a token and the window - 1 before it; None: some layer sees all."""
    if window is None:
        return PageNeed(page_size=page_size, window=None, reach=ALL_PAGES, least=ALL_PAGES, most=ALL_PAGES)
    assert window >= 1, "a token sees itself"
    reach = -(-(window - 1) // page_size)
    most = -(-(window - 1 + 2 * max_chunk) // page_size) + 1
    return PageNeed(page_size=page_size, window=window, reach=reach, least=reach + 1, most=most)
