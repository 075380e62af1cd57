"""What batching is worth: tokens/s of many concurrent requests over tokens/s of one."""

from jaxserve.bench.measure import interleaved, paired_ratios, spread
from jaxserve.bench.report import Figure, Report, Target
from jaxserve.bench.session import Measured, check_concurrency, check_length, compile_notes, facts, vocab_size
from jaxserve.bench.timing import run_together
from jaxserve.bench.workload import Workload
from jaxserve.engine.progress import Progress

TARGET = Target(limit=4.0, is_floor=True)


def bench_batching(
    frontend: Measured,
    progress: Progress,
    *,
    concurrency: int,
    input_len: int,
    output_len: int,
    num_rounds: int,
    seed: int,
) -> Report:
    """Rounds of one request alone, then `concurrency` at once. All prompts differ, so no prefix is reused."""
    check_length(frontend, input_len + output_len)
    check_concurrency(frontend, "--concurrency", concurrency)
    work = Workload(
        num_prompts=1 + concurrency,
        input_len=input_len,
        output_len=output_len,
        vocab_size=vocab_size(frontend),
        seed=seed,
    )
    with progress.task("batching", num_rounds + 1) as advance:
        rounds = interleaved(
            {
                "alone": lambda number: run_together(frontend, work.requests(number)[:1]),
                "together": lambda number: run_together(frontend, work.requests(number)[1:]),
            },
            num_rounds=num_rounds,
            advance=advance,
        )
    alone, together = ([b.output_tokens_per_second for b in rounds[name]] for name in ("alone", "together"))
    ratio = f"{concurrency} requests over one"
    return Report(
        title="batching",
        model=facts(frontend),
        settings={"concurrency": concurrency, **work.describe()} | {"requests": 1 + concurrency},
        figures=(
            Figure(name=ratio, unit="x", value=spread(paired_ratios(together, alone)), target=TARGET),
            Figure(name="one request", unit="tokens/s", value=spread(alone)),
            Figure(name=f"{concurrency} requests", unit="tokens/s", value=spread(together)),
        ),
        notes=("tokens/s: generated tokens over the whole time, prefill included", *compile_notes(frontend)),
    )
