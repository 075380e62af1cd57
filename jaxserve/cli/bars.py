"""Progress of start-up work on stderr: bars on a terminal, one line per finished task elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxserve.cli.terminal import note, visible_line


class Bars:
    """The Progress that the engine reports to."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    @contextmanager
    def task(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar while the block runs; it leaves nothing on the screen once done."""
        start = time.perf_counter()
        if self._console.is_terminal:
            with self._bar(name, total) as advance:
                yield advance
        else:
            yield lambda units: None
            note(f"{name}: {total:,} in {time.perf_counter() - start:.1f} s")

    def waiting(self, what: str) -> AbstractContextManager[Any]:
        """A moving sign on a terminal while something without a known length goes on."""
        return self._console.status(visible_line(what)) if self._console.is_terminal else nullcontext()

    @contextmanager
    def _bar(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(visible_line(name), total=total)
            yield lambda units: progress.advance(task, units)

    def note(self, line: str) -> None:
        """One line of information."""
        note(line)
