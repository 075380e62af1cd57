"""Sampling parameters: what is accepted, and that each refusal names its field."""

import math
import runpy

import pytest

from jaxserve import sampling_params
from jaxserve.errors import InvalidRequest

# The tests' own type checks would refuse a wrong type before the code under test sees it: this copy has none.
SamplingParams = runpy.run_path(sampling_params.__file__)["SamplingParams"]

NUMBERS = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
INTEGERS = {
    "n": (1, 128),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}


def refused(name, value):
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    assert params.stop_strings == ()
    assert not params.is_greedy
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    low, high = NUMBERS[name]
    for value in (low, high, int(low)):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1e-6, high + 1e-6, math.nan, math.inf, -math.inf, "1", None, True, [1.0]):
        refused(name, value)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    low, high = INTEGERS[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (low - 1, high + 1, 1.0, "1", True, math.nan):
        refused(name, value)


def test_what_may_be_left_open():
    for name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
        assert getattr(SamplingParams(**{name: None}), name) is None
    for name in ("n", "top_k", "min_tokens", "temperature"):
        refused(name, None)


def test_cut_offs_and_penalties_that_leave_nothing():
    for name in ("top_p", "repetition_penalty"):
        for value in (0.0, -0.1):
            refused(name, value)
        assert getattr(SamplingParams(**{name: 1e-6}), name) == 1e-6
    refused("top_p", 1.1)


def test_token_limits():
    refused("max_tokens", 0)
    refused("min_tokens", -1)
    refused("min_tokens", 17)  # above the default max_tokens
    assert SamplingParams(min_tokens=17, max_tokens=None).min_tokens == 17
    assert SamplingParams(min_tokens=16).min_tokens == 16


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"])
def test_switches(name):
    for value in (0, 1, "true", None):
        refused(name, value)


def test_stop_strings():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=[]).stop_strings == ()
    for value in ("", ["a", ""], 5, [5], {"a": 1}, b"end"):
        refused("stop", value)
    with pytest.raises(InvalidRequest, match="detokenize=True"):
        SamplingParams(stop="end", detokenize=False)


def test_stop_token_ids():
    assert SamplingParams(stop_token_ids=[0, 5]).stop_token_ids == [0, 5]
    assert len(SamplingParams(stop_token_ids=list(range(64))).stop_token_ids) == 64
    for value in (5, [-1], ["5"], [5.0], [True], list(range(65))):
        refused("stop_token_ids", value)


def test_logit_bias():
    assert SamplingParams(logit_bias={3: -100, 4: 100.0}).logit_bias == {3: -100, 4: 100.0}
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(300), 0.5)).logit_bias) == 300
    for value in ([3], {"3": 1.0}, {-1: 1.0}, {3: 101.0}, {3: math.nan}, {3: "1"}, {True: 1.0}):
        refused("logit_bias", value)
    refused("logit_bias", dict.fromkeys(range(301), 0.5))


def test_names_are_what_a_caller_may_pass():
    assert "stop_strings" not in SamplingParams.names()
    assert {"stop", "seed", "top_k"} <= SamplingParams.names()
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)
