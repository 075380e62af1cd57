"""What one step computes, as lists of ints, and the draft it grows from.

Rows with one token come first, then rows with more; within both, the order in which the scheduler chose them.
"""

from dataclasses import dataclass, field

from jaxserve.scheduler.request import Request, SchedulerFinishReason

IN_FLIGHT_TOKEN = -1
"""Stands for the token drawn for this slot by the latest step in flight; only the device knows it."""


type PageUpdate = tuple[int, int, int, list[int]]
"""Number of a page table, slot, first index in the slot's row there, and the pages from there on."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPlan:
    """One step: parallel lists with one entry per row, and all rows' token ids concatenated.

    slots: where the row's request lives on the device. starts: position of the row's first token. lengths: tokens of
    the row. samples: whether a new token is drawn after the row's last. The first num_single_rows rows have length 1.
    token_ids may hold IN_FLIGHT_TOKEN, only as the last id of a row. placed: requests put into their slot by this
    step. page_updates: to apply in order before the step; NO_PAGE for those that left the window.
    """

    step: int
    requests: list[Request]
    slots: list[int]
    starts: list[int]
    lengths: list[int]
    samples: list[bool]
    num_single_rows: int
    token_ids: list[int]
    placed: list[Request]
    page_updates: list[PageUpdate]

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.token_ids)


@dataclass(slots=True, eq=False)
class TokenEvent:
    """What a committed row gave its request: new tokens, and why it ended if it did.

    stop_reason is the stop token id that ended it, None for end-of-sequence. An aborted request has no further
    events: its caller knows.
    """

    request: Request
    row: int
    token_ids: tuple[int, ...]
    finish_reason: SchedulerFinishReason | None = None
    stop_reason: int | None = None


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of a draft, in parallel lists."""

    requests: list[Request] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class StepDraft:
    """A step while the scheduler fills it: its rows so far and what is left of the limits."""

    tokens_left: int
    prefills_left: int
    singles: Rows = field(default_factory=Rows)
    chunks: Rows = field(default_factory=Rows)
    placed: list[Request] = field(default_factory=list)
    page_updates: list[PageUpdate] = field(default_factory=list)
    promised_pages: int = 0
    """Pages that prompts under way will still ask for."""
    best_stalled: tuple[int, int] | None = None
    """Best rank among running requests that found no page for this step."""

    def add(self, request: Request, start: int, length: int, is_last: bool) -> None:
        """Adds a row of known tokens."""
        rows = self.singles if length == 1 else self.chunks
        rows.requests.append(request)
        rows.starts.append(start)
        rows.lengths.append(length)
        rows.samples.append(is_last)
        rows.token_ids += request.token_ids[start : start + length]
        self.tokens_left -= length
        self.prefills_left -= length > 1

    def stall(self, request: Request) -> None:
        """Notes that a running request goes without a row for lack of pages."""
        if self.best_stalled is None or request.rank < self.best_stalled:
            self.best_stalled = request.rank

    def plan(self, step: int) -> StepPlan | None:
        """The finished plan, None when there is no row."""
        singles, chunks = self.singles, self.chunks
        requests = singles.requests + chunks.requests
        if not requests:
            return None
        return StepPlan(
            step=step,
            requests=requests,
            slots=[request.slot for request in requests],  # type: ignore[misc]
            starts=singles.starts + chunks.starts,
            lengths=singles.lengths + chunks.lengths,
            samples=singles.samples + chunks.samples,
            num_single_rows=len(singles.requests),
            token_ids=singles.token_ids + chunks.token_ids,
            placed=self.placed,
            page_updates=self.page_updates,
        )
