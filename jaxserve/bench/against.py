"""Our server and another under the same load of texts, in turns: tokens/s and TTFT of both, and the ratios."""

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.measure import interleaved, paired_ratios, percentile, percentiles, spread
from jaxserve.bench.report import Distribution, Figure, Report
from jaxserve.bench.serve import Load, describe_load, run_load
from jaxserve.bench.timing import RequestTiming
from jaxserve.bench.workload import Planned, Workload, random_source
from jaxserve.engine.progress import Progress
from jaxserve.errors import ConfigError

OWN = "jaxserve"
WORD = re.compile(r" [a-z]{2,}")


@runtime_checkable
class ReadsWords(Protocol):
    """The part of a Tokenizer that makes texts of known length."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True, kw_only=True)
class LoadFigures:
    """What one server's clients saw of one round. first_token_seconds: one of each answered request."""

    tokens_per_second: float
    first_token_seconds: list[float]
    num_failed: int
    num_wrong_length: int


def bench_against(
    loads: Mapping[str, Load], rounds: list[list[Planned]], warm_up: list[Planned], progress: Progress, work: Workload
) -> Report:
    """Every round sends its requests to each server in turn. The first server is ours, the second the other.

    Raises BenchmarkFailed when a server answers no request of a round.
    """
    own, other = loads
    with progress.task("against", len(rounds) + 1) as advance:

        def run(name: str, number: int) -> LoadFigures:
            requests = warm_up if number < 0 else rounds[number]
            return _figures_of(name, loads[name], requests)

        runs = {name: (lambda number, name=name: run(name, number)) for name in loads}
        found = interleaved(runs, num_rounds=len(rounds), advance=advance)
    rates = {name: [one.tokens_per_second for one in found[name]] for name in loads}
    return Report(
        title=f"serve: {own} against {other}",
        model={name: load.base_url for name, load in loads.items()},
        settings=work.describe() | describe_load(loads[own]) | {"rounds": len(rounds)},
        figures=(
            Figure(
                name=f"generated tokens: {own} over {other}",
                unit="x",
                value=spread(paired_ratios(rates[own], rates[other])),
            ),
            *_first_token_ratios(found[own], found[other], f"{own} over {other}"),
            *(
                Figure(name=f"generated tokens: {name}", unit="tokens/s", value=spread(values))
                for name, values in rates.items()
            ),
        ),
        distributions=tuple(
            Distribution(
                name=f"TTFT: {name}",
                unit="ms",
                value=percentiles([1e3 * s for one in rounds_of for s in one.first_token_seconds]),
            )
            for name, rounds_of in found.items()
        ),
        notes=tuple(_notes(found)),
        samples={name: [vars(one) for one in rounds_of] for name, rounds_of in found.items()},
    )


def text_requests(tokenizer: ReadsWords, requests: Iterable[Planned], word_ids: list[int], seed: int) -> list[Planned]:
    """The same lengths with texts as prompts: words that are one token each, so that every tokenizer of this model
    gives that many tokens, and its BOS."""
    source = random_source(seed, "words")
    banned = tuple(sorted(tokenizer.eos_token_ids))
    planned = []
    for request in requests:
        ids = source.choices(word_ids, k=len(request.prompt_token_ids))
        planned.append(replace(request, prompt_token_ids=ids, text=tokenizer.decode(ids), banned_token_ids=banned))
    return planned


def one_token_words(tokenizer: ReadsWords) -> list[int]:
    """Tokens that are a space and a word in small letters. Raises ConfigError for a vocabulary almost without."""
    found = [i for i in range(tokenizer.vocab_size) if WORD.fullmatch(tokenizer.decode([i]))]
    if len(found) < 100:
        raise ConfigError(f"the vocabulary has {len(found)} words to make texts of; 100 are needed to compare servers")
    return found


def _figures_of(name: str, load: Load, requests: list[Planned]) -> LoadFigures:
    result = asyncio.run(run_load(load, requests, []))
    answered = [one for one in result.outcomes if isinstance(one, RequestTiming)]
    if not answered:
        raise BenchmarkFailed(f"{name} answered none of {len(requests)} requests: {result.outcomes[0]}")
    pairs = zip(result.outcomes, requests, strict=True)
    wrong = sum(isinstance(o, RequestTiming) and o.num_output_tokens != r.output_len for o, r in pairs)
    return LoadFigures(
        tokens_per_second=sum(one.num_output_tokens for one in answered) / result.seconds,
        first_token_seconds=[one.first_token_seconds for one in answered],
        num_failed=len(requests) - len(answered),
        num_wrong_length=wrong,
    )


def _first_token_ratios(ours: list[LoadFigures], theirs: list[LoadFigures], name: str) -> Iterable[Figure]:
    for percent in (50.0, 99.0):
        values = [[percentile(one.first_token_seconds, percent) for one in found] for found in (ours, theirs)]
        yield Figure(name=f"TTFT p{percent:g}: {name}", unit="x", value=spread(paired_ratios(*values)))


def _notes(found: Mapping[str, list[LoadFigures]]) -> Iterable[str]:
    yield "the same texts to both, in turns; TTFT from sending, so that waiting in the server counts"
    for name, rounds in found.items():
        failed, wrong = (sum(getattr(one, field) for one in rounds) for field in ("num_failed", "num_wrong_length"))
        if failed or wrong:
            yield f"{name}: {failed} requests failed and {wrong} answers have another length than asked for"
