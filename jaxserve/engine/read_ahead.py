"""Parameters in order, the next one already on its way from the disk."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class AsksAhead(Protocol):
    """A file whose parameters can be asked for before they are read."""

    def ask_for(self, parameter: str) -> None: ...


@contextmanager
def read_ahead(file: AsksAhead, parameters: Sequence[str]) -> Iterator[Iterator[str]]:
    """The parameters one by one; while one is in use, one thread asks for the next, and no further."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as thread:
        yield _one_ahead(file, parameters, thread)


def _one_ahead(file: AsksAhead, parameters: Sequence[str], thread: ThreadPoolExecutor) -> Iterator[str]:
    asked: Future[None] | None = None
    for number, parameter in enumerate(parameters):
        if asked is not None:
            asked.result()
        if number + 1 < len(parameters):
            asked = thread.submit(file.ask_for, parameters[number + 1])
        yield parameter
