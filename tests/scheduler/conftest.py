"""A device without a model: stores per page what each position was computed from, and draws tokens from that.

The content of a position is a hash over everything up to it, so a row that reads one wrong page, or a page whose
content was overwritten, draws other tokens and trips the assertion here at once. Each page table has contents of its
own, so that pages of two tables cannot be taken for one another.
"""

from collections import deque
from types import SimpleNamespace

import pytest

from jaxserve.scheduler import IN_FLIGHT_TOKEN, Request, Scheduler, StepPlan, TokenEvent
from jaxserve.scheduler.pages import NO_PAGE

VOCABULARY = 7


@pytest.fixture(scope="session")
def fake() -> SimpleNamespace:
    """The names of this file for tests (test files cannot import each other)."""
    return SimpleNamespace(Loop=Loop, outputs_alone=outputs_alone, request=request_of, scheduler=scheduler_of)


def request_of(name: str, prompt: int | list[int], max_tokens: int = 4, **options) -> Request:
    """A request; a prompt given as a number has so many different tokens."""
    tokens = list(range(prompt)) if isinstance(prompt, int) else prompt
    return Request(request_id=name, prompt_token_ids=tokens, max_tokens=max_tokens, **options)


def scheduler_of(**changes) -> Scheduler:
    """A roomy scheduler with pages of 4 tokens, with these options changed."""
    options = {"num_pages": 64, "page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100}
    return Scheduler(**{**options, **changes})


def content(before: int, token: int) -> int:
    """What one position holds, given the position before it."""
    return hash((before, token))


def outputs_alone(request: Request, max_model_len: int) -> tuple[list[int], str]:
    """The outputs and finish reason the request has when nothing else runs, without any scheduler."""
    state = hash((request.cache_domain,))
    for token in request.prompt_token_ids:
        state = content(state, token)
    outputs: list[int] = []
    while True:
        token = state % VOCABULARY
        outputs.append(token)
        state = content(state, token)
        is_ending = token in request.eos_token_ids or token in request.stop_token_ids
        if is_ending and len(outputs) >= request.min_tokens:
            return outputs, "stop"
        if len(outputs) == request.max_tokens or len(outputs) + len(request.prompt_token_ids) == max_model_len:
            return outputs, "length"


class FakeDevice:
    """Page tables, pages and last drawn tokens, changed by plans in the order they are run.

    tables: page tables of layers without and with a window.
    """

    def __init__(self, page_size: int, window: int | None, tables: tuple[int, int]) -> None:
        self.page_size = page_size
        self.window = window
        self.num_full, self.num_tables = tables[0], sum(tables)
        self.tables: dict[int, list[list[int]]] = {}  # of each slot, by number
        self.store: dict[int, list[tuple[int, int] | None]] = {}  # page -> table and content of its positions
        self.last_drawn: dict[int, int] = {}
        self._expected: dict[Request, list[int]] = {}  # content of every position with a known token

    def run(self, plan: StepPlan) -> list[int]:
        """Runs the step; one token per row, a meaningless one where the row does not sample."""
        for request in plan.placed:
            assert request.slot is not None
            self.tables[request.slot] = [[] for _ in range(self.num_tables)]
            self.last_drawn.pop(request.slot, None)
        for number, slot, first, pages in plan.page_updates:
            table = self.tables[slot][number]
            if set(pages) == {NO_PAGE}:
                if first < len(table):  # else somebody else is in the slot now
                    table[first : first + len(pages)] = pages
                continue
            assert first == len(table), "page updates leave a gap or overwrite"
            table += pages
        assert len(set(plan.slots)) == len(plan.slots)
        tokens, offset = [], 0
        for row, length in enumerate(plan.lengths):
            ids = plan.token_ids[offset : offset + length]
            tokens.append(self._run_row(plan, row, ids))
            offset += length
        assert offset == len(plan.token_ids)
        return tokens

    def _run_row(self, plan: StepPlan, row: int, ids: list[int]) -> int:
        request, tables, position = plan.requests[row], self.tables[plan.slots[row]], plan.starts[row]
        for number, table in enumerate(tables):
            self._check_reads(request, number, table, position)
        state = self._at(tables, position - 1) if position else hash((request.cache_domain,))
        for token in ids:
            known = self.last_drawn[plan.slots[row]] if token == IN_FLIGHT_TOKEN else token
            state = content(state, known)
            for number, table in enumerate(tables):
                page = table[position // self.page_size]
                self.store.setdefault(page, [None] * self.page_size)[position % self.page_size] = (number, state)
            position += 1
        if not plan.samples[row]:
            return -99
        self.last_drawn[plan.slots[row]] = state % VOCABULARY
        return self.last_drawn[plan.slots[row]]

    def _check_reads(self, request: Request, number: int, table: list[int], end: int) -> None:
        """Asserts that every position before `end` that the token there sees and whose token is known holds what this
        request put there."""
        expected = self._expected.setdefault(request, [])
        for token in request.token_ids[len(expected) :]:
            expected.append(content(expected[-1] if expected else hash((request.cache_domain,)), token))
        is_full = number < self.num_full
        num_left = 0 if is_full else request.num_left_pages
        assert table[:num_left] == [NO_PAGE] * num_left
        lowest = 0 if is_full or self.window is None else max(0, end + 1 - self.window)
        end = min(end, len(expected))
        for index in range(lowest // self.page_size, -(-end // self.page_size)):
            states = expected[index * self.page_size : min(end, (index + 1) * self.page_size)]
            assert table[index] != NO_PAGE, f"{request.request_id} reads a page that was freed"
            found = self.store[table[index]][: len(states)]
            assert found == [(number, state) for state in states], f"{request.request_id} reads a wrong page"

    def _at(self, tables: list[list[int]], position: int) -> int:
        stored = self.store[tables[0][position // self.page_size]][position % self.page_size]
        assert stored is not None
        return stored[1]


class Loop:
    """Schedules, runs and commits with `overlap` plans in flight, checking every plan on the way."""

    def __init__(
        self,
        scheduler: Scheduler,
        page_size: int,
        overlap: int,
        window: int | None = None,
        tables: tuple[int, int] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.device = FakeDevice(page_size, window, tables or ((1, 0) if window is None else (0, 1)))
        self.overlap = overlap
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.plans: list[StepPlan] = []
        self.events: list[TokenEvent] = []

    def schedule(self) -> StepPlan | None:
        """One more plan, run on the device."""
        plan = self.scheduler.schedule()
        if plan is not None:
            check_plan(plan)
            self.plans.append(plan)
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def commit(self) -> list[TokenEvent]:
        """Commits the oldest plan."""
        events = self.scheduler.commit(*self.in_flight.popleft())
        self.events += events
        return events

    def step(self) -> list[TokenEvent]:
        """What an engine does: keep `overlap` plans ahead, then commit one."""
        plan = self.schedule()
        if self.in_flight and (plan is None or len(self.in_flight) > self.overlap):
            return self.commit()
        assert plan is not None or not self.scheduler.has_work, "nothing to run and nothing in flight, yet unfinished"
        return []

    def drain(self, max_steps: int = 5000) -> None:
        """Steps until everybody finished."""
        for count in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
            if count % 4 == 0:
                self.scheduler.check_invariants()
        raise AssertionError("the scheduler makes no progress")


def check_plan(plan: StepPlan) -> None:
    """Asserts what every plan promises: row order, parallel lists, sampling rows, tokens in flight."""
    singles = plan.num_single_rows
    assert all(length == 1 for length in plan.lengths[:singles])
    assert all(length > 1 for length in plan.lengths[singles:])
    rows = len(plan.requests)
    assert [len(plan.slots), len(plan.starts), len(plan.lengths), len(plan.samples)] == [rows] * 4
    assert plan.num_tokens == sum(plan.lengths) == len(plan.token_ids)
    offset = 0
    for row, request in enumerate(plan.requests):
        ids = plan.token_ids[offset : offset + plan.lengths[row]]
        end = plan.starts[row] + len(ids)
        known = request.token_ids[plan.starts[row] : end]
        expected = known + [IN_FLIGHT_TOKEN] * (len(ids) - len(known))
        assert ids == expected
        assert expected.count(IN_FLIGHT_TOKEN) <= 1
        assert IN_FLIGHT_TOKEN not in ids or request.num_draws_in_flight - plan.samples[row] >= 1
        assert plan.samples[row] == (end == len(request.token_ids) + request.num_draws_in_flight - plan.samples[row])
        assert end < request.max_total_tokens
        offset += len(ids)
