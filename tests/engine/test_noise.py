import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.noise import gumbel

EULER = 0.5772156649015329


def noise(seed, positions, token_ids):
    """Noise for numpy inputs; one seed pair for all rows when a single pair is given."""
    positions = jnp.asarray(positions, jnp.int32)
    seeds = jnp.broadcast_to(jnp.asarray(seed, jnp.uint32), (positions.shape[0], 2))
    ids = jnp.broadcast_to(jnp.asarray(token_ids, jnp.int32), (positions.shape[0], np.shape(token_ids)[-1]))
    return np.asarray(gumbel(seeds, positions, ids))


def test_follows_the_gumbel_law():
    values = np.sort(noise([[7, 0]], np.arange(200), np.arange(1000)).ravel()).astype(np.float64)
    n = values.size
    assert values.mean() == pytest.approx(EULER, abs=4 * np.sqrt(np.pi**2 / 6 / n))
    assert values.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    law = np.exp(-np.exp(-values))
    steps = np.arange(n + 1) / n
    distance = max(np.max(steps[1:] - law), np.max(law - steps[:-1]))
    assert distance < 1.95 / np.sqrt(n)  # Kolmogorov-Smirnov at the 0.1 % level


def test_upper_tail_has_its_weight_and_no_repeated_values():
    values = noise([[1, 2]], np.arange(400), np.arange(5000)).ravel()
    largest = np.sort(values)[-2000:]  # expected to begin at -log(-log1p(-0.001)) = 6.907
    assert largest[0] == pytest.approx(6.907, abs=0.1)
    assert np.unique(largest).size > 1990
    assert largest[-1] > 12


def test_is_finite_and_bounded_for_every_extreme_input():
    extremes = np.array([0, 1, 2**31 - 1], np.int32)
    seeds = jnp.asarray([[0, 0], [2**32 - 1, 2**32 - 1], [0, 2**32 - 1]], jnp.uint32)
    values = np.asarray(gumbel(seeds, jnp.asarray(extremes), jnp.asarray(np.tile(extremes, (3, 1)))))
    assert np.isfinite(values).all()
    assert (values > -3).all()
    assert (values < 23).all()


@pytest.mark.parametrize("axis", ["position", "token", "low seed", "high seed"])
@pytest.mark.parametrize("distance", [1, 2, 3, 16, 64, 256])
def test_neighbours_do_not_correlate(axis, distance):
    steps = np.arange(512 + distance)
    if axis == "token":
        values = noise([[3, 4]], np.arange(256), steps).T
    elif axis == "position":
        values = noise([[3, 4]], steps, np.arange(256))
    else:
        seeds = np.stack([steps, np.full_like(steps, 9)], 1) if axis == "low seed" else np.stack([steps * 0, steps], 1)
        values = noise(seeds, np.full(steps.size, 5), np.arange(256))
    first, second = values[:-distance].ravel(), values[distance:].ravel()
    assert abs(np.corrcoef(first, second)[0, 1]) < 4.5 / np.sqrt(first.size)


def test_exchanged_inputs_give_other_noise():
    base = noise([[3, 4]], [5], np.arange(64))
    for seed, position in (([[4, 3]], 5), ([[3, 5]], 4), ([[5, 4]], 3), ([[3, 4]], 6)):
        assert np.mean(noise(seed, [position], np.arange(64)) == base) < 0.05


@pytest.mark.parametrize("vocab", [7, 100, 1000, 50257])
def test_few_ids_have_the_bits_of_the_full_draw(vocab):
    rng = np.random.default_rng(vocab)
    seeds = jnp.asarray(rng.integers(0, 2**32, (4, 2), dtype=np.uint32))
    positions = jnp.asarray(rng.integers(0, 9000, 4), jnp.int32)

    @jax.jit
    def added_to_logits(logits):
        return logits + gumbel(seeds, positions, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1))

    full = np.asarray(added_to_logits(jnp.zeros((4, vocab))))
    for count in (1, 2, 5, 17):
        ids = rng.integers(0, vocab, (4, count)).astype(np.int32)
        few = np.asarray(gumbel(seeds, positions, jnp.asarray(ids)))
        np.testing.assert_array_equal(few, np.take_along_axis(full, ids, 1))


def test_agrees_with_a_double_precision_definition():
    """An independent computation in Python integers and float64 pins the function: a change of it changes outputs."""
    actual = noise([[123456789, 987654321]], [77], [0, 1, 49151, 262143])[0]
    expected = [_reference(123456789, 987654321, 77, token) for token in (0, 1, 49151, 262143)]
    np.testing.assert_allclose(actual, expected, atol=2e-6)  # float32 at magnitudes up to 8


def _reference(low, high, position, token):
    def mix(h, first_shift, first, second_shift, second):
        h = ((h ^ h >> first_shift) * first) % 2**32
        h = ((h ^ h >> second_shift) * second) % 2**32
        return h ^ h >> 16

    def murmur(h):
        return mix(h % 2**32, 16, 0x85EBCA6B, 13, 0xC2B2AE35)

    def wellons(h):
        return mix(h % 2**32, 16, 0x7FEB352D, 15, 0x846CA68B)

    left = murmur(low ^ wellons(high + 0x9E3779B9))
    right = wellons(high ^ murmur(low + 0x7F4A7C15))
    first_key = murmur(left ^ wellons(position + 0xBB67AE85))
    second_key = wellons(right ^ murmur(position + 0x3C6EF372))
    bits = wellons(murmur(token ^ first_key) ^ second_key)
    return -np.log(-np.log1p(-(bits + 0.5) / 2**32))
