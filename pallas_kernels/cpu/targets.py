"""Makes kernels callable by XLA: finds or compiles their machine code, registers it, and says under which name.

A target's name carries a hash of all its machine code depends on: the sources, the CPU level, the compilers. So a
compiled program in XLA's persistent cache can only meet the kernel it was built with, or none.
"""

import ctypes
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax

from pallas_kernels.cpu import prebuilt
from pallas_kernels.cpu.build import CompilerMissing, KernelBuildError, build
from pallas_kernels.cpu.keys import installed_compilers, object_key, short_name, source_key
from pallas_kernels.cpu.levels import Level, level_named
from pallas_kernels.cpu.native import NativeCode
from pallas_kernels.cpu.object_files import read_object

Origin = Literal["prebuilt", "cached", "compiled"]


class NotRegistered(KeyError):
    """A kernel was called that `register` was not asked for."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The registered kernels: XLA's name for each function, a "module:attribute", and where its machine code came from
    when this process first needed it."""

    level: str
    names: Mapping[str, str]
    origins: Mapping[str, Origin] = field(default_factory=dict)

    def name_of(self, function: str) -> str:
        """XLA's name for a function. Raises NotRegistered."""
        if function not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            raise NotRegistered(f"CPU kernel {function} is not registered (registered: {known}); pass it to register()")
        return self.names[function]


@dataclass(frozen=True, kw_only=True)
class _Object:
    """The machine code of a function: XLA's name for it, and the file it is or will be in."""

    name: str
    path: Path
    origin: Origin


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    code: NativeCode
    origin: Origin


# By XLA's name. Like XLA's own table, which refuses a name twice, for the life of the process: it runs this code.
_registered: dict[str, _Loaded] = {}
_registering = threading.Lock()


def register(
    functions: Iterable[str],
    *,
    cache_dir: Path,
    level: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    prebuilt_dir: Path = prebuilt.FOLDER,
) -> Targets:
    """Makes each function, a "module:attribute" of machine code, callable through jax.ffi; again and again if you like.

    Object files are looked for in `prebuilt_dir`, then in `cache_dir`; missing ones are compiled into the latter by
    child processes, with `progress` as in `build`. `level` names a CPU level of levels.py, None the host's best. Raises
    ValueError for an unknown level, one this CPU lacks, and a function whose module does not exist; KernelBuildError.
    """
    chosen = level_named(level)
    shipped = prebuilt.open_prebuilt(prebuilt_dir)
    objects = {function: _locate(function, chosen, shipped, cache_dir) for function in sorted(set(functions))}
    missing = {function: found.path for function, found in objects.items() if found.origin == "compiled"}
    build(missing, chosen, progress or (lambda done, total: None))
    with _registering:
        for found in objects.values():
            _register_once(found, chosen)
    names = {function: found.name for function, found in objects.items()}
    return Targets(level=chosen.name, names=names, origins={f: _registered[name].origin for f, name in names.items()})


def _locate(function: str, level: Level, shipped: prebuilt.PrebuiltObjects, cache_dir: Path) -> _Object:
    """Where a function's object is, or, with the origin "compiled", is to be put."""
    path = shipped.path_of(function, level)
    if path is not None:
        assert shipped.compilers is not None, "objects come with an index"
        return _Object(name=_target_name(function, level, shipped.compilers), path=path, origin="prebuilt")
    try:
        compilers = installed_compilers()
    except metadata.PackageNotFoundError as error:
        raise CompilerMissing(
            f"no finished kernel {short_name(function)} for {level.name} came with this package, and {error.name}, "
            "which compiles it, is not installed"
        ) from error
    name = _target_name(function, level, compilers)
    path = cache_dir / f"{name.removeprefix('cpu_')}.o"
    is_there = name in _registered or read_object(path) is not None
    return _Object(name=name, path=path, origin="cached" if is_there else "compiled")


def _target_name(function: str, level: Level, compilers: str) -> str:
    return f"cpu_{short_name(function)}_{object_key(source_key(function, level), compilers)}"


def _register_once(found: _Object, level: Level) -> None:
    """Hands a function to XLA, unless that was done before or by another thread."""
    if found.name in _registered:
        return
    object_code = read_object(found.path)
    if object_code is None:
        raise KernelBuildError(f"{found.path} was removed or damaged while kernels were registered; run again")
    code = NativeCode(object_code, level)
    jax.ffi.register_ffi_target(found.name, _capsule(code.address), platform="cpu")
    _registered[found.name] = _Loaded(code=code, origin=found.origin)


def _capsule(address: int) -> Any:
    """What jax.ffi expects for the C function at `address`."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, b"xla._CUSTOM_CALL_TARGET", None)
