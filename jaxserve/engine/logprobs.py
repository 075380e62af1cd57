"""Log probabilities of chosen tokens and of the likeliest ones, from the model's raw logits as vLLM reports them."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.step_inputs import TokenLogprobs

UNUSED_ID = -1


def token_logprobs(logits: Float32[Array, "R V"], tokens: Int32[Array, "R"], num_top: int) -> TokenLogprobs:
    """Raw log softmax of the chosen tokens, their rank, and the num_top likeliest tokens.

    rank is the number of tokens whose logit is at least the chosen one's, the chosen token included: tied tokens all
    have the last rank of their group, as in vLLM. An id outside the vocabulary has chosen = -inf and rank = V; a row
    with NaN has NaN.
    """
    vocab = logits.shape[1]
    highest = jnp.max(logits, axis=1)
    normalizer = highest + jnp.log(jnp.sum(jnp.exp(logits - highest[:, None]), axis=1))
    known = (tokens >= 0) & (tokens < vocab)
    picked = jnp.take_along_axis(logits, jnp.where(known, tokens, 0)[:, None], axis=1)[:, 0]
    picked = jnp.where(known, picked, -jnp.inf)
    rank = jnp.sum(jnp.where(logits >= picked[:, None], 1.0, 0.0), axis=1).astype(jnp.int32)
    top, ids = lax.top_k(logits, min(num_top, vocab))
    missing = ((0, 0), (0, max(0, num_top - vocab)))
    return TokenLogprobs(
        chosen=picked - normalizer,
        rank=rank,
        top_ids=jnp.pad(ids, missing, constant_values=UNUSED_ID),
        top_logprobs=jnp.pad(top - normalizer[:, None], missing, constant_values=-jnp.inf),
    )


def token_logprobs_if_wanted(
    logits: Float32[Array, "R V"], tokens: Int32[Array, "R"], wanted: Bool[Array, "R"], num_top: int
) -> TokenLogprobs:
    """token_logprobs for all rows when any row wants them; otherwise zeros, at no cost. Rows that do not want it must
    not read theirs."""

    def nothing() -> TokenLogprobs:
        return no_logprobs(tokens.shape[0], num_top)

    return lax.cond(jnp.any(wanted), lambda: token_logprobs(logits, tokens, num_top), nothing)


def no_logprobs(rows: int, num_top: int) -> TokenLogprobs:
    """Zeros in the shape of token_logprobs, for a step in which nobody wants them."""
    return TokenLogprobs(
        chosen=jnp.zeros(rows, jnp.float32),
        rank=jnp.zeros(rows, jnp.int32),
        top_ids=jnp.zeros((rows, num_top), jnp.int32),
        top_logprobs=jnp.zeros((rows, num_top), jnp.float32),
    )
