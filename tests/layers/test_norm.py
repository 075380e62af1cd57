"""RMS norm against its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.norm import rms_norm


def definition(x, weight, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("width", [1, 5, 64, 576])
def test_float32(width, scale):
    rng = np.random.default_rng(width)
    x = (rng.normal(size=(4, width)) * scale).astype(np.float32)
    weight = rng.normal(size=width).astype(np.float32)
    got = np.asarray(rms_norm(jnp.asarray(x), jnp.asarray(weight), 1e-5))
    np.testing.assert_allclose(got, definition(x, weight, 1e-5), rtol=1e-5, atol=1e-6)  # float32 sums


def test_low_precision_is_normalized_in_float32_and_rounded_once():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 64)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=64), jnp.float32)
    got = rms_norm(x, weight, 1e-6)
    assert got.dtype == jnp.bfloat16
    want = definition(np.asarray(x, np.float32), weight, 1e-6)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2**-8)  # half a bfloat16 step, once


def test_zeros_stay_zeros_by_eps():
    assert not np.asarray(rms_norm(jnp.zeros((2, 8)), jnp.ones(8), 1e-6)).any()


def test_a_token_does_not_depend_on_its_batch():
    rng = np.random.default_rng(3)
    x, weight = jnp.asarray(rng.normal(size=(33, 576)), jnp.float32), jnp.ones(576)
    norm = jax.jit(lambda rows: rms_norm(rows, weight, 1e-5))
    whole = np.asarray(norm(x))
    for rows in (2, 16):
        np.testing.assert_array_equal(np.asarray(norm(x[:rows])), whole[:rows])
