"""Runs an app under uvicorn: one readiness line, and a shutdown that loses no running request."""

import asyncio
import math
import os
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from jaxserve.errors import ConfigError
from jaxserve.server.options import ServerOptions
from jaxserve.server.serving import ServedFrontend, Serving

AFTER_DRAIN_SECONDS = 5  # for clients that read slowly to take what is left, once nothing is generated any more


def check_port(options: ServerOptions) -> None:
    """Raises ConfigError when the address cannot be bound. Called before a model is loaded, which takes long."""
    _bind(options).close()


def run_server(
    app: FastAPI, frontend: ServedFrontend, options: ServerOptions, *, startup_seconds: float | None = None
) -> int:
    """Serves until SIGTERM or SIGINT and returns the exit code, 0. The frontend is closed then.

    The first signal stops accepting, waits for running requests up to the drain timeout, then aborts the rest (they
    end with finish_reason "abort"). The second signal ends the process at once with 128 + its number.
    Raises ConfigError when the address cannot be bound.
    """
    listener = _bind(options)
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        root_path=options.root_path,
        access_log=options.access_log,
        log_level="info" if options.access_log else "warning",
        timeout_graceful_shutdown=math.ceil(options.drain_timeout_seconds) + AFTER_DRAIN_SECONDS,
    )
    name = app.state.serving.model_names[0]
    startup = "" if startup_seconds is None else f", startup {startup_seconds:.1f} s"
    line = f"jaxserve ready on {_url(listener)} (model {name}{startup})"
    try:
        DrainingServer(config, app.state.serving, line).run(sockets=[listener])
    finally:
        listener.close()
        frontend.close()
    return 0


class DrainingServer(uvicorn.Server):
    """uvicorn that drains the frontend while it closes its connections, and ends without a raised signal."""

    def __init__(self, config: uvicorn.Config, serving: Serving, ready_line: str | None = None) -> None:
        super().__init__(config)
        self._serving = serving
        self._ready_line = ready_line

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Prints the readiness line once connections are accepted."""
        await super().startup(sockets)
        if self._ready_line is not None:
            print(self._ready_line, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drains beside uvicorn's own shutdown, which waits for the answers of open connections."""
        drain = asyncio.create_task(self._serving.drain())
        await super().shutdown(sockets)
        await drain

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """First signal: shut down. Second: leave now; the engine thread may be inside a long device call."""
        if self.should_exit:
            os._exit(128 + signal.Signals(sig).value)
        self.should_exit = True  # not recorded as captured: uvicorn would raise it again and spoil the exit code


def _bind(options: ServerOptions) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"cannot listen on host {options.host!r}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()  # two sockets with SO_REUSEADDR may bind one port; only one may listen
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}; choose another --port"
        ) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
