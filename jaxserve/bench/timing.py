"""Requests run on a frontend, and when each of their tokens arrived. One clock: time.perf_counter, in seconds."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.workload import Planned, sampling
from jaxserve.sampling_params import SamplingParams


@runtime_checkable
class Submits(Protocol):
    """The part of a Frontend that runs requests."""

    def submit(self, prompt_token_ids: list[int], params: SamplingParams) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTiming:
    """One request that succeeded. arrivals: when each increment came, in order, at least one."""

    sent: float
    arrivals: tuple[float, ...]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0

    @property
    def first_token_seconds(self) -> float:
        """TTFT: from sending to the first increment."""
        return self.arrivals[0] - self.sent

    @property
    def total_seconds(self) -> float:
        """E2E: from sending to the last increment."""
        return self.arrivals[-1] - self.sent

    @property
    def seconds_per_output_token(self) -> float | None:
        """TPOT: mean over the tokens after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.arrivals[-1] - self.arrivals[0]) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """ITL: seconds between successive increments."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)
class BatchTiming:
    """Requests that were submitted together, and the seconds until the last one ended."""

    requests: list[RequestTiming]
    seconds: float

    @property
    def num_output_tokens(self) -> int:
        """Of all requests."""
        return sum(request.num_output_tokens for request in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def output_tokens_per_second(self) -> float:
        """Generated tokens over the whole time, prefill included."""
        return self.num_output_tokens / self.seconds


def run_together(frontend: Submits, requests: Sequence[Planned]) -> BatchTiming:
    """Submits all requests at once and waits for all. Raises BenchmarkFailed where one ends early."""
    return asyncio.run(_run_together(frontend, requests))


async def _run_together(frontend: Submits, requests: Sequence[Planned]) -> BatchTiming:
    start = time.perf_counter()
    timings = await asyncio.gather(*(_run_one(frontend, request) for request in requests))
    return BatchTiming(requests=list(timings), seconds=time.perf_counter() - start)


async def _run_one(frontend: Submits, request: Planned) -> RequestTiming:
    sent = time.perf_counter()
    generation = frontend.submit(request.prompt_token_ids, sampling(request.output_len))
    arrivals, num_tokens, reason = [], 0, None
    try:
        async for delta in generation:
            arrivals.append(time.perf_counter())
            num_tokens += len(delta.token_ids)
            reason = delta.finish_reason
    finally:
        generation.abort()  # of no effect on a finished one
    if num_tokens != request.output_len:
        raise BenchmarkFailed(
            f"a request gave {num_tokens:,} tokens instead of {request.output_len:,} (finish_reason {reason})"
        )
    return RequestTiming(
        sent=sent,
        arrivals=tuple(arrivals),
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=num_tokens,
        num_cached_tokens=generation.num_cached_tokens,
    )
