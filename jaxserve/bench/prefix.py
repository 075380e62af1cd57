"""What a cached prefix is worth: time to first token of a request that hits over one that misses."""

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.measure import interleaved, paired_ratios, spread
from jaxserve.bench.report import Figure, Report, Target
from jaxserve.bench.session import Measured, check_length, compile_notes, facts, vocab_size
from jaxserve.bench.timing import RequestTiming, run_together
from jaxserve.bench.workload import Planned, random_source, random_tokens
from jaxserve.engine.progress import Progress
from jaxserve.errors import ConfigError

TARGET = Target(limit=0.25, is_floor=False)


def bench_prefix(
    frontend: Measured, progress: Progress, *, prefix_len: int, suffix_len: int, num_rounds: int, seed: int
) -> Report:
    """Rounds with a fresh random prefix each: a request that computes it, then one with another suffix that reuses it.

    Raises BenchmarkFailed where a hit reused less than all full pages of the prefix, or a miss anything.
    """
    check_length(frontend, prefix_len + suffix_len + 1)
    choices = frontend.effective_config()
    if not choices.get("enable_prefix_caching", {}).get("value", True):
        raise ConfigError("bench prefix needs the prefix cache; leave --no-enable-prefix-caching out")
    page_size = choices.get("page_size", {}).get("value", 1)
    vocab = vocab_size(frontend)
    least = prefix_len // page_size * page_size
    if not least or suffix_len < 1:
        raise ConfigError(
            f"--prefix-len must be at least a page of {page_size} tokens and --suffix-len at least 1, "
            f"got {prefix_len} and {suffix_len}"
        )

    def first_token(number: int, suffix: str) -> RequestTiming:
        prefix = random_tokens(random_source(seed, "prefix", number), prefix_len, vocab)
        tail = random_tokens(random_source(seed, suffix, number), suffix_len, vocab)
        return run_together(frontend, [Planned(prompt_token_ids=prefix + tail, output_len=1)]).requests[0]

    with progress.task("prefix", num_rounds + 1) as advance:
        rounds = interleaved(
            {"miss": lambda number: first_token(number, "miss"), "hit": lambda number: first_token(number, "hit")},
            num_rounds=num_rounds,
            advance=advance,
        )
    _check_reuse(rounds["miss"], rounds["hit"], least)
    miss, hit = ([1e3 * timing.first_token_seconds for timing in rounds[name]] for name in ("miss", "hit"))
    return Report(
        title="prefix",
        model=facts(frontend),
        settings={"prefix": f"{prefix_len:,} tokens", "suffix": f"{suffix_len:,} tokens", "seed": seed}
        | {"reused by a hit": f"at least {least:,} tokens"},
        figures=(
            Figure(name="TTFT, hit over miss", unit="x", value=spread(paired_ratios(hit, miss)), target=TARGET),
            Figure(name="TTFT, miss", unit="ms", value=spread(miss)),
            Figure(name="TTFT, hit", unit="ms", value=spread(hit)),
        ),
        notes=compile_notes(frontend),
    )


def _check_reuse(misses: list[RequestTiming], hits: list[RequestTiming], least: int) -> None:
    reused = [timing.num_cached_tokens for timing in hits]
    wrong = [timing for timing in misses if timing.num_cached_tokens]
    if wrong or min(reused) < least:
        raise BenchmarkFailed(
            f"hits reused {min(reused):,} to {max(reused):,} of at least {least:,} tokens and {len(wrong)} misses "
            "reused a prefix: the cache did not do what this measures (too few KV pages?)"
        )
