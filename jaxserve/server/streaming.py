"""Server-sent events, and work that ends when its client goes away."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.server.error_responses import describe
from jaxserve.server.generation_group import GenerationGroup

DONE = b"data: [DONE]\n\n"

# ASCII only: clients that split events with str.splitlines would break at U+2028 and its kind.
_to_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_log = logging.getLogger("jaxserve.server")


def encode_event(payload: Mapping[str, Any]) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + _to_json(payload).encode("ascii") + b"\n\n"


async def unless_disconnected[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Raises ClientDisconnect, with `work` cancelled, when the client goes away before."""
    job = asyncio.create_task(work)
    watch = asyncio.create_task(_until_disconnected(receive))
    try:
        await asyncio.wait((job, watch), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientDisconnect
        return job.result()
    finally:
        for task in (job, watch):
            task.cancel()
        await asyncio.gather(job, watch, return_exceptions=True)


class EventStream(Response):
    """Sends events until they end, an error ends them (an error event, no [DONE]), or the client goes away.

    The status is 200 before the first token exists, so later errors can only be told inside the stream.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], group: GenerationGroup, headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._group = group
        # X-Accel-Buffering: nginx would otherwise collect the events.
        self.init_headers({**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the stream; the generations are closed whatever ends it."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_disconnected(receive, self._send_events(send))
        except ClientDisconnect:
            pass
        finally:
            self._group.close()

    async def _send_events(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            if not isinstance(error, JaxserveError):
                _log.exception("defect while streaming")
            event = encode_event(describe(error).body())
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
