"""A frontend without an engine whose log probabilities tell which positions were asked for."""

import math
from collections.abc import Iterator

import pytest

from jaxserve.errors import PromptTooLong
from jaxserve.outputs import Logprob, TextDelta
from jaxserve.sampling_params import SamplingParams


class ByteTokenizer:
    """One token for each byte, and a BOS of 256 if wanted."""

    def __init__(self, has_bos: bool) -> None:
        self.has_bos = has_bos

    def encode_plain(self, text: str) -> list[int]:
        return list(text.encode())

    def with_bos(self, ids: list[int]) -> list[int]:
        return [256, *ids] if self.has_bos else ids

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


class ScoredGeneration:
    def __init__(self, frontend: "ScoringFake", prompt: list[int]) -> None:
        self._frontend, self._prompt = frontend, prompt
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True

    def __iter__(self) -> Iterator[TextDelta]:
        score = self._frontend.score
        if score is not None:
            self.prompt_logprobs = [None, *({t: Logprob(score(t), 1)} for t in self._prompt[1:])]
        yield TextDelta(index=0, text="", token_ids=(0,), finish_reason="length")


class ScoringFake:
    """score: log probability by token; None: the engine ends each request with an error."""

    def __init__(self, has_bos: bool = False) -> None:
        self.tokenizer: ByteTokenizer | None = ByteTokenizer(has_bos)
        self.max_model_len = 64
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.score = lambda token: -math.log(2 + token / 256)

    def submit(self, prompt_token_ids: list[int], params: SamplingParams) -> ScoredGeneration:
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptTooLong("too long")
        self.prompts.append(prompt_token_ids)
        self.params.append(params)
        return ScoredGeneration(self, prompt_token_ids)


@pytest.fixture
def scoring() -> type[ScoringFake]:
    """Makes fakes."""
    return ScoringFake
