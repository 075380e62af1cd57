"""What the server needs from the rest of jaxserve, as protocols, and the state one app shares between its routes.

`jaxserve.frontend.Frontend` satisfies `ServedFrontend`; so does the fake in the tests. Nothing here imports an engine.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.requests import Request

from jaxserve.errors import ModelNotFound
from jaxserve.outputs import Logprob, TextDelta
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.metrics import EngineCounters, ServedExperts, ServerMetrics
from jaxserve.server.options import ServerOptions


@runtime_checkable
class TokenText(Protocol):
    """The part of a tokenizer that requests and answers need."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...
    def token_text(self, token_id: int, /) -> str: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    @property
    def vocab_size(self) -> int: ...


@runtime_checkable
class ServedGeneration(Protocol):
    """One submitted prompt with its n choices, read as an async iterator of deltas."""

    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None: ...
    @property
    def pooled(self) -> list[float] | None: ...
    def abort(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[TextDelta]: ...


@runtime_checkable
class ServedFrontend(Protocol):
    """What `create_app` serves."""

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tokenizer(self) -> TokenText | None: ...
    @property
    def experts(self) -> ServedExperts | None: ...
    @property
    def sampling_defaults(self) -> Mapping[str, float | int]: ...
    @property
    def embedding_size(self) -> int: ...
    @property
    def max_open(self) -> int: ...
    @property
    def is_ready(self) -> bool: ...
    @property
    def failure(self) -> Exception | None: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_chat(self, messages: list[dict], **template_kwargs: Any) -> list[int]: ...
    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ServedGeneration: ...
    def submit_embedding(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> ServedGeneration: ...
    def stats(self) -> EngineCounters: ...
    def effective_config(self) -> Mapping[str, Mapping[str, Any]]: ...
    def drain(self, timeout_seconds: float | None) -> bool: ...
    def close(self) -> None: ...


class Serving:
    """One app's shared state: the frontend, the options, the metrics, and the generations now open."""

    def __init__(self, frontend: ServedFrontend, options: ServerOptions) -> None:
        self.frontend = frontend
        self.options = options
        self.model_names = options.served_model_names or (frontend.model_name,)
        self.metrics = ServerMetrics(self.model_names[0], frontend.stats, frontend.effective_config(), frontend.experts)
        self.created = int(time.time())
        self.is_draining = False
        self._open: set[ServedGeneration] = set()

    def model_for(self, requested: str | None) -> str:
        """The name an answer carries. A request without a model gets the served one; ModelNotFound for another."""
        if not requested:
            return self.model_names[0]
        if requested not in self.model_names:
            raise ModelNotFound(f"model {requested!r} is not served here; served: {', '.join(self.model_names)}")
        return requested

    def opened(self, generation: ServedGeneration) -> None:
        """Remembers a generation until `closed`, so that a shutdown can end it."""
        self._open.add(generation)

    def closed(self, generation: ServedGeneration) -> None:
        """Aborts a generation (nothing happens when it has finished) and forgets it."""
        generation.abort()
        self._open.discard(generation)

    async def drain(self) -> None:
        """Refuses new requests and waits for the running ones; aborts what still runs after the drain timeout."""
        self.is_draining = True
        if await asyncio.to_thread(self.frontend.drain, self.options.drain_timeout_seconds):
            return
        for generation in list(self._open):
            generation.abort()


def serving_of(request: Request) -> Serving:
    """The state of the app that answers this request."""
    return request.app.state.serving
