"""The engine: schedule, dispatch, fetch, commit. One thread calls it; it knows token ids, no text."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

from jaxserve.engine.executor import Executor, InFlight, StepResult, row_of
from jaxserve.engine.pooling import PooledPrompt
from jaxserve.engine.requests import (
    EmbeddingEvent,
    EngineEvent,
    EngineRequest,
    TopTokens,
    fresh_seed,
    sample_seed,
    top_tokens,
)
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Request, Scheduler, SchedulerStats, StepPlan, TokenEvent


class Schedules(Protocol):
    """What an engine asks of its scheduler about requests; of the schedulers of several groups too."""

    def check(self, request: Request) -> None: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> bool: ...

    @property
    def has_work(self) -> bool: ...

    def stats(self) -> SchedulerStats: ...

    def check_invariants(self) -> None: ...


class Engine:
    """Requests in, events out, one step at a time.

    With overlap, step n + 1 is dispatched before the tokens of step n are read: a running request's next input is
    taken from the device, and `in_flight` is the one step that is not read yet.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, overlap: bool, seed: int) -> None:
        self.scheduler: Schedules = scheduler
        self.executor = executor
        self._scheduler = scheduler
        self._overlap = overlap
        self._seed = seed
        self._serials = itertools.count()
        self._in_flight: Any = None
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0

    def request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        index: int = 0,
        priority: int = 0,
        cache_domain: tuple[str, ...] = (),
        pooling: Pooling | None = None,
    ) -> Request:
        """One choice of a request, checked and ready to be added. Any thread may call it.

        pooling: the request is for an embedding. It runs as one that draws a single token, which nobody is told; it
        does not read the prefix cache, which holds no hidden states.
        Raises PromptTooLong when it can never run.
        """
        seed = fresh_seed(self._seed, next(self._serials)) if params.seed is None else sample_seed(params.seed, index)
        wants_prompt = params.prompt_logprobs is not None and index == 0
        prompt_logprobs: list[TopTokens | None] | None = None
        if wants_prompt:
            prompt_logprobs = [None for _ in prompt_token_ids]
        pooled = None if pooling is None else PooledPrompt(pooling=pooling)
        payload = EngineRequest(params=params, seed=seed, prompt_logprobs=prompt_logprobs, pooled=pooled)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else eos_token_ids,
            stop_token_ids=frozenset(params.stop_token_ids or ()),
            priority=priority,
            cache_domain=cache_domain,
            reads_prefix_cache=not wants_prompt and pooling is None,
            payload=payload,
        )
        self.scheduler.check(request)
        return request

    def add(self, request: Request) -> None:
        """Queues what `request` made."""
        self.scheduler.add(request)
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> bool:
        """Ends a request in any phase; False when it is not known (any more)."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._in_flight is not None or self.scheduler.has_work

    def step(self) -> list[EngineEvent]:
        """One step: what became known in it."""
        dispatched = self._dispatch()
        if self._overlap:
            dispatched, self._in_flight = self._in_flight, dispatched
        if dispatched is None:
            return []
        self.num_steps += 1
        return self._finish(dispatched)

    def _dispatch(self) -> Any:
        """What was started on the device; None when there is nothing to compute."""
        plan = self._scheduler.schedule()
        return self.executor.dispatch(plan) if plan is not None else None

    def _finish(self, dispatched: InFlight) -> list[EngineEvent]:
        result = self.executor.fetch(dispatched)
        return self._told(dispatched.plan, result, self._scheduler.commit(dispatched.plan, result.token_ids))

    def _told(self, plan: StepPlan, result: StepResult, events: Sequence[TokenEvent]) -> list[EngineEvent]:
        if result.prompt_logprobs is not None:
            _keep_prompt_logprobs(plan, result)
        told = []
        for event in events:
            self.num_generated_tokens += len(event.token_ids)
            told.append(self._event(plan, result, event))
        return told if result.pooled is None else self._with_embeddings(plan, result, events, told)

    def _with_embeddings(
        self, plan: StepPlan, result: StepResult, events: Sequence[TokenEvent], told: list[EngineEvent]
    ) -> list[EngineEvent]:
        """The events of a step in which prompts were pooled: those of embedding requests carry vectors, no tokens."""
        _keep_pooled(plan, result)
        for index, event in enumerate(events):
            payload = event.request.payload
            assert isinstance(payload, EngineRequest)
            if payload.pooled is not None:
                self.num_generated_tokens -= len(event.token_ids)
                told[index] = _embedding_event(told[index], payload.pooled)
        return told

    def _event(self, plan: StepPlan, result: StepResult, event: TokenEvent) -> EngineEvent:
        request, payload = event.request, event.request.payload
        assert isinstance(payload, EngineRequest)
        if event.token_ids[-1] < 0:  # NaN logits: nothing could be drawn
            self.scheduler.abort(request.request_id)
            return EngineEvent(request_id=request.request_id, token_ids=(), finish_reason="error")
        is_first = len(request.token_ids) - len(event.token_ids) == len(request.prompt_token_ids)
        return EngineEvent(
            request_id=request.request_id,
            token_ids=event.token_ids,
            logprobs=_logprobs(plan, result, event, payload.params.logprobs),
            finish_reason=event.finish_reason,
            stop_reason=event.stop_reason,
            num_cached_tokens=request.num_cached_tokens,
            prompt_logprobs=payload.prompt_logprobs if is_first else None,
        )

    def close(self) -> None:
        """Drops the step in flight and gives the device memory back."""
        self._in_flight = None
        self.executor.close()


def _embedding_event(end: EngineEvent, prompt: PooledPrompt) -> EngineEvent:
    """The end of an embedding request: its vector, or an error where that is not finite."""
    pooled = prompt.vector()
    if end.finish_reason == "error" or not all(map(math.isfinite, pooled)):
        return EngineEvent(request_id=end.request_id, token_ids=(), finish_reason="error")
    return EmbeddingEvent(request_id=end.request_id, token_ids=(), finish_reason="stop", pooled=pooled)


def _logprobs(plan: StepPlan, result: StepResult, event: TokenEvent, count: int | None) -> tuple[TopTokens, ...] | None:
    if count is None or result.logprobs is None:
        return None
    found = result.logprobs
    arrays = (found.chosen, found.rank, found.top_ids, found.top_logprobs)
    at = row_of(plan, result.shape, event.row)
    return tuple(top_tokens(token, arrays, at, count) for token in event.token_ids)  # type: ignore[arg-type]


def _keep_pooled(plan: StepPlan, result: StepResult) -> None:
    """Adds a step's pooled hidden states to the requests they are of."""
    assert result.pooled is not None
    for row, request in enumerate(plan.requests):
        payload = request.payload
        assert isinstance(payload, EngineRequest)
        if payload.pooled is not None:
            payload.pooled.add(result.pooled[row_of(plan, result.shape, row)], plan.starts[row], plan.lengths[row])


def _keep_prompt_logprobs(plan: StepPlan, result: StepResult) -> None:
    """Files a step's prompt log probabilities under the positions of the tokens they are about."""
    found = result.prompt_logprobs
    assert found is not None
    arrays = (found.chosen, found.rank, found.top_ids, found.top_logprobs)
    chunk_token = result.shape.single_rows
    for row, request in enumerate(plan.requests):
        length, start = plan.lengths[row], plan.starts[row]
        first = row if row < plan.num_single_rows else chunk_token
        chunk_token += length if row >= plan.num_single_rows else 0
        payload = request.payload
        assert isinstance(payload, EngineRequest)
        if payload.prompt_logprobs is None:
            continue
        count = payload.params.prompt_logprobs or 0
        for position in range(start + 1, min(start + length + 1, len(request.prompt_token_ids))):
            token = request.prompt_token_ids[position]
            at = first + position - 1 - start
            payload.prompt_logprobs[position] = top_tokens(token, arrays, at, count)  # type: ignore[arg-type]
