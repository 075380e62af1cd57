"""What a caller may ask of an embedding, and what pooled states become."""

import math
import runpy
from typing import Any

import numpy as np
import pytest

from jaxserve import pooling_params
from jaxserve.errors import InvalidRequest
from jaxserve.pooling_params import PoolingParams


@pytest.fixture(scope="module")
def unchecked() -> Any:
    """The class without the tests' own type checks."""
    return runpy.run_path(pooling_params.__file__)["PoolingParams"]


def test_vectors_have_length_one():
    got = PoolingParams().embedding([3.0, 0.0, -4.0])
    assert got == [float(np.float32(x)) for x in (0.6, 0.0, -0.8)]


def test_a_cut_comes_before_the_scaling():
    assert PoolingParams(dimensions=2).embedding([3.0, 4.0, 100.0]) == [float(np.float32(x)) for x in (0.6, 0.8)]
    assert PoolingParams(dimensions=2, normalize=False).embedding([3.0, 4.0, 100.0]) == [3.0, 4.0]


def test_zeros_stay():
    assert PoolingParams().embedding([0.0, 0.0]) == [0.0, 0.0]


def test_large_and_small_values_keep_their_direction():
    for scale in (1e-30, 1e30):
        got = PoolingParams().embedding([3 * scale, 4 * scale])
        assert math.hypot(*got) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pooling": "cls"}, "pooling must be 'mean' or 'last', got 'cls'"),
        ({"pooling": None}, "pooling must be"),
        ({"normalize": "no"}, "normalize must be true or false"),
        ({"dimensions": 0}, "dimensions must be an integer of at least 1, got 0"),
        ({"dimensions": True}, "dimensions must be an integer"),
        ({"dimensions": 2.0}, "dimensions must be an integer"),
    ],
)
def test_what_cannot_be_is_refused_by_name(unchecked, fields, said):
    with pytest.raises(InvalidRequest) as caught:
        unchecked(**fields)
    assert said in str(caught.value)
    assert caught.value.param == next(iter(fields))


def test_no_more_values_than_the_model_has():
    PoolingParams(dimensions=4).check(4)
    with pytest.raises(InvalidRequest, match="dimensions must be from 1 to 4") as caught:
        PoolingParams(dimensions=5).check(4)
    assert caught.value.param == "dimensions"
