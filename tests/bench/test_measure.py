"""Percentiles are numpy's, and compared runs take turns."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.bench.measure import interleaved, paired_ratios, percentile, percentiles, spread

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers, st.floats(0, 100))
def test_percentiles_are_numpys(values, percent):
    # float64 sums in another order: relative to the largest value
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), abs=1e-9, rel=1e-9)


@given(numbers)
def test_a_distribution_is_numpys(values):
    found = percentiles(values)
    wanted = np.percentile(values, [50, 90, 95, 99])
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx(wanted, abs=1e-9, rel=1e-9)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert (found.max, found.count) == (max(values), len(values))


def test_a_spread_is_median_and_extremes():
    found = spread([3.0, 1.0, 10.0, 2.0])
    assert (found.median, found.min, found.max, found.count) == (2.5, 1.0, 10.0, 4)


@pytest.mark.parametrize(("values", "percent"), [([], 50.0), ([1.0], -1.0), ([1.0], 101.0)])
def test_what_has_no_percentile_is_refused(values, percent):
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, percent)


def test_runs_take_turns_and_warm_up_is_dropped():
    calls = []
    rounds = []

    def run(name):
        return lambda number: calls.append((name, number)) or f"{name}{number}"

    results = interleaved({"a": run("a"), "b": run("b")}, num_rounds=2, num_warm_up=1, advance=rounds.append)
    assert calls == [("a", -1), ("b", -1), ("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert results == {"a": ["a0", "a1"], "b": ["b0", "b1"]}
    assert rounds == [1, 1, 1]


def test_ratios_are_taken_round_by_round():
    assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        paired_ratios([1.0], [1.0, 2.0])
