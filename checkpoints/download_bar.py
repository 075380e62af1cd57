"""A progress bar for a download, on stderr; or nothing at all."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class Bar:
    """One download's bar; without a `progress` it shows nothing."""

    def __init__(self, progress: Progress | None, label: str, total_bytes: int) -> None:
        self._progress = progress
        self._total_bytes = total_bytes
        self._task = progress.add_task(label, total=total_bytes) if progress else None

    def show(self, num_bytes: int) -> None:
        """Moves the bar to this many bytes."""
        if self._progress and self._task is not None:
            self._progress.update(self._task, completed=min(num_bytes, self._total_bytes))


@contextmanager
def download_bar(label: str, total_bytes: int, *, shown: bool) -> Iterator[Bar]:
    """A bar for one download of a known size."""
    if not shown:
        yield Bar(None, label, total_bytes)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        yield Bar(progress, label, total_bytes)
