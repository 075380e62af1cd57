"""What comes back for a request: whole results (vLLM's names) and the increments a stream is made of."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural log probability of a token under the model's raw distribution, its 1-based rank, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextDelta:
    """What one step added to one choice of a request.

    text may be empty while characters or stop strings are incomplete; token_ids may be empty when text was held back
    from earlier tokens. logprobs: one dict per entry of token_ids (chosen token first, then alternatives by rank).
    stop_reason: the stop string or stop token id that ended it, None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One finished choice. cumulative_logprob is the sum over chosen tokens, None when logprobs were not asked for."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(kw_only=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt, values of float32."""

    embedding: list[float]


@dataclass(kw_only=True, slots=True)
class EmbeddingRequestOutput:
    """One finished embedding request."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """One finished request. prompt_logprobs[0] is None: nothing predicts the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True
    num_cached_tokens: int = 0
