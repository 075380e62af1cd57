"""How many tokens and requests per second, all requests submitted at once."""

from jaxserve.bench.measure import interleaved, spread
from jaxserve.bench.report import Figure, Report
from jaxserve.bench.session import Measured, check_length, compile_notes, facts, vocab_size
from jaxserve.bench.timing import run_together
from jaxserve.bench.workload import Dataset, Workload
from jaxserve.engine.progress import Progress


def bench_throughput(
    frontend: Measured,
    progress: Progress,
    *,
    dataset: Dataset,
    num_prompts: int,
    input_len: int,
    output_len: int,
    num_iters: int,
    seed: int,
) -> Report:
    """`num_iters` rounds of fresh requests, after one warm-up request."""
    work = Workload(
        dataset=dataset,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        vocab_size=vocab_size(frontend),
        seed=seed,
    )
    rounds = [work.requests(number) for number in range(num_iters)]
    check_length(frontend, max(len(r.prompt_token_ids) + r.output_len for requests in rounds for r in requests))
    with progress.task("throughput", num_iters) as advance:
        run_together(frontend, work.requests(-1)[:1])
        batches = interleaved(
            {"batch": lambda number: run_together(frontend, rounds[number])},
            num_rounds=num_iters,
            num_warm_up=0,
            advance=advance,
        )["batch"]
    totals = [batch.num_prompt_tokens + batch.num_output_tokens for batch in batches]
    num_requests = num_iters * num_prompts
    mean_lengths = {
        "mean input": f"{sum(b.num_prompt_tokens for b in batches) / num_requests:.1f} tokens",
        "mean output": f"{sum(b.num_output_tokens for b in batches) / num_requests:.1f} tokens",
    }
    return Report(
        title="throughput",
        model=facts(frontend),
        settings=work.describe() | mean_lengths,
        figures=(
            Figure(
                name="generated tokens",
                unit="tokens/s",
                value=spread([batch.output_tokens_per_second for batch in batches]),
            ),
            Figure(
                name="prompt and generated tokens",
                unit="tokens/s",
                value=spread([total / batch.seconds for total, batch in zip(totals, batches, strict=True)]),
            ),
            Figure(name="requests", unit="1/s", value=spread([num_prompts / batch.seconds for batch in batches])),
        ),
        notes=compile_notes(frontend),
    )
