"""Rotary frequencies of every kind against the published formulas, written out pair by pair."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.rope import Rope, make_rope, rope_angles
from pallas_kernels.paged_attention.rope import rotate

HEAD, THETA = 64, 10_000.0
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def plain(theta=THETA):
    return [theta ** (-2 * i / HEAD) for i in range(HEAD // 2)]


@pytest.mark.parametrize("scaling", [None, {}, {"rope_type": "default"}, {"type": "default"}, {"rope_type": None}])
def test_default(scaling):
    rope = make_rope(HEAD, 5e5, scaling, 512)
    assert rope.inverse_frequencies == pytest.approx(plain(5e5), rel=1e-12)
    assert rope.attention_factor == 1.0


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_linear_divides_positions(key):
    rope = make_rope(HEAD, THETA, {key: "linear", "factor": 4.0}, 512)
    assert rope.inverse_frequencies == pytest.approx([f / 4 for f in plain()], rel=1e-12)


def test_llama3_by_wavelength():
    """As Meta's reference: by wavelength, with a ramp in between."""
    want = []
    for frequency in plain(5e5):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            want.append(frequency)
        elif wavelength > 8192 / 1:
            want.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * frequency / 8 + smooth * frequency)
    rope = make_rope(HEAD, 5e5, LLAMA3, 131072)
    assert rope.inverse_frequencies == pytest.approx(want, rel=1e-9)
    assert len({f / p for f, p in zip(rope.inverse_frequencies, plain(5e5), strict=True)}) > 3  # the ramp is crossed


@pytest.mark.parametrize("changes", [{}, {"beta_fast": 16, "beta_slow": 2}, {"truncate": False}])
def test_yarn_by_number_of_rotations(changes):
    """Section 3.2 of the paper: pairs that turn often are kept, those that hardly turn are divided by the factor."""
    original, factor = 4096, 16.0
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **changes}
    fast, slow = changes.get("beta_fast", 32), changes.get("beta_slow", 1)
    first = HEAD / 2 * math.log(original / (fast * 2 * math.pi)) / math.log(THETA)
    last = HEAD / 2 * math.log(original / (slow * 2 * math.pi)) / math.log(THETA)
    if changes.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    want = []
    for pair, frequency in enumerate(plain()):
        interpolated = min(max((pair - first) / (last - first), 0.0), 1.0)
        want.append(frequency / factor * interpolated + frequency * (1 - interpolated))
    rope = make_rope(HEAD, THETA, scaling, 65536)
    assert rope.inverse_frequencies == pytest.approx(want, rel=1e-9)
    assert rope.attention_factor == pytest.approx(0.1 * math.log(factor) + 1)


def test_yarn_takes_the_models_length_where_none_is_given():
    given = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert make_rope(HEAD, THETA, {"rope_type": "yarn", "factor": 4.0}, 512) == make_rope(HEAD, THETA, given, 9999)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"factor": 1.0}, 1.0),
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 1.0, "mscale_all_dim": 0.707}, (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707}, 0.1 * math.log(40) + 1),
    ],
)
def test_yarn_attention_factor(changes, want):
    scaling = {"rope_type": "yarn", "factor": 40.0, **changes}
    assert make_rope(HEAD, THETA, scaling, 512).attention_factor == pytest.approx(want)


def test_an_unknown_kind_is_refused_with_those_that_are_known():
    with pytest.raises(
        ValueError, match=r"rope type 'other' is not supported; .* default, linear, dynamic, llama3, yarn, longrope"
    ):
        make_rope(HEAD, THETA, {"rope_type": "other"}, 512)


def test_angles_are_positions_times_frequencies_and_carry_the_factor():
    rope = Rope(inverse_frequencies=(1.0, 0.25), attention_factor=1.5)
    cos, sin = rope_angles(rope, jnp.asarray([0, 3, 100], jnp.int32))
    angles = np.asarray([[0, 0], [3, 0.75], [100, 25]])
    np.testing.assert_allclose(cos, 1.5 * np.cos(angles), atol=1e-5)  # float32 angles of up to 100
    np.testing.assert_allclose(sin, 1.5 * np.sin(angles), atol=1e-5)


def test_rotation_turns_halves_as_complex_numbers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 8)).astype(np.float32)
    rope = make_rope(8, THETA, None, 512)
    positions = np.asarray([0, 1, 17])
    got = np.asarray(rotate(jnp.asarray(x), rope_angles(rope, jnp.asarray(positions, jnp.int32))))
    turn = np.exp(1j * positions[:, None] * np.asarray(rope.inverse_frequencies))[:, None]
    want = (x[..., :4] + 1j * x[..., 4:]) * turn
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=1e-5)
    np.testing.assert_array_equal(got[0], x[0])


def test_products_depend_on_distance_only():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.float32) for _ in range(2))
    rope = make_rope(8, THETA, LLAMA3, 512)

    def at(x, position):
        return np.asarray(rotate(x, rope_angles(rope, jnp.asarray([position], jnp.int32))))[0, 0]

    assert at(q, 9) @ at(k, 4) == pytest.approx(at(q, 105) @ at(k, 100), abs=1e-4)
    assert at(q, 9) @ at(k, 4) != pytest.approx(at(q, 9) @ at(k, 5), abs=1e-2)


def test_low_precision_in_and_out():
    x = jnp.ones((2, 1, 4), jnp.bfloat16)
    assert rotate(x, rope_angles(make_rope(4, THETA, None, 9), jnp.arange(2, dtype=jnp.int32))).dtype == jnp.bfloat16
