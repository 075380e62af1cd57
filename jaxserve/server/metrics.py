"""Prometheus metrics with vLLM's names under the prefix `jaxserve:`, in a registry of their own.

Engine figures are read from one stats snapshot per scrape; latencies and HTTP counts are observed by the server.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.outputs import TextDelta

_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_PER_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


@runtime_checkable
class EngineCounters(Protocol):
    """The snapshot a frontend gives; `_total` are sums since start."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def total_pages(self) -> int: ...
    @property
    def running_pages(self) -> int: ...
    @property
    def prompt_tokens_total(self) -> int: ...
    @property
    def generation_tokens_total(self) -> int: ...
    @property
    def prefix_queried_tokens_total(self) -> int: ...
    @property
    def prefix_hit_tokens_total(self) -> int: ...
    @property
    def preemptions_total(self) -> int: ...
    @property
    def left_pages_total(self) -> int: ...
    @property
    def requests_finished_total(self) -> Mapping[str, int]: ...
    @property
    def compiles_after_ready_total(self) -> int: ...


class EngineCollector(Collector):
    """The engine's gauges and counters, read when a scrape asks."""

    def __init__(self, model_name: str, read_stats: Callable[[], EngineCounters]) -> None:
        self._model_name = model_name
        self._read_stats = read_stats

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read the engine."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One metric family per figure."""
        stats = self._read_stats()
        for name, help_text, value in _gauges(stats):
            gauge = GaugeMetricFamily(f"jaxserve:{name}", help_text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, help_text, value in _counters(stats):
            counter = CounterMetricFamily(f"jaxserve:{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
        finished = CounterMetricFamily(
            "jaxserve:request_success", "Finished requests by reason.", labels=["model_name", "finished_reason"]
        )
        for reason, count in stats.requests_finished_total.items():
            finished.add_metric([self._model_name, reason], count)
        yield finished


def _gauges(stats: EngineCounters) -> tuple[tuple[str, str, float | int], ...]:
    used = stats.running_pages / stats.total_pages if stats.total_pages else 0.0
    return (
        ("num_requests_running", "Requests in the running batch.", stats.num_running),
        ("num_requests_waiting", "Requests waiting to run.", stats.num_waiting),
        ("kv_cache_usage_perc", "KV cache pages held by running requests; 1 means all.", used),
    )


def _counters(stats: EngineCounters) -> tuple[tuple[str, str, float | int], ...]:
    return (
        ("prompt_tokens", "Prompt tokens of all requests.", stats.prompt_tokens_total),
        ("generation_tokens", "Generated tokens.", stats.generation_tokens_total),
        ("num_preemptions", "Requests put back to waiting for want of pages.", stats.preemptions_total),
        ("num_window_pages_freed", "KV cache pages that left the window of a sequence.", stats.left_pages_total),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens_total),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens_total),
        ("compiles_after_ready", "Programs compiled while serving: a defect.", stats.compiles_after_ready_total),
    )


class KernelCollector(Collector):
    """Which kernels serve, and whether they are second choice: what start-up decided (the effective configuration)."""

    def __init__(self, model_name: str, choices: Mapping[str, Mapping[str, Any]]) -> None:
        self._model_name = model_name
        self._values = {name: str(choice["value"]) for name, choice in choices.items()}

    def describe(self) -> list[Metric]:
        """Nothing, as for the engine's."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One info, and one counter that has a sample where CPU kernels were to be had by default and could not."""
        if "kernels" in self._values:
            info = InfoMetricFamily("jaxserve:kernels", "Kernels in use.", labels=["model_name"])
            level = self._values.get("cpu_level", "")
            info.add_metric([self._model_name], {"kernels": self._values["kernels"], "level": level})
            yield info
        fallbacks = CounterMetricFamily(
            "jaxserve:kernel_fallbacks",
            "Starts without CPU kernels, by what they lack.",
            labels=["model_name", "reason"],
        )
        if "kernel_fallback" in self._values:
            fallbacks.add_metric([self._model_name, self._values["kernel_fallback"]], 1)
        yield fallbacks


@runtime_checkable
class ServedExperts(Protocol):
    """The experts of a served mixture (jaxserve/frontend/experts.py)."""

    def load(self) -> Any:
        """layers [L], tokens [L, E], device_tokens [L, D], imbalance [L]."""
        ...

    def rebalance(self) -> Any:
        """moved, imbalance_before [L], imbalance_after [L]."""
        ...


class ExpertCollector(Collector):
    """Tokens of each expert of a mixture, and how evenly its devices share them."""

    def __init__(self, model_name: str, experts: ServedExperts) -> None:
        self._model_name, self._experts = model_name, experts

    def describe(self) -> list[Metric]:
        """Nothing, as for the engine's."""
        return []

    def collect(self) -> Iterator[Metric]:
        """A counter for each layer and expert, and a gauge for each layer; nothing of an engine that is gone."""
        try:
            report = self._experts.load()
        except JaxserveError:
            return
        tokens = CounterMetricFamily(
            "jaxserve:expert_tokens", "Tokens routed to an expert.", labels=["model_name", "layer", "expert"]
        )
        imbalance = GaugeMetricFamily(
            "jaxserve:expert_imbalance",
            "Tokens of a layer's busiest device over the mean.",
            labels=["model_name", "layer"],
        )
        for layer, counts, ratio in zip(report.layers, report.tokens.tolist(), report.imbalance.tolist(), strict=True):
            imbalance.add_metric([self._model_name, str(layer)], ratio)
            for expert, count in enumerate(counts):
                tokens.add_metric([self._model_name, str(layer), str(expert)], count)
        yield tokens
        yield imbalance


class ServerMetrics:
    """Latencies and HTTP counts of one app, and the registry that a scrape renders."""

    def __init__(
        self,
        model_name: str,
        read_stats: Callable[[], EngineCounters],
        choices: Mapping[str, Mapping[str, Any]],
        experts: ServedExperts | None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, read_stats))
        if experts is not None:
            self.registry.register(ExpertCollector(model_name, experts))
        self.registry.register(KernelCollector(model_name, choices))
        first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_SECONDS)
        per_token = self._histogram(
            "inter_token_latency_seconds", "Time per output token after a choice's first.", _PER_TOKEN_SECONDS
        )
        request = self._histogram("e2e_request_latency_seconds", "Arrival to end of answer.", _REQUEST_SECONDS)
        # Children are looked up once: a label look-up per token would cost more than the observation.
        self.first_token = first_token.labels(model_name)
        self.per_token = per_token.labels(model_name)
        self.request = request.labels(model_name)
        self.http_requests = Counter(
            "jaxserve:http_requests", "Answered HTTP requests.", ["method", "route", "status"], registry=self.registry
        )

    def _histogram(self, name: str, help_text: str, buckets: tuple[float | int, ...]) -> Histogram:
        return Histogram(f"jaxserve:{name}", help_text, ["model_name"], buckets=buckets, registry=self.registry)


class RequestClock:
    """Times one HTTP request's tokens; started on construction."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[tuple[int, int], float] = {}
        self._is_finished = False

    def saw(self, prompt_index: int, delta: TextDelta) -> None:
        """Observes a delta's tokens; a delta without tokens only carries text and is not timed."""
        num_tokens = len(delta.token_ids)
        if not num_tokens:
            return
        now = time.perf_counter()
        choice = (prompt_index, delta.index)
        last = self._last.get(choice)
        if last is not None:
            self._metrics.per_token.observe((now - last) / num_tokens)
        elif not self._last:
            self._metrics.first_token.observe(now - self._start)
        self._last[choice] = now

    def finished(self) -> None:
        """Observes the whole request, once; not called for requests that failed or were left by their client."""
        if not self._is_finished:
            self._is_finished = True
            self._metrics.request.observe(time.perf_counter() - self._start)


class CountHttpRequests:
    """ASGI middleware: counts answers by method, route pattern and status."""

    def __init__(self, app: ASGIApp, counter: Counter) -> None:
        self._app = app
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes everything on unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _CountedSend(scope, send, self._counter))


class _CountedSend:
    def __init__(self, scope: Scope, send: Send, counter: Counter) -> None:
        self._scope = scope
        self._send = send
        self._counter = counter

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # The pattern, not the path: paths are chosen by clients and would make labels without bound.
            route = getattr(self._scope.get("route"), "path", "unmatched")
            method = self._scope["method"] if route != "unmatched" else "any"
            self._counter.labels(method, route, str(message["status"])).inc()
        await self._send(message)
