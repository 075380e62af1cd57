"""A frontend without an engine: deterministic tokens from (prompt, seed, choice), delays, failures, overload.

Prompts are bytes plus a BOS, so that token ids can be checked by eye; generated tokens are words.
"""

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from jaxserve.errors import ChatTemplateError, EngineDied, InvalidRequest, Overloaded, PromptTooLong, ShuttingDown
from jaxserve.outputs import FinishReason, Logprob, TextDelta
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams

WORDS = (" alpha", " beta", " gamma", " delta", " epsilon", " zeta", " eta", " theta", " été", " iota", " kappa")
FIRST_WORD = 256
BOS, EOS = FIRST_WORD + len(WORDS), FIRST_WORD + len(WORDS) + 1
SPECIAL = {BOS: "<s>", EOS: "</s>"}


class FakeTokenizer:
    vocab_size = EOS + 1

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return [BOS] * add_special + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [i for i in ids if not (skip_special and i in SPECIAL)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < FIRST_WORD:
            return bytes([token_id])
        return (SPECIAL.get(token_id) or WORDS[token_id - FIRST_WORD]).encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class FakeStats:
    num_running: int = 1
    num_waiting: int = 2
    total_pages: int = 100
    running_pages: int = 25
    cached_pages: int = 5
    free_pages: int = 70
    prompt_tokens_total: int = 11
    generation_tokens_total: int = 22
    prefix_queried_tokens_total: int = 33
    prefix_hit_tokens_total: int = 16
    preemptions_total: int = 4
    left_pages_total: int = 11
    steps_total: int = 50
    requests_finished_total: dict[str, int] = field(default_factory=lambda: {"stop": 3, "length": 7})
    compiles_after_ready_total: int = 0


@dataclass(kw_only=True)
class Faults:
    """What goes wrong, and how slowly. fail_after_tokens: raise `failure` at that token of choice 0."""

    first_token_delay_seconds: float = 0.0
    token_delay_seconds: float = 0.0
    fail_after_tokens: int | None = None
    failure: Exception = field(default_factory=lambda: EngineDied("step failed: out of memory\n  Traceback: secret"))
    finish_with_error: bool = False
    overloaded: bool = False
    refuse_after: int | None = None  # generations accepted before Overloaded


class FakeGeneration:
    def __init__(self, frontend: "FakeFrontend", prompt: list[int], params: SamplingParams, request_id: str) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.pooled: list[float] | None = None
        self.aborted = threading.Event()
        self.finished = False
        self._frontend = frontend
        self._params = params

    def abort(self) -> None:
        if not self.finished:
            self.aborted.set()

    def __iter__(self) -> Iterator[TextDelta]:
        raise NotImplementedError("the server reads generations from its event loop")

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        faults = self._frontend.faults
        await self._sleep(faults.first_token_delay_seconds)
        self.num_cached_tokens = min(4, len(self.prompt_token_ids))
        if self._params.prompt_logprobs is not None:
            self.prompt_logprobs = _prompt_logprobs(self.prompt_token_ids, self._params.prompt_logprobs)
        open_choices = {i: _choice_deltas(self.prompt_token_ids, self._params, i) for i in range(self._params.n)}
        step = 0
        while open_choices:
            if step == faults.fail_after_tokens:
                raise faults.failure
            await self._sleep(faults.token_delay_seconds)
            for index in list(open_choices):
                delta = self._next(open_choices[index], index)
                if delta.finish_reason:
                    del open_choices[index]
                yield delta
            step += 1
        self.finished = True
        self._frontend.live.discard(self)

    def _next(self, deltas: Iterator[TextDelta], index: int) -> TextDelta:
        if self.aborted.is_set():
            return TextDelta(index=index, text="", token_ids=(), finish_reason="abort")
        if self._frontend.faults.finish_with_error:
            return TextDelta(index=index, text="", token_ids=(), finish_reason="error")
        return next(deltas)

    async def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.aborted.is_set() and (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.01))
        await asyncio.sleep(0)


class FakeEmbedding(FakeGeneration):
    pooling: Pooling = "mean"

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        faults = self._frontend.faults
        await self._sleep(faults.first_token_delay_seconds)
        ids = self.prompt_token_ids
        reason: FinishReason = "stop"
        if self.aborted.is_set() or faults.finish_with_error:
            reason = "abort" if self.aborted.is_set() else "error"
        else:
            self.pooled = [float(x) for x in (len(ids), ids[0], ids[-1], self.pooling == "last")]
        self.finished = True
        yield TextDelta(index=0, text="", token_ids=(), finish_reason=reason)


class FakeExperts:
    """Two layers of three experts on two devices."""

    def __init__(self) -> None:
        self.num_moves = 0

    def load(self) -> SimpleNamespace:
        tokens = np.array([[5, 1, 0], [2, 2, 2]])
        by_device = np.array([[6.0, 0.0], [4.0, 2.0]])
        return SimpleNamespace(layers=(1, 3), tokens=tokens, device_tokens=by_device, imbalance=np.array([2.0, 4 / 3]))

    def rebalance(self) -> SimpleNamespace:
        self.num_moves += 1
        return SimpleNamespace(moved=3, imbalance_before=np.array([2.0, 4 / 3]), imbalance_after=np.array([1.5, 1.0]))


class FakeFrontend:
    model_name = "fake-model"
    max_model_len = 2048
    max_open = 1000
    embedding_size = 4

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.sampling_defaults: dict[str, float | int] = {}
        self.is_ready = True
        self.failure: Exception | None = None
        self.experts: FakeExperts | None = None
        self.submitted: list[FakeGeneration] = []
        self.params: list[SamplingParams] = []
        self.options: list[dict] = []
        self.chats: list[tuple[list[dict], dict]] = []
        self.live: set[FakeGeneration] = set()
        self.closed = False
        self._draining = False

    def encode_prompt(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest("no tokenizer: send token ids", param="prompt")
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: list[dict], **template_kwargs) -> list[int]:
        self.chats.append((messages, template_kwargs))
        for message in messages:
            if message["role"] not in ("system", "user", "assistant", "tool"):
                raise ChatTemplateError(f"messages: unknown role {message['role']!r}", param="messages")
        return FakeTokenizer().encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> FakeGeneration:
        self._refuse_if_needed(prompt_token_ids)
        generation = FakeGeneration(self, prompt_token_ids, params, request_id or "no-id")
        self.submitted.append(generation)
        self.live.add(generation)
        self.params.append(params)
        self.options.append({"priority": priority, "cache_salt": cache_salt})
        return generation

    def submit_embedding(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> "FakeEmbedding":
        """[number of tokens, first, last, 1 for "last"] of each prompt."""
        self._refuse_if_needed(prompt_token_ids)
        generation = FakeEmbedding(self, prompt_token_ids, SamplingParams(), request_id or "no-id")
        generation.pooling = pooling
        self.submitted.append(generation)
        self.options.append({"priority": priority, "cache_salt": cache_salt})
        return generation

    def _refuse_if_needed(self, prompt_token_ids: list[int]) -> None:
        if self.failure:
            raise EngineDied(str(self.failure))
        if self._draining:
            raise ShuttingDown("the server drains; try another")
        if self.faults.overloaded or len(self.submitted) == self.faults.refuse_after:
            raise Overloaded("the waiting queue is full", retry_after_seconds=7)
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptTooLong(f"prompt has {len(prompt_token_ids)} tokens, not below 2048", param="prompt")

    def stats(self) -> FakeStats:
        return FakeStats()

    def effective_config(self) -> dict[str, dict]:
        return {"page_tokens": {"value": 16, "reason": "default"}}

    def drain(self, timeout_seconds: float | None) -> bool:
        self._draining = True
        end = time.monotonic() + (timeout_seconds or 0)
        while self.live and time.monotonic() < end:
            time.sleep(0.01)
        return not self.live

    def close(self) -> None:
        self.closed = True


def _choice_deltas(prompt: list[int], params: SamplingParams, index: int) -> Iterator[TextDelta]:
    """One word per step; text that may begin a stop string is held back until it is decided."""
    text, sent = "", 0
    limit = params.max_tokens or 30
    for position in range(limit):
        token_id = _token(prompt, params, index, position)
        text += WORDS[token_id - FIRST_WORD]
        reason: FinishReason | None = "length" if position == limit - 1 else None
        stop_reason = None
        hits = [(text.index(s), s) for s in params.stop_strings if s in text]
        end = len(text) if reason else _safe_end(text, params.stop_strings)
        if hits:
            end, stop_reason = min(hits)
            end += len(stop_reason) if params.include_stop_str_in_output else 0
            reason = "stop"
        logprobs = None if params.logprobs is None else (_entry(token_id, params.logprobs),)
        yield TextDelta(
            index=index,
            text=text[sent:end],
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop_reason,
        )
        sent = end
        if reason:
            return


def _safe_end(text: str, stops: tuple[str, ...]) -> int:
    starts = [i for i in range(len(text)) for stop in stops if stop.startswith(text[i:])]
    return min(starts, default=len(text))


def _token(prompt: list[int], params: SamplingParams, index: int, position: int) -> int:
    seed = 0 if params.is_greedy else (params.seed if params.seed is not None else time.perf_counter_ns())
    choice = 0 if params.is_greedy else index
    digest = hashlib.sha256(repr((prompt, seed, choice, position)).encode()).digest()
    return FIRST_WORD + digest[0] % len(WORDS)


def _entry(token_id: int, num_top: int) -> dict[int, Logprob]:
    """The chosen token, always the likeliest, then alternatives."""
    ids = [token_id, *(i for i in range(FIRST_WORD, BOS) if i != token_id)][: max(num_top, 1)]
    text = FakeTokenizer().token_text
    return {i: Logprob(-0.5 * (rank + 1), rank + 1, text(i)) for rank, i in enumerate(ids)}


def _prompt_logprobs(prompt: list[int], num_top: int) -> list[dict[int, Logprob] | None]:
    """Every prompt token has rank 3: it comes first and is not among the best two."""
    text = FakeTokenizer().token_text
    best = {i: Logprob(-0.25 * (i - FIRST_WORD + 1), i - FIRST_WORD + 1, text(i)) for i in (FIRST_WORD, FIRST_WORD + 1)}
    top = dict(list(best.items())[:num_top])
    return [None, *({i: Logprob(-2.0, 3, text(i)), **top} for i in prompt[1:])]
