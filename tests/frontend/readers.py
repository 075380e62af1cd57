"""Ways to read a generation to its end, and to wait for what the engine's thread does."""

import asyncio
import time
from collections.abc import Callable, Iterable

from jaxserve.frontend import Frontend, Generation
from jaxserve.outputs import TextDelta


def read(generation: Generation) -> list[TextDelta]:
    return list(generation)


def read_async(generation: Generation) -> list[TextDelta]:
    async def collect() -> list[TextDelta]:
        return [delta async for delta in generation]

    return asyncio.run(asyncio.wait_for(collect(), 30))


def text_of(deltas: Iterable[TextDelta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def tokens_of(deltas: Iterable[TextDelta], index: int = 0) -> list[int]:
    return [token for delta in deltas if delta.index == index for token in delta.token_ids]


def ends_of(deltas: Iterable[TextDelta]) -> dict[int, str]:
    """Finish reason by choice; each choice ends once."""
    ends = [(delta.index, delta.finish_reason) for delta in deltas if delta.finish_reason is not None]
    assert len(dict(ends)) == len(ends)
    return dict(ends)


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for the engine's thread; fails loudly when it never gets there."""
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("never came true")


def is_at_rest(frontend: Frontend) -> bool:
    stats = frontend.stats()
    return stats.num_running == stats.num_waiting == stats.running_pages == 0
