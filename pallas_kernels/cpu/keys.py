"""Names of object files and of XLA targets: hashes of what their machine code depends on.

The source key covers what kernels are made of and can be computed where they only run. Which compilers made an object
is known beside it (prebuilt.py) or from what is installed, and is added to it in the target's name.
"""

import hashlib
import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

from pallas_kernels.cpu.levels import Level

# Modules of this folder that find, keep and load finished code: no machine code depends on them.
_NO_PART_OF_KERNELS = frozenset({"__init__", "targets", "keys", "build", "prebuilt", "object_files"})


def source_key(function: str, level: Level) -> str:
    """Of the sources, the level and the kind of machine. Raises ValueError for what is no module:attribute."""
    digest = hashlib.sha256(repr((function, level, sys.platform, platform.machine())).encode())
    own = (path for path in _sources(Path(__file__).parent) if path.stem not in _NO_PART_OF_KERNELS)
    for source in (*own, *_sources(_module_file(function).parent)):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def object_key(source: str, compilers: str) -> str:
    """Of everything: `source` is a source key, `compilers` what made the object."""
    return hashlib.sha256(f"{source} {compilers}".encode()).hexdigest()[:16]


def installed_compilers() -> str:
    """What would compile here, in words. Raises PackageNotFoundError when it is not installed."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("numba", "llvmlite"))


def short_name(function: str) -> str:
    """pallas_kernels.quantized_matmul.cpu_compiled:q4_1 -> quantized_matmul_q4_1."""
    module, attribute = function.split(":")
    return f"{module.split('.')[-2:][0]}_{attribute}"


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def _module_file(function: str) -> Path:
    """Found without importing: the module imports numba."""
    module, _, attribute = function.partition(":")
    try:
        spec = importlib.util.find_spec(module) if attribute else None
    except ModuleNotFoundError:  # of the package it would be in
        spec = None
    if spec is None or spec.origin is None:
        raise ValueError(f"{function!r} is no kernel: expected module:attribute of a module that can be imported")
    return Path(spec.origin)
