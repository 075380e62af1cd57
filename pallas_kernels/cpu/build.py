"""Compiles kernels in child processes, side by side."""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pallas_kernels.cpu.levels import Level

# Run in the child: the parent's import path, then the compiler as if by `python -m`.
_CHILD = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module('pallas_kernels.cpu.compiler', run_name='__main__', alter_sys=True)"
)


class KernelBuildError(RuntimeError):
    """A kernel could not be had. Its subclasses say at what it failed; this class itself: at compiling."""


class CompilerMissing(KernelBuildError):
    """No finished object fits, and what would compile one is not installed."""


class ObjectsNotKept(KernelBuildError):
    """The folder for compiled kernels cannot be written."""


def build(missing: Mapping[str, Path], level: Level, progress: Callable[[int, int], None]) -> None:
    """Compiles the functions into their files, in one child process per core. Raises KernelBuildError.

    `progress` is called with how many are done and how many there are: first with 0, at last with all, from another
    thread. This CPU may lack the level.
    """
    if not missing:
        return
    num_done, counting = itertools.count(1), threading.Lock()

    def count_one() -> None:
        with counting:
            progress(next(num_done), len(missing))

    for folder in {path.parent for path in missing.values()}:
        _make_folder(folder)
    progress(0, len(missing))
    num_children = min(len(missing), len(os.sched_getaffinity(0)))
    # Functions of one child share the compilation of what they call.
    shares = [list(missing.items())[i::num_children] for i in range(num_children)]
    with ThreadPoolExecutor(max_workers=num_children) as pool:
        list(pool.map(lambda share: _compile(share, level, count_one), shares))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass  # known now, not after a minute of compiling
    except OSError as error:
        raise ObjectsNotKept(f"cannot keep compiled kernels in {folder}: {error}") from error


def _compile(share: Sequence[tuple[str, Path]], level: Level, finished_one: Callable[[], None]) -> None:
    """Runs one child over its functions; it writes a line for each."""
    arguments = [json.dumps(sys.path), level.name]
    for function, path in share:
        arguments += [function, str(path)]
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, "-c", _CHILD, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
            assert child.stdout is not None
            for _ in child.stdout:
                finished_one()
        if child.returncode != 0:
            errors.seek(0)
            raise KernelBuildError(
                f"compiling {', '.join(function for function, _ in share)} for {level.name} failed "
                f"(exit {child.returncode}): {_last_lines(errors.read())}"
            )


def _last_lines(text: str) -> str:
    return " | ".join(text.strip().splitlines()[-3:])
