"""The generations of one HTTP request: submitted together, read as one stream, aborted together."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from jaxserve.errors import InvalidRequest
from jaxserve.outputs import FinishReason, Logprob, TextDelta
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.error_responses import GenerationFailed
from jaxserve.server.metrics import RequestClock
from jaxserve.server.serving import ServedGeneration, Serving


@dataclass(kw_only=True, slots=True)
class Choice:
    """Everything one choice produced. The text stays in pieces, because adding to a string copies it each time."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.pieces)

    def add(self, delta: TextDelta) -> None:
        """Appends what one step brought."""
        self.pieces.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class GenerationGroup:
    """One generation per prompt, each with n choices. `close` must be called, whatever happened."""

    def __init__(self, serving: Serving, generations: list[ServedGeneration], n: int, clock: RequestClock) -> None:
        self.generations = generations
        self.n = n
        self._serving = serving
        self._clock = clock

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """(prompt index, delta) as they come. Raises EngineDied, or GenerationFailed for a choice that ended so."""
        async with aclosing(_merged(self.generations)) as merged:
            async for prompt_index, delta in merged:
                self._clock.saw(prompt_index, delta)
                if delta.finish_reason == "error":
                    raise GenerationFailed("the engine could not finish this request")
                yield prompt_index, delta
        self._clock.finished()

    async def collect(self) -> list[list[Choice]]:
        """All choices of all prompts, when the last has finished."""
        choices = [[Choice() for _ in range(self.n)] for _ in self.generations]
        async for prompt_index, delta in self.deltas():
            choices[prompt_index][delta.index].add(delta)
        return choices

    def close(self) -> None:
        """Aborts what has not finished."""
        for generation in self.generations:
            self._serving.closed(generation)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever n is."""
        return sum(len(generation.prompt_token_ids) for generation in self.generations)

    def usage(self, num_completion_tokens: int, *, with_details: bool = True) -> dict:
        """OpenAI's usage object. The details (cached tokens) are known once tokens arrived."""
        usage: dict = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + num_completion_tokens,
        }
        if with_details:
            cached = sum(generation.num_cached_tokens for generation in self.generations)
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage


def submit_group(
    serving: Serving,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    clock: RequestClock,
    request_id: str,
    priority: int | None,
    cache_salt: str | None,
) -> GenerationGroup:
    """Submits every prompt or none: when one is refused, those before it are aborted and the error goes on.

    A request that could not be queued even alone is an InvalidRequest, not Overloaded: to repeat it would not help.
    """

    def submit(prompt: list[int], name: str) -> ServedGeneration:
        return serving.frontend.submit(prompt, params, request_id=name, priority=priority or 0, cache_salt=cache_salt)

    return _submit_all(serving, prompts, params.n, clock, request_id, submit)


def submit_embeddings(
    serving: Serving,
    prompts: Sequence[list[int]],
    pooling: Pooling,
    *,
    clock: RequestClock,
    request_id: str,
    priority: int | None,
    cache_salt: str | None,
) -> GenerationGroup:
    """The same for prompts that are to become vectors."""

    def submit(prompt: list[int], name: str) -> ServedGeneration:
        return serving.frontend.submit_embedding(
            prompt, pooling, request_id=name, priority=priority or 0, cache_salt=cache_salt
        )

    return _submit_all(serving, prompts, 1, clock, request_id, submit)


def _submit_all(
    serving: Serving,
    prompts: Sequence[list[int]],
    n: int,
    clock: RequestClock,
    request_id: str,
    submit: Callable[[list[int], str], ServedGeneration],
) -> GenerationGroup:
    limit = serving.frontend.max_open
    if len(prompts) * n > limit:
        asked = f"{len(prompts):,} prompts with n={n}"
        raise InvalidRequest(f"{asked} exceed the {limit:,} sequences this server takes at once", param="prompt")
    generations: list[ServedGeneration] = []
    group = GenerationGroup(serving, generations, n, clock)
    try:
        for i, prompt in enumerate(prompts):
            generation = submit(prompt, request_id if len(prompts) == 1 else f"{request_id}-{i}")
            serving.opened(generation)
            generations.append(generation)
    except BaseException:
        group.close()
        raise
    return group


async def _merged(generations: Sequence[ServedGeneration]) -> AsyncGenerator[tuple[int, TextDelta]]:
    if len(generations) == 1:  # nearly every request: no task and no queue between the engine and the socket
        async for delta in generations[0]:
            yield 0, delta
        return
    arrived: asyncio.Queue[tuple[int, TextDelta | Exception | None]] = asyncio.Queue()
    feeds = [asyncio.create_task(_feed(arrived, i, generation)) for i, generation in enumerate(generations)]
    try:
        num_open = len(feeds)
        while num_open:
            i, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield i, item
    finally:
        for feed in feeds:
            feed.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)


async def _feed(arrived: asyncio.Queue, index: int, generation: ServedGeneration) -> None:
    """Puts every delta, then None; or the error that ended it, for the reader to raise."""
    try:
        async for delta in generation:
            arrived.put_nowait((index, delta))
        arrived.put_nowait((index, None))
    except Exception as error:
        arrived.put_nowait((index, error))
