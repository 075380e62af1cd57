"""Makes kernels callable by XLA: compiles what is not cached, registers it, and says under which name.

A target's name carries a hash of all its machine code depends on: the sources, the CPU level, the compilers. So a
compiled program in XLA's persistent cache can only meet the kernel it was built with, or none.
"""

import ast
import ctypes
import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.cpu.levels import Level, level_named
from pallas_kernels.cpu.native import NativeCode
from pallas_kernels.cpu.object_files import read_object

_PACKAGE = Path(__file__).parents[1]
# By XLA's name. Like XLA's own table, which refuses a name twice, for the life of the process: it runs this code.
_registered: dict[str, NativeCode] = {}
_registering = threading.Lock()
# Run in the child: the parent's import path, then the compiler as if by `python -m`.
_CHILD = (
    "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module('pallas_kernels.cpu.compiler', run_name='__main__', alter_sys=True)"
)


class KernelBuildError(RuntimeError):
    """A kernel could not be compiled, or its object file not be kept."""


class NotRegistered(KeyError):
    """A kernel was called that `register` was not asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The registered kernels: XLA's name for each function, a "module:attribute"."""

    level: str
    names: Mapping[str, str]

    def name_of(self, function: str) -> str:
        """XLA's name for a function. Raises NotRegistered."""
        if function not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            raise NotRegistered(f"CPU kernel {function} is not registered (registered: {known}); pass it to register()")
        return self.names[function]


def register(
    functions: Iterable[str],
    *,
    cache_dir: Path,
    level: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Targets:
    """Makes each function, a "module:attribute" of machine code, callable through jax.ffi; again and again if you like.

    Object files lie in `cache_dir`; missing ones are compiled by child processes, one for each core, and `progress` is
    then called with how many of them are done and how many there are: first with 0, at last with all, from another
    thread. `level` names a CPU level of levels.py, None the host's best. Raises ValueError for an unknown level and for
    a function whose module does not exist, KernelBuildError.
    """
    chosen = level_named(level)
    functions = sorted(set(functions))
    keys = {function: _key(function, chosen) for function in functions}
    names = {function: f"cpu_{_short_name(function)}_{keys[function]}" for function in functions}
    paths = {f: cache_dir / f"{_short_name(f)}-{keys[f]}.o" for f in functions if names[f] not in _registered}
    if paths:
        _make_folder(cache_dir)
    missing = {function: path for function, path in paths.items() if read_object(path) is None}
    _build(missing, chosen, progress or (lambda done, total: None))
    with _registering:
        for function, path in paths.items():
            _register_once(names[function], path, chosen)
    return Targets(level=chosen.name, names=names)


def _register_once(name: str, path: Path, level: Level) -> None:
    """Hands a function to XLA, unless another thread has."""
    if name in _registered:
        return
    object_code = read_object(path)
    if object_code is None:
        raise KernelBuildError(f"{path} was removed or damaged while kernels were registered; run again")
    code = NativeCode(object_code, level)
    jax.ffi.register_ffi_target(name, _capsule(code.address), platform="cpu")
    _registered[name] = code


def _capsule(address: int) -> Any:
    """What jax.ffi expects for the C function at `address`."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, b"xla._CUSTOM_CALL_TARGET", None)


def _short_name(function: str) -> str:
    """pallas_kernels.quantized_matmul.cpu_compiled:q4_1 -> quantized_matmul_q4_1."""
    module, attribute = function.split(":")
    return f"{module.split('.')[-2:][0]}_{attribute}"


def _key(function: str, level: Level) -> str:
    """Hash of everything the machine code depends on."""
    digest = hashlib.sha256(repr((function, level, metadata.version("numba"), metadata.version("llvmlite"))).encode())
    for source in (*sorted(Path(__file__).parent.glob("*.py")), *sorted(_sources(_module_file(function)))):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _sources(module_file: Path) -> set[Path]:
    """A module's file and those it imports from its folder and from this package, at any distance. Only read: the
    modules import numba."""
    found, waiting = set(), [module_file]
    while waiting:
        source = waiting.pop()
        if source not in found:
            found.add(source)
            names = _imported(ast.parse(source.read_bytes()))
            paths = [root.joinpath(*name.split(".")) for name in names for root in (_PACKAGE.parent, source.parent)]
            waiting += [path.with_suffix(".py") for path in paths if path.with_suffix(".py").exists()]
    return found


def _imported(tree: ast.Module) -> set[str]:
    """What may be the name of a module, in all import statements."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


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


def _build(missing: Mapping[str, Path], level: Level, progress: Callable[[int, int], None]) -> None:
    """Compiles the functions into their files, in one child process per core. Raises KernelBuildError."""
    if not missing:
        return
    num_done, counting = itertools.count(1), threading.Lock()

    def count_one() -> None:
        with counting:
            progress(next(num_done), len(missing))

    progress(0, len(missing))
    num_children = min(len(missing), len(os.sched_getaffinity(0)))
    # Functions of one child share the compilation of what they call.
    shares = [list(missing.items())[i::num_children] for i in range(num_children)]
    with ThreadPoolExecutor(max_workers=num_children) as pool:
        list(pool.map(lambda share: _compile(share, level, count_one), shares))


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelBuildError(f"cannot keep compiled kernels in {folder}: {error}") from error


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
