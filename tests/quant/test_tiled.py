"""Weights in tiles: what joining neighbours does to a layer's weights."""

import numpy as np

from jaxserve.quant.formats import FORMATS
from jaxserve.quant.tiled import joined, tiled


def weight(format_name: str, num_outputs: int, seed: int):
    rng = np.random.default_rng(seed)
    return FORMATS[format_name].encode(rng.standard_normal((num_outputs, 64), np.float32))


def test_neighbours_of_one_format_become_one_weight_in_order():
    q, k, v = weight("Q4_1", 32, 0), weight("Q4_1", 16, 1), weight("Q8_0", 16, 2)
    layer = {"q": tiled(q), "k": tiled(k), "v": tiled(v), "o": tiled(q)}
    found = joined(layer, ("q", "k", "v"))
    assert set(found) == {"q+k", "v", "o"}
    assert found["q+k"].shape == (48, 64)
    want = np.concatenate([np.asarray(q.decode()), np.asarray(k.decode())])
    assert (np.asarray(found["q+k"].decode()) == want).all()


def test_only_neighbours_are_joined():
    """A weight that has no tiles stands between two that have: joining those would change the order of columns."""
    q, k, v = weight("Q4_1", 16, 0), weight("F32", 16, 1), weight("Q4_1", 16, 2)
    layer = {"q": tiled(q), "k": k, "v": tiled(v), "bias": np.zeros(3)}
    assert set(joined(layer, ("q", "k", "v"))) == {"q", "k", "v", "bias"}
