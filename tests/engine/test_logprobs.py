import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.logprobs import token_logprobs, token_logprobs_if_wanted


def log_softmax(logits):
    wide = logits.astype(np.float64)
    wide = wide - wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


@pytest.mark.parametrize(("rows", "vocab", "num_top"), [(1, 33, 5), (4, 1000, 20), (3, 7, 0), (2, 7, 7)])
def test_matches_a_sorted_reference(rows, vocab, num_top):
    rng = np.random.default_rng(vocab)
    logits = (rng.normal(size=(rows, vocab)) * 5).astype(np.float32)
    logits[:, 3] = -np.inf
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    got = jax.jit(token_logprobs, static_argnums=2)(jnp.asarray(logits), jnp.asarray(tokens), num_top)
    expected = log_softmax(logits)
    chosen = np.take_along_axis(logits, tokens[:, None], 1)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    # float32 sums of up to 1000 terms
    np.testing.assert_allclose(got.chosen, np.take_along_axis(expected, tokens[:, None], 1)[:, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.rank, (logits >= chosen).sum(1))
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(expected, order, 1), rtol=1e-5, atol=1e-5)


def test_likeliest_token_has_rank_one_and_ties_the_last_of_their_group():
    logits = jnp.asarray([[5.0, 1.0, 1.0, 0.0]] * 4)
    got = token_logprobs(logits, jnp.arange(4, dtype=jnp.int32), 3)
    assert got.rank.tolist() == [1, 3, 3, 4]
    assert got.top_ids[0].tolist() == [0, 1, 2]


def test_more_alternatives_than_tokens_are_marked_unused():
    got = token_logprobs(jnp.zeros((1, 3)), jnp.zeros(1, jnp.int32), 5)
    assert got.top_ids.tolist() == [[0, 1, 2, -1, -1]]
    np.testing.assert_allclose(got.top_logprobs[0, :3], -np.log(3), rtol=1e-6)
    assert np.isneginf(got.top_logprobs[0, 3:]).all()


def test_large_logits_do_not_overflow_and_nothing_drawn_is_impossible():
    got = token_logprobs(jnp.asarray([[1e4, 0.0], [1e4, 1e4]]), jnp.asarray([0, -1], jnp.int32), 1)
    assert got.chosen[0] == 0
    assert np.isneginf(got.chosen[1])
    assert got.rank.tolist() == [1, 2]


def test_row_of_nan_does_not_change_its_neighbour():
    logits = jnp.asarray([[jnp.nan] * 4, [1.0, 2.0, 3.0, 4.0]])
    got = token_logprobs(logits, jnp.asarray([0, 3], jnp.int32), 2)
    alone = token_logprobs(logits[1:], jnp.asarray([3], jnp.int32), 2)
    assert np.isnan(got.chosen[0])
    assert got.chosen[1] == alone.chosen[0]
    assert got.top_ids[1].tolist() == [3, 2]


def test_are_computed_for_all_when_any_row_wants_them():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 9)), jnp.float32)
    tokens = jnp.asarray([1, 2], jnp.int32)
    some = token_logprobs_if_wanted(logits, tokens, jnp.asarray([False, True]), 2)
    expected = token_logprobs(logits, tokens, 2)
    for got, field in zip(jax.tree.leaves(some), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, field, rtol=1e-6)  # compiled against op by op
    none = token_logprobs_if_wanted(logits, tokens, jnp.asarray([False, False]), 2)
    assert not none.rank.any()
    assert not none.chosen.any()
