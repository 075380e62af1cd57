"""What callers ask of the engine's thread."""

import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxserve.frontend.generation import Generation
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Request


@dataclass(frozen=True, slots=True)
class Add:
    generation: Generation
    requests: list[Request]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Abort:
    generation: Generation


@dataclass(frozen=True, slots=True)
class Ask:
    """A function to call between two steps."""

    function: Callable[[], Any]
    answer: Future[Any]

    def run(self) -> None:
        """Answers with what the function gives or raises."""
        try:
            self.answer.set_result(self.function())
        except Exception as error:
            self.answer.set_exception(error)


type Commands = queue.SimpleQueue[Add | Abort | Ask | None]


def refuse_questions(commands: Commands, error: Exception) -> None:
    """Takes all commands off, which nobody will read any more; whoever waits for an answer gets the error."""
    with contextlib.suppress(queue.Empty):
        while True:
            command = commands.get_nowait()
            if isinstance(command, Ask):
                command.answer.set_exception(error)
