"""Perplexity of a text: how well the served model predicts it, from prompt log probabilities of the engine itself.

Windows of max_length tokens, each stride tokens after the last, as in the recipe of the transformers documentation:
every token is scored once, in the first window that holds it, and so with at least max_length - stride tokens before
it (those of the first window aside). A model whose prompts begin with a BOS has one at the start of each window. It
counts into max_length and is not scored; models that were trained with it predict badly without.

Windows run one after another, never beside each other: what shares a batch may move a float's last bit, and the
figure is to be the same on every run. Sums are exact (math.fsum over float64).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError
from jaxserve.sampling_params import SamplingParams

MIN_SCORED_TOKENS = 16  # below, the figure says more about the text than about the model
_SCORE = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)


@runtime_checkable
class ScoringFrontend(Protocol):
    """The part of a frontend that scoring needs."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    def submit(self, prompt_token_ids: list[int], params: SamplingParams) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens start to end of the text, of which those from first_scored on are scored."""

    start: int
    first_scored: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """nats: minus the sum of the scored tokens' natural log probabilities. num_bytes: UTF-8 bytes of these tokens."""

    num_tokens: int
    num_bytes: int
    nats: float
    num_windows: int
    max_length: int
    stride: int

    @property
    def nats_per_token(self) -> float:
        """Depends on the tokenizer."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Per token, so it compares models of one tokenizer only."""
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        """Compares models of different tokenizers on one text."""
        return self.nats / math.log(2) / self.num_bytes


def windows(num_tokens: int, max_length: int, stride: int) -> Iterator[Window]:
    """The windows over a text, each with at most max_length tokens; together they score every token once."""
    scored = 0
    for start in range(0, num_tokens, stride):
        end = min(start + max_length, num_tokens)
        yield Window(start=start, first_scored=scored, end=end)
        scored = end
        if end == num_tokens:
            return


def lengths(max_model_len: int, max_length: int | None, stride: int | None) -> tuple[int, int]:
    """max_length and stride, chosen where they are None. Raises ConfigError for what model or recipe refuse."""
    most = max_model_len - 1  # the engine draws one token behind each prompt
    length = min(1024, most) if max_length is None else max_length
    if not 2 <= length <= most:
        raise ConfigError(f"--max-length {length:,}: windows of this model have 2 to {most:,} tokens (--max-model-len)")
    step = max(1, length // 2) if stride is None else stride
    if not 1 <= step < length:
        raise ConfigError(f"--stride {step:,} must be from 1 to {length - 1:,}, one less than --max-length")
    return length, step


def measure(
    frontend: ScoringFrontend,
    text: str,
    *,
    max_length: int,
    stride: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexity:
    """The text's perplexity. advance: called with windows done and in all.

    Text that spells a special token counts as text. Raises ConfigError without a tokenizer, InvalidRequest for a text
    that is too short.
    """
    ids, bos = _token_ids(frontend, text)
    all_windows = list(windows(len(ids), max_length - len(bos), min(stride, max_length - len(bos))))
    is_first_unscored = not bos  # nothing predicts it
    nats: list[float] = []
    for done, window in enumerate(all_windows, start=1):
        first = max(window.first_scored, int(is_first_unscored))
        nats += _nats(frontend, [*bos, *ids[window.start : window.end]], window.end - first)
        advance(done, len(all_windows))
    assert len(nats) == len(ids) - is_first_unscored
    unscored_bytes = len(frontend.tokenizer.token_bytes(ids[0])) if is_first_unscored else 0
    return Perplexity(
        num_tokens=len(nats),
        num_bytes=len(text.encode()) - unscored_bytes,
        nats=math.fsum(nats),
        num_windows=len(all_windows),
        max_length=max_length,
        stride=stride,
    )


def _token_ids(frontend: ScoringFrontend, text: str) -> tuple[list[int], list[int]]:
    """The text's tokens, and what stands before each window: the BOS, or nothing."""
    tokenizer = frontend.tokenizer
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer, so it has no perplexity on a text; choose a model with one")
    ids = tokenizer.encode_plain(text)
    if len(ids) < MIN_SCORED_TOKENS + 1:
        raise InvalidRequest(
            f"the text has {len(ids)} tokens; perplexity needs at least {MIN_SCORED_TOKENS + 1}", param="text"
        )
    return ids, tokenizer.with_bos([])


def _nats(frontend: ScoringFrontend, prompt: list[int], num_scored: int) -> list[float]:
    """Minus the log probability of each of the prompt's last num_scored tokens."""
    generation = frontend.submit(prompt, _SCORE)
    try:
        for _ in generation:
            pass
    except BaseException:
        generation.abort()
        raise
    found = generation.prompt_logprobs
    if found is None:
        raise JaxserveError("the engine could not score this text: it computed no finite logits")
    first = len(prompt) - num_scored
    nats = [-found[position][prompt[position]].logprob for position in range(first, len(prompt))]
    if not all(map(math.isfinite, nats)):
        raise JaxserveError("the engine could not score this text: it computed no finite logits")
    return nats
