"""What stays on the device per running sequence: made, and written when a request is placed."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from jaxserve.engine.logits import SlotState
from jaxserve.engine.step import Program
from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

MAX_EOS_TOKENS = 16


def empty_state(program: Program, num_slots: int, max_len: int) -> SlotState:
    """Slot state with nothing in it; each data group has a spare row after those of its slots."""
    rows, moe = (num_slots + 1) * program.num_groups, getattr(program.config, "moe", None)
    counted = None if moe is None else (program.num_groups, program.config.num_layers, moe.num_experts)
    return SlotState(
        history=jnp.zeros((rows, max_len), jnp.int32),
        bias_ids=jnp.full((rows, MAX_LOGIT_BIAS), -1, jnp.int32),
        bias_values=jnp.zeros((rows, MAX_LOGIT_BIAS), jnp.float32),
        stop_ids=jnp.full((rows, MAX_STOP_TOKEN_IDS + MAX_EOS_TOKENS), -1, jnp.int32),
        expert_load=None if counted is None else jnp.zeros(counted, jnp.int32),
    )


def set_slot(
    state: SlotState,
    slot: Int32[Array, ""],
    history: Int32[Array, "L"],
    bias_ids: Int32[Array, "J"],
    bias_values: Float32[Array, "J"],
    stop_ids: Int32[Array, "S"],
) -> SlotState:
    """The state with one request's row."""
    return replace(
        state,
        history=state.history.at[slot].set(history),
        bias_ids=state.bias_ids.at[slot].set(bias_ids),
        bias_values=state.bias_values.at[slot].set(bias_values),
        stop_ids=state.stop_ids.at[slot].set(stop_ids),
    )
