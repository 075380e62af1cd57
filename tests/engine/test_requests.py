"""Seeds of requests and choices, and who needs state on the device."""

import numpy as np
import pytest

from jaxserve.engine.requests import TopTokens, fresh_seed, needs_slot_state, sample_seed, top_tokens
from jaxserve.sampling_params import SamplingParams


def test_the_first_choice_has_the_requests_own_seed():
    assert sample_seed(7, 0) == 7
    assert sample_seed(-1, 0) == 2**64 - 1


def test_all_other_seeds_differ():
    seeds = [sample_seed(seed, index) for seed in (0, 1, 2**63, -5) for index in range(100)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_fresh_seeds_repeat_with_the_engines_seed_and_order():
    assert [fresh_seed(3, n) for n in range(5)] == [fresh_seed(3, n) for n in range(5)]
    assert len({fresh_seed(seed, n) for seed in range(10) for n in range(10)}) == 100


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "logprobs": 2}, False),
        ({"stop_token_ids": [5]}, False),  # the host looks for them
        ({"stop_token_ids": [5], "min_tokens": 1}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"logit_bias": {}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_who_needs_state_on_the_device(changes, needs):
    assert needs_slot_state(SamplingParams(**changes)) is needs


def test_top_tokens_are_plain_numbers():
    arrays = (
        np.asarray([-9.0, -0.5], np.float32),
        np.asarray([9, 2], np.int32),
        np.asarray([[0, 0, 0], [4, 5, 6]], np.int32),
        np.asarray([[0, 0, 0], [-0.25, -0.5, -3.0]], np.float32),
    )
    assert top_tokens(5, arrays, 1, 2) == TopTokens(5, -0.5, 2, [4, 5], [-0.25, -0.5])
    assert top_tokens(5, arrays, 1, 0) == TopTokens(5, -0.5, 2, [], [])
