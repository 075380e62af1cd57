"""What the engine keeps per request beside the scheduler's view, and what it says after each step."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from jaxserve.engine.pooling import PooledPrompt
from jaxserve.outputs import FinishReason
from jaxserve.sampling_params import SamplingParams

_WORD = 0xFFFFFFFF_FFFFFFFF


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The chosen token's log probability and rank, and the likeliest alternatives, as plain numbers."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(slots=True, kw_only=True, eq=False)
class EngineRequest:
    """The scheduler's payload. prompt_logprobs: one entry per prompt position once computed, None when not wanted.
    pooled: for requests of an embedding only."""

    params: SamplingParams
    seed: int
    prompt_logprobs: list[TopTokens | None] | None = None
    pooled: PooledPrompt | None = None


@dataclass(slots=True, kw_only=True, eq=False)  # not frozen: one per running request and step, and that costs 4x
class EngineEvent:
    """What one step did for one request. logprobs: parallel to token_ids, None when not wanted."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TopTokens, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TopTokens | None] | None = field(default=None, repr=False)


@dataclass(slots=True, kw_only=True, eq=False)
class EmbeddingEvent(EngineEvent):
    """The one event of an embedding request, which ends it: no tokens, and the pooled hidden states of its prompt."""

    pooled: list[float] = field(repr=False)


def needs_slot_state(params: SamplingParams) -> bool:
    """Whether sampling reads the request's history, bias or stop ids on the device."""
    return bool(
        params.logit_bias
        or params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
    )


def sample_seed(seed: int, index: int) -> int:
    """The 64-bit seed of choice `index` of a request: its own seed for the first, unrelated ones for the others."""
    if index == 0:
        return seed & _WORD
    words = (seed & _WORD).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def fresh_seed(engine_seed: int, serial: int) -> int:
    """The seed of a request that named none: reproducible from the engine's seed and the order of requests."""
    return sample_seed(engine_seed, serial + 1)


def top_tokens(token_id: int, arrays: tuple[np.ndarray, ...], at: int, count: int) -> TopTokens:
    """Row `at` of fetched log probabilities (chosen, rank, top ids, top logprobs), with `count` alternatives."""
    chosen, rank, top_ids, top_logprobs = arrays
    return TopTokens(
        token_id, float(chosen[at]), int(rank[at]), top_ids[at, :count].tolist(), top_logprobs[at, :count].tolist()
    )
