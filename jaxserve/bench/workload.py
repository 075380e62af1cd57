"""What is asked of the engine: prompts of random tokens and mixes of lengths, the same for the same seed."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxserve.errors import ConfigError
from jaxserve.sampling_params import SamplingParams

Dataset = Literal["random", "sharegpt-like"]
DATASETS: tuple[Dataset, ...] = ("random", "sharegpt-like")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One request to send. text: the prompt as text, for servers that take no token ids; prompt_token_ids then are what
    it should become. banned_token_ids: never generated, where a server knows no ignore_eos."""

    prompt_token_ids: list[int]
    output_len: int
    text: str | None = None
    banned_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LogNormalLengths:
    """Lengths whose logarithm is normal with deviation sigma and whose mean, before clipping, is `mean`."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """One length, clipped to low ... high."""
        mu = math.log(self.mean) - self.sigma**2 / 2
        return min(max(round(source.lognormvariate(mu, self.sigma)), self.low), self.high)

    def __str__(self) -> str:
        return f"log-normal, mean {self.mean:g}, sigma {self.sigma:g}, clipped to {self.low}-{self.high}"


# Means of ShareGPT in tokens: vLLM's paper (arXiv 2309.06180, section 6.1, figure 11). The limits are those of its
# benchmark; the deviations are ours, for the long tail that figure shows.
SHAREGPT_PROMPTS = LogNormalLengths(mean=161.31, sigma=1.2, low=4, high=1024)
SHAREGPT_OUTPUTS = LogNormalLengths(mean=337.99, sigma=0.9, low=4, high=1024)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests are sent. With "sharegpt-like", input_len and output_len are not used.

    Raises ConfigError for lengths below 1 and for no request.
    """

    dataset: Dataset = "random"
    num_prompts: int = 1
    input_len: int = 128
    output_len: int = 64
    vocab_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--input-len", self.input_len),
            ("--output-len", self.output_len),
        ):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        if self.dataset not in DATASETS:
            raise ConfigError(f"--dataset must be one of {', '.join(DATASETS)}, got {self.dataset!r}")

    def requests(self, round_number: int = 0) -> list[Planned]:
        """The requests of one round; no two rounds share a prompt, so that no prefix is cached by chance."""
        source = random_source(self.seed, "workload", round_number)
        lengths = (self._lengths(source) for _ in range(self.num_prompts))
        return [
            Planned(prompt_token_ids=random_tokens(source, input_len, self.vocab_size), output_len=output_len)
            for input_len, output_len in lengths
        ]

    def _lengths(self, source: random.Random) -> tuple[int, int]:
        if self.dataset == "random":
            return self.input_len, self.output_len
        return SHAREGPT_PROMPTS.draw(source), SHAREGPT_OUTPUTS.draw(source)

    def describe(self) -> dict[str, str | int]:
        """The workload in words, for a report."""
        lengths: dict[str, str | int] = {
            "input length": f"{self.input_len:,} tokens",
            "output length": f"{self.output_len:,} tokens",
        }
        if self.dataset == "sharegpt-like":
            lengths = {
                "input length": f"tokens, {SHAREGPT_PROMPTS}",
                "output length": f"tokens, {SHAREGPT_OUTPUTS}",
            }
        return {"dataset": self.dataset, "requests": self.num_prompts, **lengths, "seed": self.seed}


def random_source(*key: int | str) -> random.Random:
    """A generator that depends on the key alone."""
    return random.Random(":".join(map(str, key)))  # text seeds are hashed with SHA-512: near keys are unrelated


def random_tokens(source: random.Random, length: int, vocab_size: int) -> list[int]:
    """Token ids drawn uniformly from the vocabulary."""
    return source.choices(range(vocab_size), k=length)


def sampling(output_len: int) -> SamplingParams:
    """Exactly so many tokens, drawn at temperature 1 (vLLM's choice for benchmarks)."""
    return SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output_len)


def arrival_seconds(num_requests: int, requests_per_second: float, seed: int) -> Iterator[float]:
    """When each request is to be sent: a Poisson process from 0, or all at 0 where the rate is infinite."""
    if not requests_per_second > 0:
        raise ConfigError(f"--request-rate must be above 0 or inf, got {requests_per_second}")
    source = random_source(seed, "arrivals")
    at = 0.0
    for _ in range(num_requests):
        yield at
        at += 0.0 if math.isinf(requests_per_second) else source.expovariate(requests_per_second)
