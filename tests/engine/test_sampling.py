import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.logits import SlotState, transform_logits
from jaxserve.engine.sampling import NOTHING_DRAWN, draw, first_maximum, sample
from jaxserve.step_inputs import SamplingInputs

ROWS, VOCAB, MAX_LEN = 16, 1000, 20


def mixed_batch(seed=0):
    """16 rows with different mixes of every parameter: (logits, inputs, state, allowed)."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(ROWS, VOCAB)) * 3, jnp.float32)

    def choice(values, dtype=jnp.float32):
        return jnp.asarray(rng.choice(values, ROWS), dtype)

    inputs = SamplingInputs(
        temperature=choice([0.0, 0.7, 1.0, 100.0]),
        top_p=choice([1.0, 0.9, 0.3]),
        min_p=choice([0.0, 0.0, 0.05]),
        repetition_penalty=choice([1.0, 1.2]),
        presence_penalty=choice([0.0, 1.0]),
        frequency_penalty=choice([0.0, 0.5]),
        top_k=choice([0, 5, 50], jnp.int32),
        seed=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2), dtype=np.uint32)),
        positions=choice(range(10, MAX_LEN), jnp.int32),
        num_prompt_tokens=choice(range(10), jnp.int32),
        slots=jnp.asarray(rng.permutation(ROWS + 1)[:ROWS], jnp.int32),
        mask_stops=choice([True, False], bool),
        wants_logprobs=choice([True, False], bool),
    )
    state = SlotState(
        history=jnp.asarray(rng.integers(0, VOCAB, (ROWS + 1, MAX_LEN)), jnp.int32),
        bias_ids=jnp.asarray(rng.integers(-1, VOCAB, (ROWS + 1, 4)), jnp.int32),
        bias_values=jnp.asarray(rng.normal(size=(ROWS + 1, 4)) * 5, jnp.float32),
        stop_ids=jnp.asarray(rng.integers(-1, VOCAB, (ROWS + 1, 3)), jnp.int32),
    )
    allowed = jnp.asarray(rng.integers(0, 2**32, (ROWS, -(-VOCAB // 32)), dtype=np.uint32))
    return logits, inputs, state, allowed.at[::2].set(jnp.uint32(0xFFFFFFFF))


def take(batch, rows):
    logits, inputs, state, allowed = batch
    return logits[rows], jax.tree.map(lambda field: field[rows], inputs), state, allowed[rows]


sample_step = jax.jit(sample)
transform_step = jax.jit(transform_logits)


@pytest.mark.parametrize("seed", range(3))
def test_a_row_alone_draws_what_it_draws_in_any_batch(seed):
    batch = mixed_batch(seed)
    together = np.asarray(sample_step(*batch))
    alone = [int(sample_step(*take(batch, np.array([i])))[0]) for i in range(ROWS)]
    assert together.tolist() == alone
    order = np.random.default_rng(seed).permutation(ROWS)
    np.testing.assert_array_equal(sample_step(*take(batch, order)), together[order])
    np.testing.assert_array_equal(sample_step(*take(batch, order[:3])), together[order[:3]])


def test_a_row_alone_has_the_transformed_logits_of_the_batch():
    batch = mixed_batch()
    together = np.asarray(transform_step(*batch))
    for i in range(ROWS):
        np.testing.assert_array_equal(transform_step(*take(batch, np.array([i])))[0], together[i])


def test_padding_rows_of_any_content_do_not_matter():
    batch = mixed_batch()
    expected = np.asarray(sample_step(*take(batch, np.arange(4))))
    logits, inputs, state, allowed = batch
    for content in (0.0, np.nan, np.inf, -np.inf):
        padded = sample_step(logits.at[4:].set(content), inputs, state, allowed)
        np.testing.assert_array_equal(padded[:4], expected)


def plain_inputs(rows, temperature):
    """No penalties and no cut-offs, positions 0, 1, 2, ..."""
    full = lambda value: jnp.full(rows, value, jnp.float32)  # noqa: E731
    return SamplingInputs(
        temperature=full(temperature),
        top_p=full(1.0),
        min_p=full(0.0),
        repetition_penalty=full(1.0),
        presence_penalty=full(0.0),
        frequency_penalty=full(0.0),
        top_k=jnp.zeros(rows, jnp.int32),
        seed=jnp.tile(jnp.asarray([[42, 0]], jnp.uint32), (rows, 1)),
        positions=jnp.arange(rows, dtype=jnp.int32),
        num_prompt_tokens=jnp.zeros(rows, jnp.int32),
        slots=jnp.zeros(rows, jnp.int32),
        mask_stops=jnp.zeros(rows, bool),
        wants_logprobs=jnp.zeros(rows, bool),
    )


def empty_state():
    unused = jnp.full((1, 1), -1, jnp.int32)
    return SlotState(history=unused, bias_ids=unused, bias_values=jnp.zeros((1, 1)), stop_ids=unused)


def chi_square(tokens, probabilities):
    expected = probabilities * tokens.size
    counts = np.bincount(tokens, minlength=probabilities.size)
    return np.sum((counts - expected) ** 2 / expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature):
    rows, vocab = 20_000, 24
    row = np.random.default_rng(5).normal(size=vocab).astype(np.float32)
    logits = jnp.tile(jnp.asarray(row)[None, :], (rows, 1))
    tokens = np.asarray(sample_step(logits, plain_inputs(rows, temperature), empty_state()))
    weights = np.exp(row.astype(np.float64) / temperature)
    assert chi_square(tokens, weights / weights.sum()) < 49.7  # 0.1 % level at 23 degrees of freedom


def test_successive_draws_are_independent():
    rows = 20_000
    tokens = np.asarray(sample_step(jnp.zeros((rows, 4)), plain_inputs(rows, 1.0), empty_state()))
    pairs = tokens[:-1] * 4 + tokens[1:]
    assert chi_square(pairs, np.full(16, 1 / 16)) < 37.7  # 0.1 % level at 15 degrees of freedom


def test_greedy_takes_the_first_maximum():
    logits = jnp.asarray([[1.0, 3.0, 3.0], [0.0, -0.0, 0.0], [-jnp.inf, -5.0, -jnp.inf]])
    assert sample_step(logits, plain_inputs(3, 0.0), empty_state()).tolist() == [1, 0, 1]


def test_noise_touches_only_rows_with_a_temperature():
    logits = jnp.tile(jnp.asarray([[0.0, 0.01, 0.0, 0.0]]), (64, 1))
    temperature = jnp.where(jnp.arange(64) % 2 == 0, 0.0, 1.0)
    inputs = plain_inputs(64, 1.0)
    tokens = np.asarray(draw(logits, inputs.seed, inputs.positions, temperature))
    assert (tokens[::2] == 1).all()
    assert len(set(tokens[1::2].tolist())) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_nan_or_from_no_candidates(temperature):
    logits = jnp.asarray([[jnp.nan] * 3, [-jnp.inf] * 3, [-jnp.inf, 0.0, -jnp.inf]])
    tokens = sample_step(logits, plain_inputs(3, temperature), empty_state())
    assert tokens.tolist() == [NOTHING_DRAWN, NOTHING_DRAWN, 1]


def test_first_maximum_agrees_with_argmax():
    scores = np.round(np.random.default_rng(0).normal(size=(50, 37))).astype(np.float32)
    np.testing.assert_array_equal(first_maximum(jnp.asarray(scores)), scores.argmax(1))


def test_other_seeds_and_positions_draw_other_tokens():
    logits = jnp.zeros((1, 5000))
    zero = jnp.zeros(1, jnp.int32)
    draws = {
        int(draw(logits, jnp.asarray([seed], jnp.uint32), zero + position, jnp.ones(1))[0])
        for seed in ((0, 0), (1, 0), (0, 1))
        for position in (0, 1)
    }
    assert len(draws) == 6
