"""Whether the CPU kernels serve a model. Everything they need is tried before anything is loaded: what is in the way of
a named choice is an error, and of the default one line, for XLA can serve the model too.
"""

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import jax

from jaxserve.engine.progress import Progress
from pallas_kernels.cpu.build import CompilerMissing, KernelBuildError, ObjectsNotKept
from pallas_kernels.cpu.targets import Targets, register
from pallas_kernels.quantized_matmul.cpu import function_of, self_test

# What `--kernels auto` means on a CPU. "xla" until attention is among the CPU kernels; "cpu" from then on.
AUTO_ON_CPU: Literal["cpu", "xla", "reference"] = "xla"
MAX_KERNEL_ERROR = 1e-5  # relative; float32 sums in another order stay near 1e-7

Lack = Literal["compiler", "cache", "build", "self_test"]
_REMEDIES: dict[Lack, str] = {
    "compiler": "install numba",
    "cache": "give a folder that can be written, --compilation-cache-dir",
    "build": "report it",
    "self_test": "report it",
}


class CpuKernelsUnavailable(Exception):
    """What is in the way: `lack` for counting, the message for people."""

    def __init__(self, lack: Lack, message: str) -> None:
        super().__init__(message)
        self.lack: Lack = lack

    @property
    def fallback_line(self) -> str:
        """What failed, what it costs, what to do."""
        return (
            f"no CPU kernels: {self}. XLA serves the model instead, its weights expanded: several times the memory and "
            f"a fraction of the speed. To get them, {_REMEDIES[self.lack]}; --kernels xla asks for this by name"
        )


def default_cpu_kernels() -> Literal["cpu", "xla", "reference"]:
    """What `--kernels auto` tries on a CPU."""
    return AUTO_ON_CPU


def kernel_functions(format_names: Iterable[str]) -> list[str]:
    """The targets that a model needs whose packed weights have these formats."""
    return [function_of(name) for name in sorted(format_names)]


def available_cpu_kernels(
    format_names: Iterable[str], folder: Path | None, level: str | None, progress: Progress
) -> Targets:
    """The kernels for these formats, built into `folder` if need be, registered, and tested on this machine.

    Raises CpuKernelsUnavailable; ValueError for a level this CPU lacks.
    """
    formats = sorted(format_names)
    if folder is None:
        raise CpuKernelsUnavailable("cache", "there is no cache folder to keep them in")
    try:
        targets = _registered(kernel_functions(formats), folder / "kernels", level, progress)
        error = self_test(targets, formats) if formats else 0.0
    except (CompilerMissing, ImportError) as failure:
        raise CpuKernelsUnavailable("compiler", str(failure)) from failure
    except ObjectsNotKept as failure:
        raise CpuKernelsUnavailable("cache", str(failure)) from failure
    except KernelBuildError as failure:
        raise CpuKernelsUnavailable("build", str(failure)) from failure
    except jax.errors.JaxRuntimeError as failure:
        raise CpuKernelsUnavailable("self_test", str(failure)) from failure
    if not error <= MAX_KERNEL_ERROR:  # NaN fails
        raise CpuKernelsUnavailable("self_test", f"the kernels differ from their definition by {error:.1e}")
    return targets


def origins_line(targets: Targets) -> str:
    """Where the machine code came from: "5 prebuilt", "3 cached, 2 compiled"."""
    origins = list(targets.origins.values())
    counts = {origin: origins.count(origin) for origin in ("prebuilt", "cached", "compiled")}
    return ", ".join(f"{count} {origin}" for origin, count in counts.items() if count)


def _registered(functions: list[str], folder: Path, level: str | None, progress: Progress) -> Targets:
    """Building shows as a task."""
    with contextlib.ExitStack() as stack:
        advance: list[Callable[[int], None]] = []

        def built(done: int, total: int) -> None:
            if not advance:
                advance.append(stack.enter_context(progress.task("building CPU kernels", total)))
            else:
                advance[0](1)

        return register(functions, cache_dir=folder, level=level, progress=built)
