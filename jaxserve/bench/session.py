"""The running frontend a benchmark measures: what it can hold, what it is, and that it never compiled meanwhile."""

from typing import Any, Protocol, runtime_checkable

from jaxserve.bench.machine import model_facts
from jaxserve.bench.timing import Submits
from jaxserve.errors import ConfigError


@runtime_checkable
class Measured(Submits, Protocol):
    """The part of a Frontend that benchmarks use."""

    model_name: str
    max_model_len: int
    tokenizer: Any

    def stats(self) -> Any: ...

    def effective_config(self) -> dict[str, dict[str, Any]]: ...


def vocab_size(frontend: Measured) -> int:
    """Token ids below this are drawn for prompts. Raises ConfigError for a model without a tokenizer."""
    if frontend.tokenizer is None:
        raise ConfigError(f"{frontend.model_name} has no tokenizer, so its vocabulary is not known; bench needs it")
    return frontend.tokenizer.vocab_size


def check_length(frontend: Measured, num_tokens: int) -> None:
    """Raises ConfigError where prompt and output together do not fit the model."""
    if num_tokens > frontend.max_model_len:
        raise ConfigError(
            f"input and output take {num_tokens:,} tokens; this model holds {frontend.max_model_len:,}"
            " (--max-model-len)"
        )


def check_concurrency(frontend: Measured, flag: str, num_requests: int) -> None:
    """Raises ConfigError where so many requests could not run at once."""
    limit = frontend.effective_config().get("max_num_seqs", {}).get("value")
    if limit is not None and num_requests > limit:
        raise ConfigError(f"{flag} {num_requests} exceeds the {limit} sequences that run at once (--max-num-seqs)")


def facts(frontend: Measured) -> dict[str, Any]:
    """The model and its engine, for a report."""
    return model_facts(frontend.model_name, frontend.effective_config())


def compile_notes(frontend: Measured) -> tuple[str, ...]:
    """A note where the engine compiled after it was ready: the figures then hold compile time."""
    count = frontend.stats().compiles_after_ready_total
    return (f"{count} compilations fell into the run; its figures are not to be trusted",) if count else ()
