"""Load on an OpenAI-compatible server: Poisson arrivals (open loop) or fixed concurrency, and what clients saw."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from jaxserve.bench.client import Failure, complete, first_model, open_client
from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.latency import request_distributions
from jaxserve.bench.measure import percentiles, spread
from jaxserve.bench.report import Distribution, Figure, Report
from jaxserve.bench.timing import RequestTiming
from jaxserve.bench.workload import Planned, Workload, arrival_seconds
from jaxserve.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Load:
    """Where and how fast requests are sent. model: None asks the server. request_rate: per second, inf for all at
    once. max_concurrency: open requests at most; later ones wait before they are sent, and are timed from sending.

    Raises ConfigError for values that cannot work.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = None
    request_rate: float = math.inf
    max_concurrency: int | None = None
    timeout_seconds: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {self.base_url!r}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be at least 1, got {self.max_concurrency}")
        if not self.request_rate > 0:
            raise ConfigError(f"--request-rate must be above 0 or inf, got {self.request_rate}")


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What came back. late_seconds: how far behind its arrival time each request was sent."""

    model: str
    outcomes: list[RequestTiming | Failure]
    late_seconds: list[float]
    seconds: float


def bench_serve(load: Load, work: Workload, *, num_warmups: int = 1, engine: Mapping[str, Any] | None = None) -> Report:
    """Sends the workload once, after some requests that are not counted. Raises BenchmarkFailed when none succeeds.

    engine: what is known of a server that runs in this process.
    """
    requests = work.requests()
    warm_up = replace(work, num_prompts=max(1, num_warmups)).requests(-1)[:num_warmups]
    result = asyncio.run(run_load(load, requests, warm_up))
    answered = [outcome for outcome in result.outcomes if isinstance(outcome, RequestTiming)]
    failures = Counter(outcome.reason for outcome in result.outcomes if isinstance(outcome, Failure))
    if not answered:
        raise BenchmarkFailed(f"no request of {len(requests)} succeeded: {_counted(failures)}")
    late = Distribution(name="sent late", unit="ms", value=percentiles([1e3 * s for s in result.late_seconds]))
    return Report(
        title="serve",
        model={"model": result.model, "server": load.base_url} | dict(engine or {}),
        settings=work.describe() | describe_load(load),
        figures=_figures(result, answered),
        distributions=(*request_distributions(answered), late),
        notes=_notes(len(answered), failures, _num_wrong_length(result.outcomes, requests), engine is not None),
    )


async def run_load(load: Load, requests: Sequence[Planned], warm_up: Sequence[Planned]) -> LoadResult:
    """Sends every request at its time. Failures are outcomes, not errors. Raises BenchmarkFailed where the server does
    not say which model it serves."""
    arrivals = list(arrival_seconds(len(requests), load.request_rate, load.seed))
    async with open_client(load.base_url, api_key=load.api_key, timeout_seconds=load.timeout_seconds) as client:
        model = load.model or await _model_of(client, load.base_url)
        for request in warm_up:
            await complete(client, model, request)
        room = asyncio.Semaphore(load.max_concurrency or len(requests))
        late: list[float] = []
        start = time.perf_counter()

        async def send(request: Planned, at: float) -> RequestTiming | Failure:
            await asyncio.sleep(at - (time.perf_counter() - start))
            async with room:
                late.append(max(0.0, time.perf_counter() - start - at))
                return await complete(client, model, request)

        outcomes = await asyncio.gather(*(send(*each) for each in zip(requests, arrivals, strict=True)))
        seconds = time.perf_counter() - start
    return LoadResult(model=model, outcomes=list(outcomes), late_seconds=late, seconds=seconds)


async def _model_of(client: httpx.AsyncClient, base_url: str) -> str:
    try:
        return await first_model(client)
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise BenchmarkFailed(f"{base_url}/v1/models gave no model ({type(error).__name__}: {error})") from error


def _figures(result: LoadResult, answered: list[RequestTiming]) -> tuple[Figure, ...]:
    num_output = sum(timing.num_output_tokens for timing in answered)
    num_total = num_output + sum(timing.num_prompt_tokens for timing in answered)
    figures = (
        ("requests", "1/s", len(answered) / result.seconds),
        ("generated tokens", "tokens/s", num_output / result.seconds),
        ("prompt and generated tokens", "tokens/s", num_total / result.seconds),
        ("failed requests", "requests", len(result.outcomes) - len(answered)),
        ("whole run", "s", result.seconds),
    )
    return tuple(Figure(name=name, unit=unit, value=spread([float(value)])) for name, unit, value in figures)


def describe_load(load: Load) -> dict[str, Any]:
    """How requests arrive, in words, for a report."""
    rate = "inf (all at once)" if math.isinf(load.request_rate) else f"{load.request_rate:g}/s, Poisson"
    return {"request rate": rate, "max concurrency": load.max_concurrency or "unlimited"}


def _notes(num_answered: int, failures: Counter[str], num_wrong: int, is_same_process: bool) -> tuple[str, ...]:
    reasons = f": {_counted(failures)}" if failures else ""
    notes = [f"{num_answered:,} requests succeeded, {failures.total():,} failed{reasons}"]
    if num_wrong:
        notes.append(f"{num_wrong:,} answers have another length than asked for")
    if is_same_process:
        notes.append("server and clients share one process; with --base-url they do not")
    return tuple(notes)


def _num_wrong_length(outcomes: list[RequestTiming | Failure], requests: Sequence[Planned]) -> int:
    pairs = zip(outcomes, requests, strict=True)
    return sum(isinstance(o, RequestTiming) and o.num_output_tokens != r.output_len for o, r in pairs)


def _counted(failures: Counter[str]) -> str:
    return ", ".join(f"{count}x {reason}" for reason, count in failures.most_common())
