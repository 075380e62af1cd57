"""Layers unrolled and scanned are the same function, and what cannot be stacked is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.stack import run_layers, stack_layers
from jaxserve.quant.dense import Dense


def layers_of(count):
    rng = np.random.default_rng(0)
    return tuple(
        {
            "matrix": Dense(array=jnp.asarray(rng.normal(size=(4, 4)) / 2, jnp.float32)),
            "bias": jnp.asarray(rng.normal(size=4), jnp.float32),
        }
        for _ in range(count)
    )


def body(carry, weights, index):
    """Uses the weights, keeps a row per layer as a cache does, and depends on the order."""
    x, cache = carry
    x = jnp.tanh(x @ weights["matrix"].array + weights["bias"] + index)
    return x, cache.at[index].set(x)


def test_scanned_equals_unrolled_equals_written_out():
    layers = layers_of(3)
    start = (jnp.arange(4, dtype=jnp.float32), jnp.zeros((3, 4)))
    x, rows = np.arange(4.0), []
    for index, weights in enumerate(layers):
        x = np.tanh(x @ np.asarray(weights["matrix"].array) + np.asarray(weights["bias"]) + index)
        rows.append(x)
    for way in (layers, stack_layers(layers)):
        got, cache = jax.jit(lambda layers: run_layers(layers, start, body))(way)
        np.testing.assert_allclose(got, x, atol=1e-6)  # float32
        np.testing.assert_allclose(cache, rows, atol=1e-6)


def test_layers_of_two_kinds_run_in_their_order():
    """Each kind is traced once unrolled, and once for every run of neighbours when scanned."""
    layers, traced = layers_of(5), []

    def kind(name, sign):
        def layer(carry, weights, index):
            traced.append(name)
            x, cache = body(carry, weights, index)
            return sign * x, cache

        return layer

    a, b = kind("a", 1), kind("b", -1)
    bodies, signs = [a, a, b, a, b], [1, 1, -1, 1, -1]
    start = (jnp.arange(4, dtype=jnp.float32), jnp.zeros((5, 4)))
    x = np.arange(4.0)
    for index, (weights, sign) in enumerate(zip(layers, signs, strict=True)):
        x = sign * np.tanh(x @ np.asarray(weights["matrix"].array) + np.asarray(weights["bias"]) + index)
    got, _ = run_layers(layers, start, bodies)
    np.testing.assert_allclose(got, x, atol=1e-6)
    assert traced == ["a", "b"]
    traced.clear()
    got, _ = run_layers(stack_layers(layers), start, bodies)
    np.testing.assert_allclose(got, x, atol=1e-6)
    assert traced == ["a", "b", "a", "b"]


def test_a_single_layer():
    layers = layers_of(1)
    start = (jnp.ones(4), jnp.zeros((1, 4)))
    unrolled, scanned = (run_layers(way, start, body)[0] for way in (layers, stack_layers(layers)))
    np.testing.assert_allclose(unrolled, scanned, atol=1e-6)


def test_stacked_layers_keep_their_format():
    (stacked,) = stack_layers(layers_of(3))
    assert stacked.num_layers == 3
    assert isinstance(stacked.weights["matrix"], Dense)
    assert stacked.weights["matrix"].array.shape == (3, 4, 4)


@pytest.mark.parametrize(
    "odd",
    [
        {"matrix": Dense(array=jnp.zeros((4, 4), jnp.bfloat16)), "bias": jnp.zeros(4)},
        {"matrix": Dense(array=jnp.zeros((4, 4))), "bias": jnp.zeros(5)},
        {"matrix": Dense(array=jnp.zeros((4, 4)))},
    ],
    ids=["dtype", "shape", "missing"],
)
def test_layers_that_differ_stand_in_stacks_of_their_own(odd):
    stacks = stack_layers((*layers_of(2), odd, odd, *layers_of(1)))
    assert [stack.num_layers for stack in stacks] == [2, 2, 1]


def test_stacks_of_different_layers_run_with_the_layers_own_numbers():
    layers = layers_of(4)
    wide = tuple({**layer, "extra": jnp.zeros(3)} for layer in layers[:2])
    start = (jnp.arange(4, dtype=jnp.float32), jnp.zeros((4, 4)))
    mixed = (*wide, *layers[2:])
    assert len(stack_layers(mixed)) == 2
    got, want = (run_layers(way, start, body) for way in (stack_layers(mixed), layers))
    np.testing.assert_allclose(got[0], want[0], atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)
