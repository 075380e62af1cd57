"""How long a batch of equal requests takes: end to end, to the first token, per further token."""

from jaxserve.bench.measure import interleaved, percentiles, spread
from jaxserve.bench.report import Distribution, Figure, Report
from jaxserve.bench.session import Measured, check_concurrency, check_length, compile_notes, facts, vocab_size
from jaxserve.bench.timing import RequestTiming, run_together
from jaxserve.bench.workload import Workload
from jaxserve.engine.progress import Progress


def bench_latency(
    frontend: Measured,
    progress: Progress,
    *,
    input_len: int,
    output_len: int,
    batch_size: int,
    num_iters: int,
    num_iters_warmup: int,
    seed: int,
) -> Report:
    """`num_iters` batches of `batch_size` requests, one batch at a time."""
    check_length(frontend, input_len + output_len)
    check_concurrency(frontend, "--batch-size", batch_size)
    work = Workload(
        num_prompts=batch_size, input_len=input_len, output_len=output_len, vocab_size=vocab_size(frontend), seed=seed
    )
    with progress.task("latency", num_iters + num_iters_warmup) as advance:
        batches = interleaved(
            {"batch": lambda number: run_together(frontend, work.requests(number))},
            num_rounds=num_iters,
            num_warm_up=num_iters_warmup,
            advance=advance,
        )["batch"]
    figure = Figure(name="end to end, one batch", unit="s", value=spread([batch.seconds for batch in batches]))
    return Report(
        title="latency",
        model=facts(frontend),
        settings={"batch size": batch_size, **work.describe(), "warm-up batches": num_iters_warmup},
        figures=(figure,),
        distributions=request_distributions([timing for batch in batches for timing in batch.requests]),
        notes=compile_notes(frontend),
    )


def request_distributions(timings: list[RequestTiming]) -> tuple[Distribution, ...]:
    """TTFT, TPOT, ITL and E2E of requests; those without a sample are left out."""
    samples = {
        "TTFT, time to first token": [t.first_token_seconds for t in timings],
        "TPOT, time per output token": [s for t in timings if (s := t.seconds_per_output_token) is not None],
        "ITL, between increments": [gap for t in timings for gap in t.gaps],
        "E2E, whole request": [t.total_seconds for t in timings],
    }
    return tuple(
        Distribution(name=name, unit="ms", value=percentiles([1e3 * value for value in values]))
        for name, values in samples.items()
        if values
    )
