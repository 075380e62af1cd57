"""Whether the CPU kernels serve a model. Everything they need is tried before anything is loaded: what is in the way of
a named choice is an error, and of the default one line, for XLA can serve the model too.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxserve.engine.progress import Progress
from jaxserve.kv_cache import CacheSpec, LatentCacheSpec
from pallas_kernels.cpu.build import CompilerMissing, KernelBuildError, ObjectsNotKept
from pallas_kernels.cpu.targets import Targets, register
from pallas_kernels.grouped_matmul import cpu as grouped_cpu
from pallas_kernels.mla_attention import cpu as mla_cpu
from pallas_kernels.paged_attention import cpu as attention_cpu
from pallas_kernels.quantized_matmul import cpu as matmul_cpu

AUTO_ON_CPU: Literal["cpu", "xla", "reference"] = "cpu"  # what `--kernels auto` means on a CPU
MAX_KERNEL_ERROR = 1e-5  # relative; float32 sums in another order stay near 1e-7

Lack = Literal["compiler", "cache", "build", "self_test", "shape"]
_REMEDIES: dict[Lack, str] = {
    "compiler": "install numba",
    "cache": "give a folder that can be written, --compilation-cache-dir",
    "build": "report it",
    "self_test": "report it",
    "shape": "choose sizes that they take",
}


@dataclass(frozen=True, kw_only=True)
class KernelNeeds:
    """What the CPU kernels must serve: formats of packed weights, of experts' ones too, and a cache."""

    formats: frozenset[str]
    cache: CacheSpec
    expert_formats: frozenset[str] = frozenset()

    @property
    def functions(self) -> list[str]:
        """The targets to register."""
        products = [matmul_cpu.function_of(name) for name in sorted(self.formats)]
        grouped = [grouped_cpu.function_of(name) for name in sorted(self.expert_formats)]
        return [*products, *grouped, *self._attention.functions_of(self.cache.dtype)]

    @property
    def _attention(self) -> Any:
        return mla_cpu if isinstance(self.cache, LatentCacheSpec) else attention_cpu

    def check_geometry(self) -> None:
        """Raises ValueError for a cache the kernels do not take."""
        if isinstance(self.cache, LatentCacheSpec):
            mla_cpu.check_geometry(self.cache.page_size, self.cache.latent_size, self.cache.rope_size)
        else:
            attention_cpu.check_geometry(self.cache.page_size, self.cache.head_size)

    def self_test(self, targets: Targets) -> float:
        """The largest relative error of any of the kernels against its definition."""
        errors = [
            matmul_cpu.self_test(targets, sorted(self.formats)) if self.formats else 0.0,
            grouped_cpu.self_test(targets, sorted(self.expert_formats)) if self.expert_formats else 0.0,
            self._attention.self_test(targets, self.cache.dtype),
        ]
        return float(np.max(errors))  # NaN wins


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


def available_cpu_kernels(needs: KernelNeeds, folder: Path | None, level: str | None, progress: Progress) -> Targets:
    """The kernels for these needs, built into `folder` if need be, registered, and tested on this machine.

    Raises CpuKernelsUnavailable; ValueError for a level this CPU lacks.
    """
    try:
        needs.check_geometry()
    except ValueError as failure:
        raise CpuKernelsUnavailable("shape", str(failure)) from failure
    if folder is None:
        raise CpuKernelsUnavailable("cache", "there is no cache folder to keep them in")
    try:
        targets = _registered(needs.functions, folder / "kernels", level, progress)
        error = needs.self_test(targets)
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
