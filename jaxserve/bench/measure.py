"""Numbers from repeated runs: percentiles, spreads over rounds, and rounds in which compared runs take turns."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

PERCENTS = (50.0, 90.0, 95.0, 99.0)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, linear between the two nearest (numpy's default).

    Raises ValueError without values or outside 0 to 100.
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent} of {len(values)} values: give at least one value and 0 to 100")
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (at - low))


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, smallest and largest of one number measured in several rounds."""

    median: float
    min: float
    max: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """The spread of at least one value."""
    return Spread(median=percentile(values, 50.0), min=float(min(values)), max=float(max(values)), count=len(values))


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """How many like things (requests, tokens, steps) are distributed."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    count: int


def percentiles(values: Sequence[float]) -> Percentiles:
    """The distribution of at least one value."""
    found = {f"p{percent:g}": percentile(values, percent) for percent in PERCENTS}
    return Percentiles(mean=math.fsum(values) / len(values), max=float(max(values)), count=len(values), **found)


def interleaved[T](
    runs: Mapping[str, Callable[[int], T]],
    *,
    num_rounds: int,
    num_warm_up: int = 1,
    advance: Callable[[int], None] = lambda rounds: None,
) -> dict[str, list[T]]:
    """Results by name from rounds in which every run has one turn (A B A B ...), so that drift hits all alike.

    A run is called with its round's number; warm-up rounds have negative numbers and their results are dropped.
    """
    results: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(-num_warm_up, num_rounds):
        for name, run in runs.items():
            result = run(number)
            if number >= 0:
                results[name].append(result)
        advance(1)
    return results


def paired_ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """over / under, round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]
