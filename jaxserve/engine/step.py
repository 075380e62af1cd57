"""The compiled step: tokens in, tokens out, cache and slot state donated. Sampling happens inside."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int32

from jaxserve.engine.logits import SlotState
from jaxserve.engine.logprobs import no_logprobs, token_logprobs, token_logprobs_if_wanted
from jaxserve.engine.pooling import pooled_states
from jaxserve.engine.sampling import sample
from jaxserve.engine.spread import Spread
from jaxserve.kv_cache import Cache, CacheSpec, empty_cache
from jaxserve.layer_groups import Paging
from jaxserve.layers.spread import joined
from jaxserve.models.model import Model
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.step_inputs import StepInputs, StepOutputs, StepShape, TokenLogprobs, unpack
from pallas_kernels.kernels import Kernels
from pallas_kernels.ragged import positions_of_tokens

PROMPT_LOGPROB_ROWS = 64  # prompt logits are made for so many tokens at a time: [64, V] instead of [T, V]


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the step is compiled from besides its shape. spread: over which devices, one where it is None."""

    model: Model
    config: Any
    kernels: Kernels
    dtype: str
    spread: Spread | None = None

    def forward(
        self, params: Any, token_ids: Int32[Array, "T"], layout: Paging, cache: Cache
    ) -> tuple[Float[Array, "T D"], Cache, Int32[Array, "Y E"] | None]:
        """Hidden states after the last norm, the cache with this step's tokens, and of a mixture the tokens of each
        expert by layer. On one device, or as its part."""
        return self.model.forward(params, self.config, self.kernels, token_ids, layout, cache, dtype=self.dtype)

    def unembed(self, params: Any, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits of hidden states, all of them on each device."""
        logits = self.model.unembed(params, self.config, self.kernels, hidden)
        return joined(self.kernels, logits, "tensor", 1)[:, : self.config.vocab_size]

    def of_one_device(self) -> "Program":
        """What each device runs with its part of the weights."""
        if self.spread is None:
            return self
        kernels = self.spread.kernels_of_one_device(self.kernels)
        return replace(self, config=self.spread.of_one_device, kernels=kernels, spread=None)

    @property
    def num_groups(self) -> int:
        """Data groups, each with requests of its own."""
        return 1 if self.spread is None else self.spread.plan.data

    def for_context(self, max_model_len: int) -> "Program":
        """The program for sequences of up to so many tokens."""
        config = self.model.for_context(self.config, max_model_len)
        spread = None if self.spread is None else replace(self.spread, config=config)
        return replace(self, config=config, spread=spread)

    def with_params(self, params: Any) -> "Program":
        """The program for these parameters, which lie where it runs."""
        if self.spread is None:
            return self
        return replace(self, spread=self.spread.with_params(params))

    def new_cache(self, spec: CacheSpec, num_pages: int) -> Cache:
        """A cache of zeros where the program runs."""
        make = partial(empty_cache, spec, num_pages, self.kernels)
        return make() if self.spread is None else self.spread.placed_cache(make)

    @property
    def everywhere(self) -> NamedSharding | None:
        """Where arrays go that every device needs; None on one device."""
        return None if self.spread is None else self.spread.everywhere

    @property
    def by_group(self) -> NamedSharding | None:
        """Where arrays go of which each data group has its part; None on one device."""
        return None if self.spread is None else self.spread.by_group


StepFunction = Callable[[Any, Cache, SlotState, Array], tuple[StepOutputs, Cache, SlotState]]


def step_function(program: Program, shape: StepShape) -> StepFunction:
    """The jitted step of one bucket; cache and state are donated."""
    step = partial(_step, program.of_one_device(), shape)
    return jax.jit(step if program.spread is None else partial(program.spread.step, step), donate_argnums=(1, 2))


def _step(
    program: Program, shape: StepShape, params: Any, cache: Cache, state: SlotState, buffer: Int32[Array, "W"]
) -> tuple[StepOutputs, Cache, SlotState]:
    inputs = unpack(buffer, shape)
    token_ids, state = _known_tokens(inputs, state)
    hidden, cache, load = program.forward(params, token_ids, inputs.paging, cache)
    unembed = partial(program.unembed, params)
    last = jnp.clip(inputs.layout.query_starts[1:] - 1, 0, shape.num_tokens - 1)
    logits = unembed(hidden[last])
    drawn = sample(logits, inputs.sampling, state)
    outputs = StepOutputs(
        token_ids=drawn,
        logprobs=token_logprobs_if_wanted(logits, drawn, inputs.sampling.wants_logprobs, MAX_LOGPROBS),
        prompt_logprobs=_prompt_logprobs(unembed, hidden, inputs),
        pooled=pooled_states(hidden, inputs.layout, inputs.pooling),
    )
    state = _remember(state, inputs, drawn)
    if load is not None:
        assert state.expert_load is not None, "a mixture's state counts its experts' tokens"
        state = replace(state, expert_load=state.expert_load + load[None])
    return outputs, cache, state


def _known_tokens(inputs: StepInputs, state: SlotState) -> tuple[Int32[Array, "T"], SlotState]:
    """Token ids with those of the device filled in, and the history with this step's tokens."""
    rows, positions, exists = positions_of_tokens(inputs.layout, inputs.token_ids.shape[0])
    slots = inputs.slots[rows]
    max_len = state.history.shape[1]
    drawn_before = state.history[slots, jnp.clip(positions, 0, max_len - 1)]
    token_ids = jnp.where(inputs.token_ids >= 0, inputs.token_ids, drawn_before)
    token_ids = jnp.where(exists, jnp.maximum(token_ids, 0), 0)
    at = (slots, jnp.where(exists, positions, max_len))
    history = state.history.at[at].set(token_ids, mode="drop")
    return token_ids, _with_history(state, history)


def _remember(state: SlotState, inputs: StepInputs, drawn: Int32[Array, "B"]) -> SlotState:
    """The history with each drawn token at the position it will have."""
    max_len = state.history.shape[1]
    positions = jnp.where(inputs.draws > 0, inputs.layout.kv_lengths, max_len)
    return _with_history(state, state.history.at[inputs.slots, positions].set(drawn, mode="drop"))


def _with_history(state: SlotState, history: Array) -> SlotState:
    return replace(state, history=history)


def _prompt_logprobs(
    unembed: Callable[[Array], Array], hidden: Float[Array, "T D"], inputs: StepInputs
) -> TokenLogprobs:
    """Log probabilities of target_ids at every token; zeros at no cost when nobody wants them."""
    num_tokens = hidden.shape[0]
    rows = min(PROMPT_LOGPROB_ROWS, num_tokens)
    padding = -num_tokens % rows

    def some(block: tuple[Array, Array]) -> tuple[Array, ...]:
        found = token_logprobs(unembed(block[0]), block[1], MAX_LOGPROBS)
        return found.chosen, found.rank, found.top_ids, found.top_logprobs

    def compute() -> TokenLogprobs:
        blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, rows, hidden.shape[1])
        targets = jnp.pad(inputs.target_ids, (0, padding)).reshape(-1, rows)
        chosen, rank, top_ids, top_logprobs = (
            a.reshape(-1, *a.shape[2:])[:num_tokens] for a in lax.map(some, (blocks, targets))
        )
        return TokenLogprobs(chosen=chosen, rank=rank, top_ids=top_ids, top_logprobs=top_logprobs)

    return lax.cond(inputs.wants_prompt_logprobs > 0, compute, lambda: no_logprobs(num_tokens, MAX_LOGPROBS))


def logits_of_tokens(
    program: Program, params: Any, cache: Cache, token_ids: Int32[Array, "T"], layout: Paging
) -> tuple[Float[Array, "T V"], Cache]:
    """Logits at every token: the pure function under the engine, for notebooks and parity tests."""
    if program.spread is not None:
        return program.spread.logits(
            partial(logits_of_tokens, program.of_one_device()), params, cache, token_ids, layout
        )
    hidden, cache, _ = program.forward(params, token_ids, layout, cache)
    return program.unembed(params, hidden), cache
