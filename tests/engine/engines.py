"""Running requests through an engine of one's own over a shared executor: what the equality tests are made of."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.engine.build import BuiltEngine
from jaxserve.engine.engine import Engine
from jaxserve.engine.requests import EngineEvent
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Scheduler


@dataclass
class Outcome:
    """What one request came to."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    num_cached_tokens: int = 0


def engine_over(built: BuiltEngine, *, overlap: bool = True, **limits: Any) -> Engine:
    """An engine with a fresh scheduler (limits given by name) over the compiled executor of `built`.

    Page tables are those the executor was built for.
    """
    executor = built.executor
    groups = executor.shapes[0].groups
    options: dict[str, Any] = {
        "num_pages": built.num_pages,
        "page_size": built.page_size,
        "max_num_seqs": built.max_num_seqs,
        "max_num_batched_tokens": built.max_num_batched_tokens,
        "max_model_len": built.max_model_len,
    }
    if groups is not None:
        options |= {"window": groups.window, "tables": (groups.num_full, groups.num_windowed)}
    return Engine(Scheduler(**(options | limits)), executor, overlap=overlap, seed=0)


def add(engine: Engine, request_id: str, prompt: list[int], params: SamplingParams, **options: Any) -> None:
    assert params.max_tokens is not None
    request = engine.request(
        request_id, prompt, params, max_tokens=params.max_tokens, eos_token_ids=frozenset(), **options
    )
    engine.add(request)


def finish(engine: Engine, outcomes: dict[str, Outcome] | None = None) -> dict[str, Outcome]:
    """Steps until nothing is left; invariants are checked on the way."""
    outcomes = {} if outcomes is None else outcomes
    for step in itertools.count():
        if not engine.has_work:
            return outcomes
        for event in engine.step():
            note(outcomes, event)
        if step % 8 == 0:
            engine.scheduler.check_invariants()
    raise AssertionError


def note(outcomes: dict[str, Outcome], event: EngineEvent) -> None:
    outcome = outcomes.setdefault(event.request_id, Outcome([], []))
    outcome.token_ids += event.token_ids
    outcome.logprobs += [top.logprob for top in event.logprobs or ()]
    outcome.finish_reason = event.finish_reason or outcome.finish_reason
    outcome.num_cached_tokens = event.num_cached_tokens


def alone(built: BuiltEngine, prompt: list[int], params: SamplingParams, **limits: Any) -> Outcome:
    """The request with nothing beside it and nothing cached: what every other run must equal."""
    engine = engine_over(built, overlap=False, **limits)
    add(engine, "r", prompt, params)
    return finish(engine)["r"]


def random_prompt(length: int, vocab: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()
