"""One token for each row: a draw by Gumbel-max, or the likeliest token at temperature 0.

A row's token is a function of that row's logits, parameters, seed and position. Neighbours, their number and their
order, padding and preemption cannot change it. The shaping of logits is in logits.py, the noise in noise.py.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.engine.logits import SlotState, divide_by_temperature, is_shaped, transform_logits
from jaxserve.engine.noise import gumbel
from jaxserve.step_inputs import SamplingInputs

NOTHING_DRAWN = -1


def sample(
    logits: Float32[Array, "R V"],
    inputs: SamplingInputs,
    state: SlotState,
    allowed: UInt32[Array, "R W"] | None = None,
) -> Int32[Array, "R"]:
    """The token each row draws from the model's logits; NOTHING_DRAWN as in `first_maximum`.

    When no row wants more than its temperature, the stages are skipped as a whole: on a CPU each of their conditionals
    would pass all logits through memory.
    """

    def greedy(logits: Array) -> Array:
        return first_maximum(logits)

    def tempered(logits: Array) -> Array:
        divided = divide_by_temperature(logits, inputs.temperature)
        return draw(divided, inputs.seed, inputs.positions, inputs.temperature)

    def shaped(logits: Array) -> Array:
        transformed = transform_logits(logits, inputs, state, allowed)
        return draw(transformed, inputs.seed, inputs.positions, inputs.temperature)

    if allowed is not None:
        return shaped(logits)
    is_random = jnp.any(inputs.temperature > 0)
    wanted = jnp.where(is_shaped(inputs, state), 2, jnp.where(is_random, 1, 0))
    return lax.switch(wanted, (greedy, tempered, shaped), logits)


def draw(
    transformed: Float32[Array, "R V"],
    seed: UInt32[Array, "R 2"],
    positions: Int32[Array, "R"],
    temperature: Float32[Array, "R"],
) -> Int32[Array, "R"]:
    """argmax(logits + noise), which is a draw from their softmax; the plain argmax for rows of temperature 0.

    Temperature is only asked whether it is 0: the logits are already divided by it.
    """
    random = temperature > 0

    def with_noise() -> Array:
        token_ids = lax.broadcasted_iota(jnp.int32, transformed.shape, 1)
        return transformed + jnp.where(random[:, None], gumbel(seed, positions, token_ids), 0.0)

    return first_maximum(lax.cond(jnp.any(random), with_noise, lambda: transformed))


def first_maximum(scores: Float32[Array, "R V"]) -> Int32[Array, "R"]:
    """The index of each row's maximum, the first on ties; NOTHING_DRAWN where a row holds NaN or only -inf.

    Two plain reductions instead of jnp.argmax, which is ten times slower on a CPU.
    """
    highest = jnp.max(scores, axis=1)
    vocab = scores.shape[1]
    token_ids = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    first = jnp.min(jnp.where(scores == highest[:, None], token_ids, vocab), axis=1)
    return jnp.where((highest > -jnp.inf) & (first < vocab), first, NOTHING_DRAWN)
