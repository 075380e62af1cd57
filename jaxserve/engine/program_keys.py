"""Keys of compiled programs on disk: equal only where tracing and compiling again would give the same program.

`traced_key` names what a program would be traced from: the sources of our packages, the functions with the values they
hold, and the arguments' shapes. What has no reliable name (a function from elsewhere, an object with state) gets no
such key. `lowered_key` names the program's text as it is handed to XLA. In both are the versions of Python and JAX, the
device with XLA's description of it, XLA's own options and JAX's configuration.
"""

import functools
import hashlib
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import jax
import numpy as np
from jaxlib import xla_client

from jaxserve.engine.threads import pool_size
from pallas_kernels.cpu.targets import Targets

PACKAGES = ("jaxserve", "pallas_kernels", "sharding", "checkpoints")
_ROOT = Path(__file__).resolve().parents[2]
_IMPORTED_AT = time.time()
# Where and when programs are kept, not what they are.
_KEEPING = ("jax_compilation_cache_", "jax_persistent_cache_")
_LIBRARIES = ("builtins", "jax", "numpy", "ml_dtypes")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Nameless(Exception):
    """Something that a program is made of has no name that tells it from everything else."""


def traced_key(name: str, made_of: Any, arguments: tuple[Any, ...]) -> str:
    """The key of the program that `made_of` (functions, configs, shapes) would give for these arguments.

    Raises Nameless.
    """
    return _key("traced", name, _sources(), _surroundings(), identity(made_of), _described(arguments))


def lowered_key(name: str, text: str, arguments: tuple[Any, ...]) -> str:
    """The key of the program that XLA makes of this text, to be called with these arguments. Raises Nameless."""
    return _key("lowered", name, text, _surroundings(), _described(arguments))


def _key(*told: Any) -> str:
    return hashlib.sha256(repr(told).encode()).hexdigest()


def identity(value: Any) -> Any:
    """Nested tuples of plain values, equal for values that stand for the same computation. Raises Nameless."""
    if isinstance(value, Enum) or type(value) in _PLAIN:
        return (type(value).__name__, repr(value))
    if isinstance(value, list | tuple | Mapping | set | frozenset):
        return (type(value).__name__, *_members(value))
    if isinstance(value, np.ndarray | np.generic):
        content = np.ascontiguousarray(value)
        return ("array", str(content.dtype), np.shape(value), hashlib.sha256(content.tobytes()).hexdigest())
    if isinstance(value, np.dtype):
        return ("dtype", str(value))
    if isinstance(value, type) and value.__module__.split(".")[0] in (*PACKAGES, *_LIBRARIES):
        return ("type", _name(value))
    if isinstance(value, Targets):  # not where their machine code came from; the names carry hashes of it
        return ("targets", value.level, *_members(value.names))
    if isinstance(value, functools.partial):
        return ("partial", identity(value.func), identity(value.args), identity(value.keywords))
    if is_dataclass(value) and type(value).__module__.split(".")[0] in PACKAGES:
        return (_name(type(value)), *((f.name, identity(getattr(value, f.name))) for f in fields(value)))
    return _function_identity(value)


def _members(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        return tuple(sorted((repr(identity(key)), identity(value[key])) for key in value))
    members = [identity(member) for member in value]
    return tuple(sorted(members, key=repr) if isinstance(value, set | frozenset) else members)


def _function_identity(value: Any) -> Any:
    """By its place in our sources, which have a hash of their own, and by the values it closes over."""
    function = getattr(value, "__wrapped__", value)
    if isinstance(function, BuiltinFunctionType) and function.__self__ is None:
        return ("builtin", _name(function))
    if not isinstance(function, FunctionType) or function.__module__.split(".")[0] not in PACKAGES:
        raise Nameless(f"{value!r:.200} is no function of jaxserve")
    closed_over = [cell.cell_contents for cell in function.__closure__ or ()]
    given = (function.__defaults__, function.__kwdefaults__, closed_over)
    return ("function", _name(function), _place(function.__code__), identity(given))


def _place(code: CodeType) -> tuple[Any, ...]:
    """Line, and of lambdas, of which one line may have several, what they do."""
    if code.co_name != "<lambda>":
        return (code.co_firstlineno,)
    constants = tuple(_place(c) if isinstance(c, CodeType) else identity(c) for c in code.co_consts)
    return code.co_firstlineno, code.co_code, code.co_names, constants


def _name(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _described(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments' tree with its static values, and of each leaf what a program is specialized for."""
    leaves, structure = jax.tree.flatten(arguments)
    return str(structure), tuple(_leaf(leaf) for leaf in leaves)


def _leaf(leaf: Any) -> tuple[Any, ...]:
    aval = jax.typeof(leaf) if isinstance(leaf, jax.Array) else leaf
    described = (tuple(aval.shape), _text(aval.dtype), bool(getattr(aval, "weak_type", False)))
    if not isinstance(leaf, jax.Array):
        return described
    return *described, leaf.committed, str(leaf.format)  # type: ignore[attr-defined]  # its layout and its sharding


@functools.cache
def _text(dtype: Any) -> str:
    return str(dtype)  # slower than all else about a leaf


def _surroundings() -> tuple[Any, ...]:
    """What every program of this process depends on."""
    devices = jax.devices()
    options = xla_client.CompileOptions()
    _ = options.executable_build_options.debug_options  # reads XLA's flags; without it they are not written out
    config = jax.config.values
    try:
        topology = xla_client.get_topology_for_devices(devices).serialize()  # the CPU's instructions are in it
    except jax.errors.JaxRuntimeError as error:
        raise Nameless(f"{devices[0].device_kind} does not describe itself") from error
    return (
        sys.version,
        _versions(),
        [(device.id, device.device_kind, device.process_index) for device in devices],
        jax.local_device_count(),
        devices[0].client.platform_version,
        hashlib.sha256(topology).hexdigest(),
        hashlib.sha256(options.SerializeAsString()).hexdigest(),
        [(name, repr(getattr(jax.config, name, config[name]))) for name in sorted(config) if _matters(name)],
        pool_size(),
    )


def _matters(option: str) -> bool:
    return not option.startswith(_KEEPING)


@functools.cache
def _versions() -> tuple[str, ...]:
    return tuple(metadata.version(name) for name in ("jax", "jaxlib", "numpy"))


def _sources() -> str:
    """Of all Python files of our packages. Raises Nameless where one changed since they were imported: what runs is
    then not what the files say."""
    digest, changed_at = _read_sources()
    if changed_at > _IMPORTED_AT:
        raise Nameless("sources changed after they were imported")
    return digest


@functools.cache
def _read_sources() -> tuple[str, float]:
    digest, changed_at = hashlib.sha256(), 0.0
    for package in PACKAGES:
        paths = sorted((_ROOT / package).rglob("*.py"))
        if not paths:
            raise Nameless(f"{package} has no sources beside jaxserve's own")
        for path in paths:
            content = path.read_bytes()
            changed_at = max(changed_at, path.stat().st_ctime)  # also moves when an older file is put in its place
            digest.update(f"{path.relative_to(_ROOT)} {len(content)}\n".encode() + content)
    return digest.hexdigest(), changed_at
