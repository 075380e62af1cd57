"""Makes kernels callable by XLA: compiles what is not cached, registers it, and says under which name.

A target's name carries a hash of all its machine code depends on: the sources, the CPU level, the compilers. So a
compiled program in XLA's persistent cache can only meet the kernel it was built with, or none.
"""

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.cpu.levels import Level, level_named
from pallas_kernels.cpu.native import NativeCode

_DIGEST_BYTES = 32
_SYMBOL = "entry"
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

    Object files lie in `cache_dir`; missing ones are compiled by child processes, one per core at a time, and
    `progress` is then called with how many of them are done and how many there are: first with 0, at last with all.
    `level` names a CPU level of levels.py, None the host's best. Raises ValueError for an unknown level and for a
    function whose module does not exist, KernelBuildError.
    """
    chosen = level_named(level)
    functions = sorted(set(functions))
    keys = {function: _key(function, chosen) for function in functions}
    paths = {function: cache_dir / f"{_short_name(function)}-{keys[function]}.o" for function in functions}
    missing = [function for function in functions if _cached_object(paths[function]) is None]
    _build({function: paths[function] for function in missing}, chosen, progress or (lambda done, total: None))
    names = {function: f"cpu_{_short_name(function)}_{keys[function]}" for function in functions}
    with _registering:
        for function in functions:
            _register_once(names[function], paths[function], chosen)
    return Targets(level=chosen.name, names=names)


@functools.cache
def _register_once(name: str, path: Path, level: Level) -> NativeCode:
    """The registered code. XLA keeps a target for the life of the process, and so does the cache of this function."""
    object_code = _cached_object(path)
    if object_code is None:
        raise KernelBuildError(f"{path} was removed or damaged while kernels were registered; run again")
    code = NativeCode(object_code, level)
    jax.ffi.register_ffi_target(name, _capsule(code.address(_SYMBOL)), platform="cpu")
    return code


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
    for source in (*_sources(Path(__file__).parent), *_sources(_module_file(function).parent)):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _sources(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.py"))


def _module_file(function: str) -> Path:
    """Found without importing: the module imports numba."""
    module, _, attribute = function.partition(":")
    spec = importlib.util.find_spec(module) if attribute else None
    if spec is None or spec.origin is None:
        raise ValueError(f"{function!r} is no kernel: expected module:attribute of a module that can be imported")
    return Path(spec.origin)


def _cached_object(path: Path) -> bytes | None:
    """The object code in a cache file, None when there is none or it is damaged: LLVM aborts on bad code."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    digest, object_code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return object_code if hashlib.sha256(object_code).digest() == digest else None


def _build(missing: Mapping[str, Path], level: Level, progress: Callable[[int, int], None]) -> None:
    """Compiles each function in a child process into its cache file."""
    if not missing:
        return
    progress(0, len(missing))
    with ThreadPoolExecutor(max_workers=min(len(missing), len(os.sched_getaffinity(0)))) as pool:
        compiled = pool.map(lambda function: _compile(function, missing[function], level), missing)
        for done, _ in enumerate(compiled, start=1):
            progress(done, len(missing))


def _compile(function: str, path: Path, level: Level) -> None:
    """One function; readers see the whole file or none, also when several processes write it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
            object_file = Path(folder) / "code.o"
            _run_child(function, object_file, level)
            object_code = object_file.read_bytes()
            signed = Path(folder) / "signed.o"
            signed.write_bytes(hashlib.sha256(object_code).digest() + object_code)
            signed.replace(path)
    except OSError as error:
        raise KernelBuildError(f"cannot keep compiled kernels in {path.parent}: {error}") from error


def _run_child(function: str, object_file: Path, level: Level) -> None:
    arguments = [json.dumps(sys.path), level.name, _SYMBOL, function, str(object_file)]
    done = subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_lines = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise KernelBuildError(f"compiling {function} for {level.name} failed (exit {done.returncode}): {last_lines}")
