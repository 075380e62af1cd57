"""One submitted request as its caller sees it: increments to read, from a thread or an event loop, and abort."""

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator

from jaxserve.outputs import Logprob, TextDelta


class Generation:
    """A request under way, with `num_choices` choices whose deltas interleave.

    One reader, either `for` or `async for`; it ends when every choice has delivered its finish_reason, and raises
    EngineDied when the engine failed. num_cached_tokens, prompt_logprobs and pooled (hidden states, of
    an embedding request) are valid once the first delta arrived.
    """

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], num_choices: int, abort: Callable[["Generation"], None]
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.num_choices = num_choices
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self.pooled: list[float] | None = None
        self._deltas: queue.SimpleQueue[TextDelta | Exception] = queue.SimpleQueue()
        self._abort = abort
        self._unread = num_choices
        self.reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def abort(self) -> None:
        """Ends every choice that still runs, with finish_reason "abort". Any thread, any time, more than once."""
        self._abort(self)

    def deliver(self, item: TextDelta | Exception) -> None:
        """Called by the engine's thread; an asynchronous reader is woken by `wake` afterwards."""
        self._deltas.put(item)

    def __iter__(self) -> Iterator[TextDelta]:
        while self._unread:
            yield self._checked(self._deltas.get())

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        event = asyncio.Event()
        self.reader = (asyncio.get_running_loop(), event)
        while self._unread:
            event.clear()
            while self._unread:
                try:
                    item = self._deltas.get_nowait()
                except queue.Empty:
                    break
                yield self._checked(item)
            if self._unread:
                await event.wait()

    def _checked(self, item: TextDelta | Exception) -> TextDelta:
        if isinstance(item, Exception):
            self._unread = 0
            raise item
        self._unread -= item.finish_reason is not None
        return item


def wake(generations: list[Generation]) -> None:
    """Wakes the asynchronous readers, with one call per event loop however many streams it serves."""
    events: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for generation in generations:
        if generation.reader is not None:
            loop, event = generation.reader
            events.setdefault(loop, []).append(event)
    for loop, waiting in events.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: its readers are gone
            loop.call_soon_threadsafe(_set_all, waiting)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
