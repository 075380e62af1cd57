"""Decides which tokens run in each step, and records what came of it. Nothing else writes request state.

schedule() may run ahead of commit() by any number of steps; plans are committed in the order they were scheduled.

Order within a step: requests that lack one token (decodes), then running prompts, then waiting requests; each group
by rank, which is (priority, arrival).

Pages. A running request that finds no page preempts the worst running request, if that is worse than itself; the
worst one waits in place (it keeps its work) unless it runs alone. A preempted request loses all pages and later
computes its tokens again, as far as the prefix cache does not supply them. Pages and slot of a request that left
`running` while a step in flight refers to it are given back when the last such step commits; until then nobody else
is preempted, because that may be room enough.

Admission. The best waiting request goes first and nobody passes it. It gets pages for its first chunk only, but is
admitted only when all its known tokens would fit beside what the prompts under way still need and a watermark of 1%
of the pages; with nothing running it only has to fit. If it does not fit, or no slot is left, running requests of
strictly worse priority are preempted for it, worst first, provided that this can give enough pages.

Windows. A page of layers that see a token and the window - 1 before it is given back at the commit after which no
token to come sees it, and never are more taken than a window and two chunks need (page_need.py): a request that has
so many waits for its step in flight. Where other layers see all tokens, all page tables grow together by a column.

Progress. The best request of all is never preempted (unless it runs alone and then fits anew), and when it stalls no
worse request is admitted; each step it stalls, a worse one has left or is leaving. So it ends, and then the next best.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

from jaxserve.errors import InvalidRequest
from jaxserve.scheduler.page_need import sequence_need
from jaxserve.scheduler.placement import Placement
from jaxserve.scheduler.prefix_cache import Node
from jaxserve.scheduler.request import Request, SchedulerFinishReason, Status, check_fits
from jaxserve.scheduler.stats import SchedulerStats
from jaxserve.scheduler.step_plan import IN_FLIGHT_TOKEN, PageUpdate, StepDraft, StepPlan, TokenEvent

_rank = attrgetter("rank")


class Scheduler:
    """Continuous batching over a fixed set of slots and pages.

    max_prefills_per_step limits rows of more than one token; max_prefill_chunk limits their length. window: the widest
    of the layers' windows. tables: page tables of layers without and with a window; None where all share one.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_prefills_per_step: int = 16,
        max_prefill_chunk: int | None = None,
        enable_prefix_caching: bool = True,
        window: int | None = None,
        tables: tuple[int, int] | None = None,
    ) -> None:
        limits = (num_pages, page_size, max_num_seqs, max_num_batched_tokens, max_model_len, max_prefills_per_step)
        self._max_prefill_chunk = max_num_batched_tokens if max_prefill_chunk is None else max_prefill_chunk
        assert min(*limits, self._max_prefill_chunk) >= 1, "every limit of the scheduler is at least 1"
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._max_prefills_per_step = max_prefills_per_step
        self._watermark_pages = max(1, num_pages // 100)
        self._placement = Placement(
            num_pages=num_pages,
            need=sequence_need(window, page_size, self._max_prefill_chunk, tables),
            num_slots=max_num_seqs,
            caches_prefixes=enable_prefix_caching,
        )
        self._pool = self._placement.pool
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # sorted by rank, as is _running
        self._running: list[Request] = []
        self._draining: set[Request] = set()  # left running, but a step in flight still refers to them
        self._in_flight: deque[StepPlan] = deque()
        self._page_updates: list[PageUpdate] = []  # for the next plan
        self._num_steps = 0
        self._num_arrivals = 0
        self._num_preemptions = 0
        self._prefix_queried_tokens = 0
        self._prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished or a plan uncommitted."""
        return bool(self._requests or self._in_flight)

    @property
    def num_running(self) -> int:
        """Requests that hold a slot and take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not running yet, or preempted."""
        return len(self._waiting)

    def stats(self) -> SchedulerStats:
        """The counters, for metrics."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_preemptions=self._num_preemptions,
            prefix_queried_tokens=self._prefix_queried_tokens,
            prefix_hit_tokens=self._prefix_hit_tokens,
            num_left_pages=self._placement.num_left_pages,
            num_free_pages=self._pool.num_free,
            num_cached_pages=self._pool.num_cached,
            num_running_pages=self._pool.num_running,
            num_total_pages=self._pool.num_pages,
        )

    def add(self, request: Request) -> None:
        """Queues the request. Raises InvalidRequest for one that can never run or whose id is in use."""
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request id {request.request_id!r} is already in use; choose another or wait for its end",
                param="request_id",
            )
        self.check(request)
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.rank = (request.priority, request.arrival)
        request.max_total_tokens = min(len(request.token_ids) + request.max_tokens, self._max_model_len)
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=_rank)

    def check(self, request: Request) -> None:
        """Raises InvalidRequest or PromptTooLong for a request that could never run; any thread may ask."""
        max_model_len = self._max_model_len
        check_fits(request, max_model_len=max_model_len, num_cache_tokens=self._placement.most_tokens(max_model_len))

    def abort(self, request_id: str) -> bool:
        """Ends the request at once, without further events. False: no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, "abort")
        return True

    def reset_prefix_cache(self) -> int:
        """Bars everything computed so far from being matched; number of pages that became free."""
        return self._placement.reset_cache()

    def schedule(self) -> StepPlan | None:
        """The next step. None: nothing can run before a plan in flight commits, or nothing is left."""
        draft = StepDraft(self._max_num_batched_tokens, self._max_prefills_per_step, page_updates=self._page_updates)
        prefilling = self._add_decodes(draft)
        for request in prefilling:
            if request.status is Status.RUNNING:  # not preempted for a better one in this very step
                self._add_prefill(request, draft)
        self._admit(draft)
        plan = draft.plan(self._num_steps)
        if plan is not None:
            self._num_steps += 1
            self._page_updates = []
            self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[TokenEvent]:
        """Records the step; tokens[i] is what row i drew (ignored where it does not sample)."""
        assert plan is self._in_flight.popleft(), "plans are committed in the order they were scheduled"
        events: list[TokenEvent] = []
        finished, running = Status.FINISHED, Status.RUNNING
        rows = zip(plan.requests, plan.starts, plan.lengths, plan.samples, tokens, strict=True)
        for row, (request, start, length, samples, token) in enumerate(rows):
            request.num_in_flight_steps -= 1
            request.num_draws_in_flight -= samples
            if request.status is not finished:
                request.num_computed_tokens = computed = start + length
                if computed >= request.next_cached_at:
                    self._placement.cache_full_pages(request)
                if computed >= request.next_left_at:
                    self._page_updates += self._placement.free_left_pages(request)
                if samples:
                    token_ids = request.token_ids
                    token_ids.append(token)
                    event = TokenEvent(request, row, (token,))
                    events.append(event)
                    if len(token_ids) >= request.max_total_tokens or token in request.ending_token_ids:
                        self._end_if_due(request, token, event)
            if request.status is not running and not request.num_in_flight_steps:
                self._release(request)
        return events

    def _add_decodes(self, draft: StepDraft) -> list[Request]:
        """Adds a row for each running request that lacks one token; returns those that lack more."""
        prefilling: list[Request] = []
        rows, tokens_left = draft.singles, draft.tokens_left
        running, page_size = Status.RUNNING, self._placement.page_size
        requests, starts, samples, ids = rows.requests, rows.starts, rows.samples, rows.token_ids
        for request in tuple(self._running):
            token_ids = request.token_ids
            start = request.num_scheduled_tokens
            total = len(token_ids) + request.num_draws_in_flight
            if total >= request.max_total_tokens or request.status is not running:
                continue  # its last token is in flight, or it was preempted a moment ago
            if start + 1 < total:
                prefilling.append(request)
                continue
            if not tokens_left:
                break
            if start == request.num_columns * page_size and not self._grow(request, draft):
                continue
            tokens_left -= 1
            requests.append(request)
            starts.append(start)
            samples.append(True)
            ids.append(IN_FLIGHT_TOKEN if request.num_draws_in_flight else token_ids[start])
            request.num_scheduled_tokens = total
            request.num_in_flight_steps += 1
            request.num_draws_in_flight += 1
        rows.lengths += [1] * len(requests)
        draft.tokens_left = tokens_left
        return prefilling

    def _grow(self, request: Request, draft: StepDraft) -> bool:
        """Gives the request one more column of pages. False: it stalls, or its step in flight has to free some."""
        if self._placement.room(request) < 1:
            return False
        if not self._make_room(request):
            draft.stall(request)
            return False
        self._give_columns(request, 1, draft)
        return True

    def _add_prefill(self, request: Request, draft: StepDraft) -> None:
        """Adds the next chunk of a running prompt, as long as limits and pages allow."""
        start = request.num_scheduled_tokens
        page_size = self._placement.page_size
        held = request.num_columns * page_size - start
        length = min(len(request.token_ids) - start, draft.tokens_left, self._max_prefill_chunk)
        length = min(length, held + self._placement.room(request) * page_size)
        if not length or (length > 1 and not draft.prefills_left):
            self._promise_rest(request, draft)
            return
        if not held and not self._make_room(request):
            draft.stall(request)
            return
        length = min(length, held + self._pool.num_available // self._placement.column_pages * page_size)
        self._give_columns(request, self._placement.columns_for(start + length) - request.num_columns, draft)
        self._add_known(request, length, draft)

    def _add_known(self, request: Request, length: int, draft: StepDraft) -> None:
        start = request.num_scheduled_tokens
        samples = start + length == len(request.token_ids)
        draft.add(request, start, length, samples)
        request.num_scheduled_tokens = start + length
        request.num_in_flight_steps += 1
        request.num_draws_in_flight += samples
        self._promise_rest(request, draft)

    def _promise_rest(self, request: Request, draft: StepDraft) -> None:
        draft.promised_pages += self._placement.lacking(request)

    def _give_columns(self, request: Request, num_columns: int, draft: StepDraft) -> None:
        if num_columns:
            draft.page_updates += self._placement.grow(request, num_columns)

    def _admit(self, draft: StepDraft) -> None:
        """Moves waiting requests, best first, into slots while limits and pages allow."""
        waiting = self._waiting
        while waiting and draft.tokens_left and draft.prefills_left:
            best = waiting[0]
            if best.num_in_flight_steps or (draft.best_stalled is not None and draft.best_stalled < best.rank):
                return
            if not self._place(best, draft) and not self._preempt_worse_priority(best):
                return

    def _place(self, request: Request, draft: StepDraft) -> bool:
        """Puts the request into a slot and adds its first chunk. False: no slot, or it would not fit."""
        if not self._placement.has_free_slot:
            return False
        reserve = self._watermark_pages + draft.promised_pages if self._running else 0
        room = self._pool.num_available - reserve
        if self._running and room < request.room_wanted:
            return False
        path = self._placement.match(request)
        lacking = self._placement.lacking_beside(path, request) + reserve - self._pool.num_available
        if lacking > 0:
            self._placement.give_up(path)
            # A blocked request is not matched again every step: that costs time in proportion to its prompt.
            request.room_wanted = room + lacking
            return False
        self._start(request, path, draft)
        return True

    def _start(self, request: Request, path: list[Node], draft: StepDraft) -> None:
        del self._waiting[0]
        insort(self._running, request, key=_rank)
        request.status = Status.RUNNING
        self._placement.put(request, path)
        cached = request.num_computed_tokens
        if not request.num_admissions:
            self._count_prefix_hit(request, cached)
        request.num_admissions += 1
        length = min(len(request.token_ids) - cached, draft.tokens_left, self._max_prefill_chunk)
        length = min(length, self._placement.room(request) * self._placement.page_size)
        self._placement.grow(request, self._placement.columns_for(cached + length) - request.num_columns)
        draft.page_updates += self._placement.updates_from(request, 0)
        draft.placed.append(request)
        self._add_known(request, length, draft)

    def _count_prefix_hit(self, request: Request, cached: int) -> None:
        request.num_cached_tokens = cached
        if self._placement.reads_cache(request):
            self._prefix_queried_tokens += len(request.token_ids)
            self._prefix_hit_tokens += cached

    def _make_room(self, request: Request) -> bool:
        """Preempts requests worse than this one until a column is available. False: it has to wait."""
        while self._pool.num_available < self._placement.column_pages:
            worst = self._running[-1]
            # Alone, its own step in flight may set pages free: it waits for that.
            if self._draining or (worst is request and (len(self._running) > 1 or request.num_in_flight_steps)):
                return False
            self._preempt(worst)
            if worst is request:
                # Alone and out of pages: it holds equal pages twice (see prefix_cache.py). Starting anew frees them.
                return False
        return True

    def _preempt_worse_priority(self, request: Request) -> bool:
        """Preempts the worst running request for a waiting one of better priority. False: not allowed or no use."""
        if self._draining or not self._running or self._running[-1].priority <= request.priority:
            return False
        if self._placement.has_free_slot:
            worse = [other for other in self._running if other.priority > request.priority]
            reclaimable = sum(map(self._placement.num_pages_of, worse))
            if self._pool.num_available + reclaimable < request.room_wanted:
                return False
        self._preempt(self._running[-1])
        return True

    def _preempt(self, request: Request) -> None:
        self._remove(self._running, request)
        insort(self._waiting, request, key=_rank)
        request.status = Status.WAITING
        request.room_wanted = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._retire(request)

    def _end_if_due(self, request: Request, token: int, event: TokenEvent) -> None:
        """Ends the request if its newest token does, and says so in the event."""
        if token in request.ending_token_ids and request.num_output_tokens >= request.min_tokens:
            event.finish_reason = "stop"
            event.stop_reason = None if token in request.eos_token_ids else token
        elif len(request.token_ids) >= request.max_total_tokens:
            event.finish_reason = "length"
        else:
            return
        self._end(request, event.finish_reason)

    def _end(self, request: Request, reason: SchedulerFinishReason) -> None:
        del self._requests[request.request_id]
        self._remove(self._running if request.status is Status.RUNNING else self._waiting, request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._retire(request)

    def _retire(self, request: Request) -> None:
        """Gives back slot and pages, now or when the last step in flight that refers to them commits."""
        if request.num_in_flight_steps:
            self._draining.add(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._draining.discard(request)
        self._placement.remove(request)

    @staticmethod
    def _remove(requests: list[Request], request: Request) -> None:
        index = bisect_left(requests, request.rank, key=_rank)
        assert requests[index] is request
        del requests[index]

    def check_invariants(self) -> None:
        """Asserts that every page, slot and request is accounted for exactly once; for tests, slow."""
        assert self._running == sorted(self._running, key=_rank)
        assert self._waiting == sorted(self._waiting, key=_rank)
        assert all(request.status is Status.RUNNING and request.slot is not None for request in self._running)
        assert all(request.status is Status.WAITING for request in self._waiting)
        assert all(request.num_in_flight_steps and request.slot is not None for request in self._draining)
        assert {*self._running, *self._waiting} == set(self._requests.values())
        placed = [*self._running, *self._draining]
        assert len(set(placed)) == len(placed)
        assert all(request in self._draining for request in self._waiting if request.slot is not None)
        in_flight = [request for plan in self._in_flight for request in plan.requests]
        assert all(in_flight.count(request) == request.num_in_flight_steps for request in placed)
        self._placement.check_invariants(placed)
