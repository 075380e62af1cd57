"""Logits as the request wants them: penalties, bias, masks, temperature and cut-offs, without a sort.

Order: repetition, presence and frequency penalties, logit_bias, min_tokens' stop mask, grammar mask, temperature,
top-k, top-p, min-p. The expensive stages sit in `lax.cond` on "does any row want it": one compiled program serves every
mix of requests. A row that does not want a stage passes it unchanged, bit for bit, so that its neighbours do not
matter. What this file does not know: the random draw (noise.py, sampling.py) and who fills the slots.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from jaxserve.step_inputs import SamplingInputs
from pallas_kernels.pytree import pytree

LOWEST_TEMPERATURE = 1e-5  # smaller ones, except 0, act as this one: logits divided by less could overflow
_EVERY_BIT = 0xFFFFFFFF


@pytree
@dataclass(frozen=True, kw_only=True)
class SlotState:
    """What stays on the device per running sequence: one row per slot, and one spare row for padding.

    history: the token id at each position of the sequence. bias_ids, bias_values: logit_bias, unused entries have id
    -1; equal ids add up. stop_ids: end-of-sequence and stop ids, unused entries -1. expert_load: of a mixture the
    tokens of each expert by layer since the start, modulo 2^32, of one data group.
    """

    history: Int32[Array, "slots max_len"]
    bias_ids: Int32[Array, "slots J"]
    bias_values: Float32[Array, "slots J"]
    stop_ids: Int32[Array, "slots S"]
    expert_load: Int32[Array, "groups Y E"] | None = None


def transform_logits(
    logits: Float32[Array, "R V"],
    inputs: SamplingInputs,
    state: SlotState,
    allowed: UInt32[Array, "R W"] | None = None,
) -> Float32[Array, "R V"]:
    """The logits whose softmax is the distribution to draw from; -inf where a token cannot be drawn.

    allowed: one bit per token, token i in bit i % 32 of word i // 32, W = V / 32 rounded up; None when no row has a
    grammar. Rows of temperature 0 pass temperature and cut-offs unchanged. NaN never raises here: a row that holds one
    reaches the draw with NaN or with -inf everywhere, and the draw reports it.
    """
    logits = penalize(logits, inputs, state)
    logits = add_bias(logits, state.bias_ids[inputs.slots], state.bias_values[inputs.slots])
    logits = forbid(logits, jnp.where(inputs.mask_stops[:, None], state.stop_ids[inputs.slots], -1))
    if allowed is not None:
        logits = keep_allowed(logits, allowed)
    random = inputs.temperature > 0
    logits = divide_by_temperature(logits, inputs.temperature)
    floor = top_k_floor(logits, jnp.where(random, inputs.top_k, 0))
    floor = top_p_floor(logits, jnp.where(random, inputs.top_p, 1.0), floor)
    floor = min_p_floor(logits, jnp.where(random, inputs.min_p, 0.0), floor)
    return jnp.where(logits >= floor[:, None], logits, -jnp.inf)


def is_shaped(inputs: SamplingInputs, state: SlotState) -> Bool[Array, ""]:
    """Whether any row wants more of transform_logits than its temperature."""
    penalized = (inputs.repetition_penalty != 1.0) | (inputs.presence_penalty != 0.0)
    penalized |= inputs.frequency_penalty != 0.0
    masked = inputs.mask_stops & jnp.any(state.stop_ids[inputs.slots] >= 0, axis=1)
    cut = (inputs.top_k > 0) | (inputs.top_p < 1.0) | (inputs.min_p > 0.0)
    cut &= inputs.temperature > 0
    return jnp.any(penalized | masked | cut | jnp.any(state.bias_ids[inputs.slots] >= 0, axis=1))


def divide_by_temperature(logits: Float32[Array, "R V"], temperature: Float32[Array, "R"]) -> Float32[Array, "R V"]:
    """The logits over each row's temperature; rows of temperature 0 unchanged."""
    scaled = logits / jnp.maximum(temperature, LOWEST_TEMPERATURE)[:, None]
    return jnp.where(temperature[:, None] > 0, scaled, logits)


def penalize(logits: Float32[Array, "R V"], inputs: SamplingInputs, state: SlotState) -> Float32[Array, "R V"]:
    """Logits after the three penalties, with vLLM's meaning.

    Repetition counts prompt and output: a positive logit is divided by the penalty, a negative one multiplied.
    Presence and frequency count the output only.
    """
    repeats = inputs.repetition_penalty != 1.0
    counts = (inputs.presence_penalty != 0.0) | (inputs.frequency_penalty != 0.0)
    start, end = inputs.num_prompt_tokens, inputs.positions

    def repetition(logits: Array) -> Array:
        seen = _occurrences(state.history[inputs.slots], jnp.zeros_like(end), end, logits.shape[1]) > 0
        penalty = inputs.repetition_penalty[:, None]
        penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
        return jnp.where(seen & repeats[:, None], penalized, logits)

    def presence_and_frequency(logits: Array) -> Array:
        times = _occurrences(state.history[inputs.slots], start, end, logits.shape[1])
        penalty = inputs.frequency_penalty[:, None] * times + jnp.where(
            times > 0, inputs.presence_penalty[:, None], 0.0
        )
        return jnp.where(counts[:, None], logits - penalty, logits)

    logits = lax.cond(jnp.any(repeats), repetition, _unchanged, logits)
    return lax.cond(jnp.any(counts), presence_and_frequency, _unchanged, logits)


def add_bias(
    logits: Float32[Array, "R V"], ids: Int32[Array, "R J"], values: Float32[Array, "R J"]
) -> Float32[Array, "R V"]:
    """Logits plus each row's values at its ids; negative ids are unused, ids beyond the vocabulary fall away."""

    def add(logits: Array) -> Array:
        return logits.at[_rows(ids), _or_beyond(ids, logits.shape[1])].add(values, mode="drop")

    return lax.cond(jnp.any(ids >= 0), add, _unchanged, logits)


def forbid(logits: Float32[Array, "R V"], ids: Int32[Array, "R S"]) -> Float32[Array, "R V"]:
    """Logits with -inf at each row's ids; negative ids are unused entries."""

    def mask(logits: Array) -> Array:
        return logits.at[_rows(ids), _or_beyond(ids, logits.shape[1])].set(-jnp.inf, mode="drop")

    return lax.cond(jnp.any(ids >= 0), mask, _unchanged, logits)


def keep_allowed(logits: Float32[Array, "R V"], allowed: UInt32[Array, "R W"]) -> Float32[Array, "R V"]:
    """Logits with -inf where the row's bit is not set; see transform_logits for the bit order."""

    def mask(logits: Array) -> Array:
        bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
        rows, vocab = logits.shape
        return jnp.where(bits.reshape(rows, -1)[:, :vocab] != 0, logits, -jnp.inf)

    return lax.cond(jnp.any(allowed != jnp.uint32(_EVERY_BIT)), mask, _unchanged, logits)


def top_k_floor(logits: Float32[Array, "R V"], top_k: Int32[Array, "R"]) -> Float32[Array, "R"]:
    """A value per row that exactly the top_k largest logits reach, with all ties of the last; -inf where top_k <= 0."""
    wanted = (top_k > 0) & (top_k < logits.shape[1])

    def search() -> Array:
        def is_enough(floor: Array) -> tuple[Array, Array]:
            # float32 counts exactly up to 2**24, and its masked sum is three times faster than int32's on a CPU.
            count = jnp.sum(jnp.where(logits >= floor[:, None], 1.0, 0.0), axis=1)
            goal = top_k.astype(jnp.float32)
            return count >= goal, count == goal

        return _largest_floor(is_enough, jnp.max(logits, axis=1), wanted)

    return lax.cond(jnp.any(wanted), search, lambda: jnp.full(top_k.shape, -jnp.inf))


def top_p_floor(
    logits: Float32[Array, "R V"], top_p: Float32[Array, "R"], floor: Float32[Array, "R"]
) -> Float32[Array, "R"]:
    """The logit of the last token in the smallest set whose probability reaches top_p, among those at `floor` or above.

    All ties of that token belong to the set. The given floor comes back for rows with top_p >= 1.
    """
    wanted = top_p < 1.0

    def search() -> Array:
        highest = jnp.max(logits, axis=1)
        weights = jnp.exp(logits - jnp.where(jnp.isfinite(highest), highest, 0.0)[:, None])

        def mass(floor: Array) -> Array:
            return jnp.sum(jnp.where(logits >= floor[:, None], weights, 0.0), axis=1)

        goal = top_p * mass(floor)

        def is_enough(tried: Array) -> tuple[Array, Array]:
            return mass(jnp.maximum(tried, floor)) >= goal, jnp.zeros_like(wanted)

        return jnp.maximum(floor, _largest_floor(is_enough, highest, wanted))

    return lax.cond(jnp.any(wanted), search, lambda: floor)


def min_p_floor(
    logits: Float32[Array, "R V"], min_p: Float32[Array, "R"], floor: Float32[Array, "R"]
) -> Float32[Array, "R"]:
    """The floor raised to where a token has min_p times the probability of the likeliest; as given for min_p 0."""

    def raised() -> Array:
        # log(min_p) is -inf for 0 and exactly 0 for 1; a row without any finite logit keeps its floor.
        return jnp.fmax(floor, jnp.max(logits, axis=1) + jnp.log(min_p))

    return lax.cond(jnp.any(min_p > 0), raised, lambda: floor)


def _largest_floor(
    is_enough: Callable[[Array], tuple[Array, Array]], highest: Float32[Array, "R"], wanted: Bool[Array, "R"]
) -> Float32[Array, "R"]:
    """Each row's largest float32 f with is_enough(f), by bisection over the floats in their order; -inf if not wanted.

    is_enough returns (enough, exact): enough must hold at -inf and may only turn false as f grows; exact says that f
    already selects the final set, which ends the search of that row. At most 32 rounds.
    """
    low = jnp.where(wanted, _ordered(jnp.full_like(highest, -jnp.inf)), 0)
    high = jnp.where(wanted, _ordered(highest) + 1, 0)

    def is_open(bounds: tuple[Array, Array]) -> Array:
        return jnp.any(bounds[0] + 1 < bounds[1])

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean without the overflow of low + high
        enough, exact = is_enough(_from_ordered(middle))
        # A closed row must not move: its middle is its low, for which only is_enough's contract vouches.
        still_open = low + 1 < high
        high = jnp.where(still_open & exact, middle + 1, jnp.where(still_open & ~enough, middle, high))
        return jnp.where(still_open & enough, middle, low), high

    low, _ = lax.while_loop(is_open, halve, (low, high))
    return jnp.where(wanted, _from_ordered(low), -jnp.inf)


def _ordered(values: Float32[Array, "R"]) -> Int32[Array, "R"]:
    """Integers in the order of the floats; neighbouring floats have neighbouring integers."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(integers: Int32[Array, "R"]) -> Float32[Array, "R"]:
    bits = jnp.where(integers < 0, integers ^ 0x7FFFFFFF, integers)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _occurrences(
    history: Int32[Array, "R max_len"], start: Int32[Array, "R"], end: Int32[Array, "R"], vocab: int
) -> Float32[Array, "R V"]:
    """How often each token stands at the positions from start up to, not including, end."""
    at = jnp.arange(history.shape[1], dtype=jnp.int32)[None, :]
    ids = jnp.where((at >= start[:, None]) & (at < end[:, None]), history, -1)
    counts = jnp.zeros((history.shape[0], vocab), jnp.float32)
    return counts.at[_rows(ids), _or_beyond(ids, vocab)].add(1.0, mode="drop")


def _rows(ids: Int32[Array, "R N"]) -> Int32[Array, "R N"]:
    return lax.broadcasted_iota(jnp.int32, ids.shape, 0)


def _or_beyond(ids: Int32[Array, "R N"], vocab: int) -> Int32[Array, "R N"]:
    """The ids with unused ones moved past the vocabulary, where scatters drop them; a negative index would wrap."""
    return jnp.where(ids >= 0, ids, vocab)


def _unchanged(logits: Array) -> Array:
    return logits
