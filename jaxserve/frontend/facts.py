"""What is known of a served model before any request, and what has been counted since."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxserve.frontend.experts import ExpertFunctions
from jaxserve.tokens import ChatTemplate, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """A snapshot; names ending in _total count since the start."""

    num_running: int
    num_waiting: int
    total_pages: int
    running_pages: int
    cached_pages: int
    free_pages: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefix_queried_tokens_total: int
    prefix_hit_tokens_total: int
    preemptions_total: int
    left_pages_total: int
    steps_total: int
    requests_finished_total: dict[str, int]
    compiles_after_ready_total: int


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the frontend knows of the model it serves, besides the engine. version: what cached prefixes belong to.
    sampling_defaults: what requests are sampled with where they name nothing. embedding_size: values of its hidden
    states."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    embedding_size: int = 0
    experts: ExpertFunctions | None = None
