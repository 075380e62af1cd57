"""Names of object files and of XLA targets: hashes of what their machine code depends on.

The source key covers what kernels are made of and can be computed where they only run. Which compilers made an object
is known beside it (prebuilt.py) or from what is installed, and is added to it in the target's name.
"""

import ast
import functools
import hashlib
import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

from pallas_kernels.cpu.levels import Level

_PACKAGE = Path(__file__).parents[1]
# Modules of this folder that find, keep and load finished code: no machine code depends on them.
_NO_PART_OF_KERNELS = frozenset({"__init__", "targets", "keys", "build", "prebuilt", "object_files"})


def source_key(function: str, level: Level) -> str:
    """Of the sources, the level and the kind of machine. Raises ValueError for what is no module:attribute."""
    digest = hashlib.sha256(repr((function, level, sys.platform, platform.machine())).encode())
    here = Path(__file__).parent
    sources = set(here.glob("*.py")) | _imported_sources(_module_file(function))
    for source in sorted(sources - {here / f"{name}.py" for name in _NO_PART_OF_KERNELS}):
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


def _imported_sources(module_file: Path) -> set[Path]:
    """A module's file and those it imports from its folder and from this package, at any distance. Only read: the
    modules import numba."""
    found: set[Path] = set()
    waiting = [module_file]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            names = _imported(source.read_bytes())
            paths = [root.joinpath(*name.split(".")) for name in names for root in (_PACKAGE.parent, source.parent)]
            waiting += [path.with_suffix(".py") for path in paths if path.with_suffix(".py").exists()]
    return found


@functools.lru_cache(maxsize=64)  # the functions of a model come from a few modules that import the same ones
def _imported(source: bytes) -> frozenset[str]:
    """What may be the name of a module, in all import statements."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


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
