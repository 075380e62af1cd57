"""The same seed asks the same; lengths and arrivals follow what the report says of them."""

import itertools
import math
import statistics
from typing import Any

import pytest

from jaxserve.bench.workload import (
    SHAREGPT_OUTPUTS,
    SHAREGPT_PROMPTS,
    LogNormalLengths,
    Workload,
    arrival_seconds,
    random_source,
    random_tokens,
    sampling,
)
from jaxserve.errors import ConfigError


def _work(**changes):
    sizes: dict[str, Any] = {"num_prompts": 8, "input_len": 20, "output_len": 5, "vocab_size": 100, "seed": 3}
    return Workload(**sizes | changes)


@pytest.mark.parametrize("dataset", ["random", "sharegpt-like"])
def test_a_seed_determines_the_requests(dataset):
    work = _work(dataset=dataset)
    assert work.requests(2) == work.requests(2)
    assert work.requests(2) != work.requests(3)
    assert work.requests(2) != _work(dataset=dataset, seed=4).requests(2)


def test_random_requests_have_the_given_lengths_and_ids_of_the_vocabulary():
    requests = _work().requests()
    assert {(len(r.prompt_token_ids), r.output_len) for r in requests} == {(20, 5)}
    ids = {token for r in requests for token in r.prompt_token_ids}
    assert min(ids) >= 0
    assert max(ids) < 100
    assert len(ids) > 70  # of 160 draws from 100: about 80 differ


def test_no_two_prompts_begin_alike():
    prompts = [tuple(r.prompt_token_ids) for number in range(-1, 3) for r in _work().requests(number)]
    assert len({prompt[:10] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("lengths", [SHAREGPT_PROMPTS, SHAREGPT_OUTPUTS])
def test_log_normal_lengths_have_their_mean_deviation_and_limits(lengths):
    wide = LogNormalLengths(mean=lengths.mean, sigma=lengths.sigma, low=1, high=10**9)
    source = random_source(0)
    drawn = [wide.draw(source) for _ in range(20_000)]
    # standard error of the mean: under 0.02 of it for sigma 1.2 and 20,000 draws; four of them
    assert statistics.fmean(drawn) == pytest.approx(lengths.mean, rel=0.08)
    assert statistics.stdev(map(math.log, drawn)) == pytest.approx(lengths.sigma, rel=0.05)
    clipped = [lengths.draw(source) for _ in range(20_000)]
    assert (min(clipped), max(clipped)) == (4, 1024)


def test_the_report_says_how_lengths_were_drawn():
    assert _work().describe()["input length"] == "20 tokens"
    assert "log-normal, mean 161.31, sigma 1.2, clipped to 4-1024" in str(_work(dataset="sharegpt-like").describe())


def test_poisson_arrivals_have_their_rate():
    times = list(arrival_seconds(5000, 20.0, seed=1))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert min(gaps) >= 0
    # 5,000 exponential gaps: mean and deviation are equal, each within about 1.4 %; four of those
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.06)
    assert times == list(arrival_seconds(5000, 20.0, seed=1))


def test_an_infinite_rate_sends_all_at_once():
    assert list(arrival_seconds(3, math.inf, seed=1)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_sends_nothing_is_refused(rate):
    with pytest.raises(ConfigError, match="--request-rate"):
        list(arrival_seconds(1, rate, seed=0))


@pytest.mark.parametrize("change", [{"num_prompts": 0}, {"input_len": 0}, {"output_len": 0}])
def test_empty_workloads_are_refused(change):
    with pytest.raises(ConfigError, match="at least 1"):
        _work(**change)


def test_near_keys_are_unrelated():
    assert random_tokens(random_source(0, "a", 12), 8, 1000) != random_tokens(random_source(0, "a1", 2), 8, 1000)


def test_answers_have_exactly_their_length():
    params = sampling(7)
    assert (params.max_tokens, params.ignore_eos) == (7, True)
