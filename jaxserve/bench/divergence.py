"""How far one choice of kernels is from another: the Kullback-Leibler divergence of the next token, text given.

Both read the same tokens (teacher forcing) through the pure function under the engine, so that one differing token
cannot make the rest differ. Nothing is drawn and nothing is timed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float64

from jaxserve.bench.measure import percentiles, spread
from jaxserve.bench.report import Distribution, Figure, Report, Target
from jaxserve.config import EngineConfig, KernelChoice
from jaxserve.engine.build import BuiltEngine, build_engine
from jaxserve.engine.progress import Progress
from jaxserve.engine.step import logits_of_tokens
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import cache_spec, empty_cache
from jaxserve.offline import find_model, read_tokenizer
from pallas_kernels.ragged import RaggedLayout

TARGET = Target(limit=0.01, is_floor=False)
OWN_TEXTS = Path(__file__).resolve().parents[1] / "scheduler"


@runtime_checkable
class Encodes(Protocol):
    """The part of a Tokenizer that reads text."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, kw_only=True)
class DivergenceSetup:
    """What is compared on which text. texts: name to text. window: tokens of one sequence. chunk: tokens of one step; 1
    measures decoding. Raises ConfigError for numbers that cannot work."""

    reference: KernelChoice = "xla"
    texts: Mapping[str, str]
    max_tokens: int = 4096
    window: int = 512
    chunk: int = 256

    def __post_init__(self) -> None:
        if self.chunk < 1 or self.window < self.chunk or self.window % self.chunk:
            raise ConfigError(f"--window must be a multiple of --chunk, got {self.window} and {self.chunk}")


class ForcedModel:
    """A model with one choice of kernels, run over given tokens."""

    def __init__(self, built: BuiltEngine, window: int) -> None:
        self._built = built
        config = built.loaded.config
        self._num_pages = -(-window // built.page_size)
        self._spec = cache_spec(config, built.page_size, built.choices["kv_cache_dtype"].value)
        self._run = jax.jit(partial(logits_of_tokens, built.executor.program), donate_argnums=1)

    def logits(self, token_ids: Sequence[int], chunk: int) -> Iterator[Float[Any, "T V"]]:
        """Logits at every token of one sequence, chunk by chunk."""
        cache = empty_cache(self._spec, self._num_pages, self._built.executor.program.kernels)
        for begin in range(0, len(token_ids), chunk):
            some = jnp.asarray(token_ids[begin : begin + chunk], jnp.int32)
            layout = RaggedLayout(
                kv_lengths=jnp.asarray([begin + len(some)], jnp.int32),
                query_starts=jnp.asarray([0, len(some)], jnp.int32),
                page_table=jnp.arange(self._num_pages, dtype=jnp.int32)[None],
                num_single_rows=int(len(some) == 1),
            )
            logits, cache = self._run(self._built.executor.params, cache, some, layout)
            yield np.asarray(logits)

    def close(self) -> None:
        """Frees the weights."""
        self._built.engine.close()


def bench_divergence(config: EngineConfig, progress: Progress, setup: DivergenceSetup) -> Report:
    """KL(reference || config's kernels) in nats at every position, and how often both find the same token likeliest.

    Raises ConfigError for a model without a tokenizer, or equal kernels on both sides.
    """
    if config.kernels == setup.reference:
        raise ConfigError(f"--kernels and --reference are both {setup.reference}; there is nothing to compare")
    path = find_model(config.model, config.cache_dir)
    tokenizer = read_tokenizer(path, progress)
    if tokenizer is None:
        raise ConfigError(f"{config.model} has no tokenizer, which bench divergence needs for its texts")
    windows = token_windows(tokenizer, setup)
    sizes: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": setup.window, "max_num_batched_tokens": setup.chunk}
    models: list[ForcedModel] = []
    try:
        for kernels in (setup.reference, config.kernels):
            chosen = replace(config, kernels=kernels, **sizes)
            built = build_engine(chosen, path, frozenset(), progress, warm_up=False)
            models.append(ForcedModel(built, setup.window))
        with progress.task("divergence", len(windows)) as advance:
            nats, agrees = _compared(models[0], models[1], windows, setup.chunk, advance)
    finally:
        for model in models:
            model.close()
    return _report(config, path, setup, nats, agrees)


def token_windows(tokenizer: Encodes, setup: DivergenceSetup) -> list[list[int]]:
    """The texts' tokens, one text after the other, in sequences of `window`.

    What does not fill a chunk at the end is left out: each length of a step is another program to compile.
    """
    ids = tokenizer.encode("\n\n".join(setup.texts.values()))
    num_tokens = min(len(ids), setup.max_tokens) // setup.chunk * setup.chunk
    if not num_tokens:
        raise ConfigError(
            f"--max-tokens {setup.max_tokens} of the texts' {len(ids)} tokens do not fill one --chunk of {setup.chunk}"
        )
    return [ids[begin : min(begin + setup.window, num_tokens)] for begin in range(0, num_tokens, setup.window)]


def own_texts() -> dict[str, str]:
    """Code and English that every installation has: the scheduler's modules."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(OWN_TEXTS.glob("*.py"))}


def kl_nats(reference: Float[Any, "T V"], other: Float[Any, "T V"]) -> Float64[Any, "T"]:
    """KL(reference || other) of the distributions that logits give, at each token, in float64."""
    log_p, log_q = _log_softmax(reference), _log_softmax(other)
    return (np.exp(log_p) * (log_p - log_q)).sum(-1)


def _log_softmax(logits: Float[Any, "T V"]) -> Float64[Any, "T V"]:
    shifted = np.asarray(logits, np.float64) - np.max(logits, -1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _compared(
    reference: ForcedModel, other: ForcedModel, windows: list[list[int]], chunk: int, advance: Callable[[int], None]
) -> tuple[list[float], list[bool]]:
    nats: list[float] = []
    agrees: list[bool] = []
    for window in windows:
        for ours, theirs in zip(reference.logits(window, chunk), other.logits(window, chunk), strict=True):
            nats += kl_nats(ours, theirs).tolist()
            agrees += (ours.argmax(-1) == theirs.argmax(-1)).tolist()
        advance(1)
    return nats, agrees


def _report(config: EngineConfig, path: Path, setup: DivergenceSetup, nats: list[float], agrees: list[bool]) -> Report:
    mean = sum(nats) / len(nats)
    return Report(
        title="divergence",
        model={"model": config.model, "file": path.name},
        settings={
            "reference": f"--kernels {setup.reference}",
            "against it": f"--kernels {config.kernels}",
            "texts": ", ".join(setup.texts),
            "tokens": len(nats),
            "window": f"{setup.window:,} tokens",
            "chunk": f"{setup.chunk:,} tokens",
        },
        figures=(
            Figure(name="mean KL(reference || other)", unit="nats", value=spread([mean]), target=TARGET),
            Figure(name="largest KL of a position", unit="nats", value=spread([max(nats)])),
            Figure(name="same likeliest token", unit="of 1", value=spread([sum(agrees) / len(agrees)])),
        ),
        distributions=(Distribution(name="KL by position", unit="nats", value=percentiles(nats)),),
        notes=("every position is given the text before it; nothing generated is fed back",),
    )
