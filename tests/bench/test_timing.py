"""Times per request from arrivals, and the benchmarks of a frontend over a fake one."""

import pytest
from fake_frontend import FakeFrontend, FakeGeneration, Faults  # pyright: ignore[reportMissingImports]

from jaxserve.bench.batching import bench_batching
from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.latency import bench_latency, request_distributions
from jaxserve.bench.prefix import bench_prefix
from jaxserve.bench.throughput import bench_throughput
from jaxserve.bench.timing import BatchTiming, RequestTiming, run_together
from jaxserve.bench.workload import Planned
from jaxserve.engine.progress import Silent
from jaxserve.errors import ConfigError


def _timing(arrivals, num_tokens):
    return RequestTiming(sent=10.0, arrivals=arrivals, num_prompt_tokens=3, num_output_tokens=num_tokens)


def test_times_of_a_request():
    timing = _timing((11.0, 11.5, 13.0), 5)
    assert timing.first_token_seconds == 1.0
    assert timing.total_seconds == 3.0
    assert timing.seconds_per_output_token == 0.5  # 2 s for the 4 tokens after the first
    assert timing.gaps == [0.5, 1.5]


def test_a_single_token_has_no_time_per_further_token():
    timing = _timing((11.0,), 1)
    assert timing.seconds_per_output_token is None
    assert [d.name[:4] for d in request_distributions([timing])] == ["TTFT", "E2E,"]


def test_distributions_are_in_milliseconds_and_over_all_requests():
    found = {d.name[:4]: d.value for d in request_distributions([_timing((11.0, 13.0), 3), _timing((12.0, 13.0), 2)])}
    assert (found["TTFT"].mean, found["TTFT"].max) == (1500.0, 2000.0)
    assert found["TPOT"].mean == 1000.0
    assert found["ITL,"].count == 2


def test_throughput_of_a_batch_is_over_the_whole_time():
    batch = BatchTiming(requests=[_timing((11.0,), 4), _timing((12.0,), 6)], seconds=2.0)
    assert (batch.num_prompt_tokens, batch.num_output_tokens, batch.output_tokens_per_second) == (6, 10, 5.0)


def test_requests_run_together():
    frontend = FakeFrontend()
    planned = [Planned(prompt_token_ids=[1, 2], output_len=3), Planned(prompt_token_ids=[4], output_len=5)]
    batch = run_together(frontend, planned)
    assert [len(t.arrivals) for t in batch.requests] == [3, 5]
    assert [t.num_cached_tokens for t in batch.requests] == [2, 1]
    assert all(p.ignore_eos for p in frontend.params)
    assert not frontend.live


def test_a_request_that_ends_early_is_no_measurement():
    with pytest.raises(BenchmarkFailed, match="gave 0 tokens instead of 3"):
        run_together(FakeFrontend(Faults(finish_with_error=True)), [Planned(prompt_token_ids=[1], output_len=3)])


def _figures(report):
    return {figure.name: figure for figure in report.figures}


def test_latency_counts_measured_batches_only():
    frontend = FakeFrontend()
    report = bench_latency(
        frontend, Silent(), input_len=6, output_len=4, batch_size=3, num_iters=2, num_iters_warmup=1, seed=0
    )
    assert len(frontend.submitted) == 9
    assert _figures(report)["end to end, one batch"].value.count == 2
    assert {d.name[:4]: d.value.count for d in report.distributions} == {"TTFT": 6, "TPOT": 6, "ITL,": 18, "E2E,": 6}
    assert report.model["model"] == "fake-model"


def test_throughput_states_the_lengths_it_drew():
    frontend = FakeFrontend()
    sizes = {"num_prompts": 2, "input_len": 5, "output_len": 3, "num_iters": 2}
    report = bench_throughput(frontend, Silent(), dataset="random", **sizes, seed=0)
    assert (report.settings["mean input"], report.settings["mean output"]) == ("5.0 tokens", "3.0 tokens")
    figures = _figures(report)
    assert figures["generated tokens"].value.count == 2
    assert figures["prompt and generated tokens"].value.median > figures["generated tokens"].value.median


def test_batching_alternates_one_and_many():
    frontend = FakeFrontend()
    report = bench_batching(frontend, Silent(), concurrency=4, input_len=3, output_len=2, num_rounds=2, seed=0)
    assert len(frontend.submitted) == 3 * 5
    prompts = {tuple(g.prompt_token_ids) for g in frontend.submitted}
    assert len(prompts) == 15
    figures = _figures(report)
    assert str(figures["4 requests over one"].target) == "≥ 4"
    assert figures["one request"].unit == "tokens/s"


def test_the_ratio_of_batching_is_many_over_one():
    report = bench_batching(FakeFrontend(), Silent(), concurrency=3, input_len=3, output_len=2, num_rounds=1, seed=0)
    value = {name: figure.value.median for name, figure in _figures(report).items()}
    assert value["3 requests over one"] == pytest.approx(value["3 requests"] / value["one request"])


class CachedGeneration(FakeGeneration):
    """A generation whose prompt had so many tokens in the cache."""

    found = 0

    async def __aiter__(self):
        async for delta in super().__aiter__():
            self.num_cached_tokens = self.found
            yield delta


class CachingFrontend(FakeFrontend):
    """Reports the prefix it has seen before, in pages of 16, as the engine would."""

    def __init__(self, *, forgets=False):
        super().__init__()
        self.forgets = forgets

    def submit(self, prompt_token_ids, params, **options):
        generation = CachedGeneration(self, prompt_token_ids, params, "id")
        if not self.forgets:
            shared = [_shared(prompt_token_ids, other.prompt_token_ids) for other in self.submitted]
            generation.found = max(shared, default=0) // 16 * 16
        self.submitted.append(generation)
        return generation

    def effective_config(self):
        return {"page_size": {"value": 16, "reason": ""}, "max_num_seqs": {"value": 4, "reason": ""}}


def _shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_prefix_takes_a_miss_then_a_hit_in_each_round():
    frontend = CachingFrontend()
    report = bench_prefix(frontend, Silent(), prefix_len=40, suffix_len=8, num_rounds=3, seed=0)
    prompts = [g.prompt_token_ids for g in frontend.submitted]
    assert len(prompts) == 8
    assert all(prompts[i][:40] == prompts[i + 1][:40] and prompts[i] != prompts[i + 1] for i in range(0, 8, 2))
    assert report.settings["reused by a hit"] == "at least 32 tokens"
    assert str(_figures(report)["TTFT, hit over miss"].target) == "≤ 0.25"


def test_the_ratio_of_prefix_is_hit_over_miss():
    report = bench_prefix(CachingFrontend(), Silent(), prefix_len=40, suffix_len=8, num_rounds=1, seed=0)
    value = {name: figure.value.median for name, figure in _figures(report).items()}
    assert value["TTFT, hit over miss"] == pytest.approx(value["TTFT, hit"] / value["TTFT, miss"])


def test_a_prefix_that_was_not_reused_is_no_measurement():
    with pytest.raises(BenchmarkFailed, match="hits reused 0 to 0 of at least 32"):
        bench_prefix(CachingFrontend(forgets=True), Silent(), prefix_len=40, suffix_len=8, num_rounds=1, seed=0)


def test_more_than_the_engine_holds_is_refused():
    with pytest.raises(ConfigError, match="--max-model-len"):
        bench_prefix(FakeFrontend(), Silent(), prefix_len=4000, suffix_len=8, num_rounds=1, seed=0)
    with pytest.raises(ConfigError, match="--concurrency 5 exceeds the 4"):
        bench_batching(CachingFrontend(), Silent(), concurrency=5, input_len=3, output_len=2, num_rounds=2, seed=0)
