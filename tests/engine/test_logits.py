"""Every stage against a plain numpy reference that sorts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine import logits as stages
from jaxserve.engine.logits import SlotState, transform_logits
from jaxserve.step_inputs import SamplingInputs

NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def make_inputs(rows, **choices):
    """Inputs that change nothing, but for the given ones (a number for all rows or a value per row)."""
    fields = {name: np.full(rows, 1, np.float32) * choices.pop(name, value) for name, value in NEUTRAL.items()}
    whole = {"top_k": 0, "positions": 0, "num_prompt_tokens": 0, "slots": np.arange(rows)}
    for name, value in whole.items():
        fields[name] = np.full(rows, 1, np.int32) * choices.pop(name, value)
    for name in ("mask_stops", "wants_logprobs"):
        fields[name] = np.full(rows, choices.pop(name, False))
    fields["seed"] = np.asarray(choices.pop("seed", np.zeros((rows, 2))))
    assert not choices
    dtypes = dict.fromkeys(NEUTRAL, jnp.float32) | dict.fromkeys(whole, jnp.int32) | {"seed": jnp.uint32}
    return SamplingInputs(**{name: jnp.asarray(value, dtypes.get(name)) for name, value in fields.items()})


def make_state(slots, max_len=8, **choices):
    empty = {
        "history": np.zeros((slots, max_len)),
        "bias_ids": np.full((slots, 3), -1),
        "bias_values": np.zeros((slots, 3)),
        "stop_ids": np.full((slots, 2), -1),
    }
    dtypes = {"bias_values": jnp.float32}
    return SlotState(**{k: jnp.asarray(choices.get(k, v), dtypes.get(k, jnp.int32)) for k, v in empty.items()})


def random_logits(rng, rows, vocab, ties=False, infinities=False):
    logits = (rng.normal(size=(rows, vocab)) * rng.choice([0.01, 1, 5, 30])).astype(np.float32)
    if ties:
        logits = np.round(logits)
    if infinities:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[:, rng.integers(vocab)] = 1.0
    return logits


def probabilities(row):
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def kept_by_top_k(row, k):
    if k <= 0 or k >= row.size:
        return np.ones(row.size, bool)
    return row >= np.sort(row)[::-1][k - 1]


def kept_by_top_p(row, top_p):
    if top_p >= 1:
        return np.ones(row.size, bool)
    order = np.argsort(-row, kind="stable")
    reached = np.cumsum(probabilities(row)[order]) >= top_p
    return row >= row[order[np.argmax(reached)]]


def transformed(logits, **choices):
    inputs = make_inputs(logits.shape[0], **choices)
    return np.asarray(transform(jnp.asarray(logits), inputs, make_state(logits.shape[0])))


transform = jax.jit(transform_logits)

shapes = st.sampled_from([(1, 5), (4, 257)])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=shapes, ties=st.booleans(), infinities=st.booleans(), data=st.data())
def test_top_k_keeps_the_sorted_reference_set(seed, shape, ties, infinities, data):
    logits = random_logits(np.random.default_rng(seed), *shape, ties=ties, infinities=infinities)
    k = np.array(data.draw(st.lists(st.integers(-1, shape[1] + 3), min_size=shape[0], max_size=shape[0])))
    got = transformed(logits, top_k=k)
    expected = np.stack([np.where(kept_by_top_k(row, n), row, -np.inf) for row, n in zip(logits, k, strict=True)])
    np.testing.assert_array_equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), shape=shapes, ties=st.booleans(), infinities=st.booleans(), data=st.data())
def test_top_p_keeps_the_smallest_set_that_reaches_it(seed, shape, ties, infinities, data):
    logits = random_logits(np.random.default_rng(seed), *shape, ties=ties, infinities=infinities)
    top_p = np.array(data.draw(st.lists(st.floats(2**-10, 1, width=32), min_size=shape[0], max_size=shape[0])))
    got = transformed(logits, top_p=top_p)
    for row, kept, p in zip(logits, np.isfinite(got), top_p, strict=True):
        assert_is_nucleus(row, kept, np.isfinite(row), p)


def assert_is_nucleus(row, kept, candidates, top_p):
    """kept is the reference set, for top_p or for one that differs by float32's error in a sum of 257 terms."""
    among = np.where(candidates, row, -np.inf).astype(np.float32)
    nearby = [top_p] if top_p >= 1 else [top_p, top_p - 2e-6, top_p + 2e-6]
    assert any(np.array_equal(kept, kept_by_top_p(among, p) & candidates) for p in nearby)


@pytest.mark.parametrize("ties", [False, True])
def test_top_p_measures_the_distribution_after_top_k(ties):
    logits = np.random.default_rng(1).normal(size=(4, 257)).astype(np.float32)  # flat: the tail has most of the mass
    logits = np.round(logits, 1) if ties else logits
    k = np.array([2, 10, 50, 400])
    got = transformed(logits, top_k=k, top_p=0.6)
    for row, kept, n in zip(logits, np.isfinite(got), k, strict=True):
        assert_is_nucleus(row, kept, kept_by_top_k(row, n), np.float32(0.6))


@pytest.mark.parametrize("min_p", [0.0, 0.03, 0.5, 1.0])
def test_min_p_keeps_tokens_by_their_share_of_the_maximum(min_p):
    logits = random_logits(np.random.default_rng(2), 4, 257)
    got = transformed(logits, min_p=min_p)
    for row, kept in zip(logits, np.isfinite(got), strict=True):
        share = np.exp(row.astype(np.float64) - row.max())
        clear = np.abs(share - min_p) > 1e-5
        np.testing.assert_array_equal(kept[clear], (share >= min_p)[clear])
        assert kept[row.argmax()]


def test_exact_boundaries_of_the_cut_offs():
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32))
    assert np.isfinite(transformed(logits, top_p=0.4)).tolist() == [[True, False, False, False]]
    assert np.isfinite(transformed(logits, top_p=0.6)).tolist() == [[True, True, False, False]]
    assert np.isfinite(transformed(logits, top_p=0.8)).tolist() == [[True] * 4]  # both ties stay
    assert np.isfinite(transformed(logits, top_k=3)).tolist() == [[True] * 4]
    assert np.isfinite(transformed(logits, top_k=1, min_p=1.0, top_p=0.01)).tolist() == [[True, False, False, False]]


def test_top_p_of_zero_keeps_the_likeliest():
    assert np.isfinite(transformed(np.array([[1.0, 3.0, 2.0]], np.float32), top_p=0.0)).tolist() == [
        [False, True, False]
    ]


@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 0.7, 1.0, 100.0])
def test_temperature_divides(temperature):
    logits = random_logits(np.random.default_rng(3), 2, 65, infinities=True)
    got = transformed(logits, temperature=temperature)
    # XLA may multiply by the reciprocal: one rounding more
    np.testing.assert_allclose(got, logits / np.float32(max(temperature, 1e-5)), rtol=3e-7)


def test_temperature_comes_before_top_p_and_min_p():
    logits = np.array([[0.0, -1.0, -2.0]], np.float32)
    assert np.isfinite(transformed(logits, temperature=0.1, top_p=0.99)).sum() == 1
    assert np.isfinite(transformed(logits, temperature=100.0, top_p=0.99)).sum() == 3
    assert np.isfinite(transformed(logits, temperature=0.1, min_p=0.1)).sum() == 1
    assert np.isfinite(transformed(logits, temperature=100.0, min_p=0.1)).sum() == 3


def test_greedy_rows_pass_temperature_and_cut_offs_unchanged():
    logits = random_logits(np.random.default_rng(4), 2, 65)
    got = transformed(logits, temperature=np.array([0.0, 0.5]), top_k=1, top_p=0.5, min_p=0.5)
    np.testing.assert_array_equal(got[0], logits[0])
    assert np.isfinite(got[1]).sum() == 1


def penalty_reference(row, prompt, output, repetition, presence, frequency):
    row = row.copy()
    for token in set(prompt) | set(output):
        row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
    for token in set(output):
        row[token] -= frequency * np.float32(output.count(token)) + presence
    return row


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.0, 1.0]))
def test_penalties_match_a_reference_that_counts(seed, temperature):
    rng = np.random.default_rng(seed)
    rows, vocab, max_len = 4, 33, 12
    logits = random_logits(rng, rows, vocab, infinities=True)
    history = rng.integers(0, vocab, (6, max_len))
    prompt_tokens = rng.integers(0, max_len, rows)
    positions = rng.integers(prompt_tokens, max_len + 1)
    slots = rng.permutation(6)[:rows]
    repetition = rng.choice([1.0, 1.3, 0.5], rows).astype(np.float32)
    presence = rng.choice([0.0, 2.0, -1.0], rows).astype(np.float32)
    frequency = rng.choice([0.0, 0.5, -0.3], rows).astype(np.float32)
    inputs = make_inputs(
        rows,
        temperature=temperature,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        positions=positions,
        num_prompt_tokens=prompt_tokens,
        slots=slots,
    )
    got = np.asarray(transform(jnp.asarray(logits), inputs, make_state(6, max_len, history=history)))
    for i in range(rows):
        tokens = history[slots[i]].tolist()
        prompt, output = tokens[: prompt_tokens[i]], tokens[prompt_tokens[i] : positions[i]]
        expected = penalty_reference(logits[i], prompt, output, repetition[i], presence[i], frequency[i])
        np.testing.assert_allclose(got[i], expected, rtol=1e-6, atol=1e-6)  # a fused product rounds once less


def test_bias_adds_up_and_unused_or_unknown_ids_fall_away():
    state = make_state(2, bias_ids=[[1, -1, 1], [-1, 4, 99]], bias_values=[[-100, 7, 2], [5, 100, 3]])
    got = np.asarray(transform(jnp.zeros((2, 5)), make_inputs(2), state))
    assert got.tolist() == [[0, -98, 0, 0, 0], [0, 0, 0, 0, 100]]


def test_bias_does_not_revive_an_impossible_token():
    state = make_state(1, bias_ids=[[0, -1, -1]], bias_values=[[100, 0, 0]])
    got = transform(jnp.asarray([[-jnp.inf, 1.0]]), make_inputs(1), state)
    assert got.tolist() == [[-np.inf, 1.0]]


def test_bias_is_added_after_the_penalties_and_before_the_stop_mask():
    state = make_state(
        1, history=[[0, 1] + [0] * 6], bias_ids=[[0, 1, -1]], bias_values=[[3, 100, 0]], stop_ids=[[1, -1]]
    )
    inputs = make_inputs(1, positions=2, repetition_penalty=2.0, mask_stops=True)
    assert transform(jnp.asarray([[4.0, 4.0, 1.0]]), inputs, state).tolist() == [[5.0, -np.inf, 1.0]]


def test_stop_ids_are_masked_only_where_asked():
    state = make_state(2, stop_ids=[[0, 2], [0, -1]])
    got = np.asarray(transform(jnp.zeros((2, 3)), make_inputs(2, mask_stops=np.array([True, False])), state))
    assert np.isneginf(got).tolist() == [[True, False, True], [False, False, False]]


@pytest.mark.parametrize("vocab", [31, 32, 33, 100])
def test_grammar_mask_keeps_the_set_bits(vocab):
    rng = np.random.default_rng(vocab)
    bits = rng.random((3, vocab)) < 0.5
    bits[1] = True
    words = np.zeros((3, -(-vocab // 32)), np.uint32)
    for row, token in np.argwhere(bits):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    got = stages.keep_allowed(jnp.zeros((3, vocab)), jnp.asarray(words))
    np.testing.assert_array_equal(np.isfinite(got), bits)


def test_masked_tokens_do_not_count_for_top_k_or_top_p():
    state = make_state(1, stop_ids=[[0, -1]])
    logits = jnp.asarray([[9.0, 3.0, 2.0, 1.0]])
    inputs = make_inputs(1, mask_stops=True, top_k=2)
    assert np.isfinite(transform(logits, inputs, state)).tolist() == [[False, True, True, False]]
    allowed = jnp.asarray([[0b1100]], jnp.uint32)
    assert np.isfinite(transform(logits, make_inputs(1, top_p=0.5), state, allowed)).tolist() == [
        [False, False, True, False]
    ]


def test_rows_of_nan_and_of_nothing_allowed_leave_the_others_alone():
    logits = np.stack([np.full(40, np.nan), np.full(40, -np.inf), np.arange(40)]).astype(np.float32)
    got = transformed(logits, top_k=3, top_p=0.9, min_p=0.01)
    assert not np.isfinite(got[:2]).any()
    np.testing.assert_array_equal(got[2], transformed(logits[2:], top_k=3, top_p=0.9, min_p=0.01)[0])


def test_floats_keep_their_order_as_integers():
    values = np.array([-np.inf, -3e38, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 3e38, np.inf], np.float32)
    integers = np.asarray(stages._ordered(jnp.asarray(values))).astype(np.int64)
    assert (np.diff(integers) > 0).all()
    back = np.asarray(stages._from_ordered(jnp.asarray(integers, jnp.int32)))
    np.testing.assert_array_equal(back.view(np.int32), values.view(np.int32))
