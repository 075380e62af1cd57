"""How long-running start-up work reports itself, without knowing whether anybody watches."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Shows named tasks; the command line gives one that draws bars."""

    def task(self, name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """A context whose value is called with the number of units just finished."""
        ...

    def note(self, line: str) -> None:
        """One line of information."""
        ...


class Silent:
    """Shows nothing."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        yield lambda units: None

    def note(self, line: str) -> None:
        pass


class Notes:
    """One line on stderr for each thing that took its time; for notebooks and terminals without bars."""

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        start = time.perf_counter()
        yield lambda units: None
        self.note(f"{name}: {total} in {time.perf_counter() - start:.1f} s")

    def note(self, line: str) -> None:
        print(f"jaxserve: {line}", file=sys.stderr, flush=True)
