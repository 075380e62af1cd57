"""Starts the engine for a command: progress on stderr, a report, and an end whatever happens."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from checkpoints.inspect import ModelDescription, describe
from jaxserve.cli.bars import Bars
from jaxserve.cli.report import startup_lines
from jaxserve.cli.terminal import note
from jaxserve.config import EngineConfig
from jaxserve.outputs import TextDelta


@dataclass(frozen=True, kw_only=True)
class Started:
    """A running frontend and the seconds until it ran, jax's import included."""

    frontend: Any
    seconds: float

    def lines(self) -> list[str]:
        """The short start-up report."""
        choices = self.frontend.effective_config()
        path = choices.get("model", {}).get("value")
        return startup_lines(
            self.frontend.model_name, choices, self.frontend.programs, self.seconds, _description(path)
        )


def start(config: EngineConfig, *, warm_up: bool, needs_text: bool = False) -> Started:
    """Loads the model. The caller closes the frontend. needs_text: ConfigError for a model without a tokenizer."""
    begin = time.perf_counter()
    with leaving_on_interrupt():
        from jaxserve import offline  # imports jax

    with leaving_on_interrupt():
        frontend = offline.start_frontend(config, Bars(), warm_up=warm_up, needs_text=needs_text)
    return Started(frontend=frontend, seconds=time.perf_counter() - begin)


@contextlib.contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """Ctrl-C ends the program at once while nothing is served yet.

    A KeyboardInterrupt could be swallowed by a callback of jax, or wait for a long compilation.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(signal_number: int, frame: FrameType | None) -> None:
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar may have hidden it
    os.write(2, f"{show_cursor}\njaxserve: interrupted\n".encode())
    os._exit(128 + signal_number)


@contextlib.contextmanager
def started(config: EngineConfig, *, needs_text: bool) -> Iterator[Started]:
    """A frontend that compiles on first use, its report printed; closed at the end."""
    running = start(config, warm_up=False, needs_text=needs_text)
    with contextlib.closing(running.frontend):
        for line in running.lines():
            note(line)
        yield running


def with_sign(deltas: Iterable[TextDelta]) -> Iterator[TextDelta]:
    """The same deltas; on a terminal something moves until the first, which may have to wait for a compilation."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(Bars().waiting("waiting for the first token; new programs are compiled once"))
        for delta in deltas:
            stack.close()
            yield delta


def _description(path: str | None) -> ModelDescription | None:
    return describe(Path(path)) if path and Path(path).exists() else None
