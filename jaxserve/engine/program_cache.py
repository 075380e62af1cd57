"""Compiled programs on disk, loaded without tracing or lowering the model again.

XLA's own cache spares the compilation; finding an entry of it takes the traced and lowered program, most of a second for
a step of thirty layers. Here the finished executable lies under a key of what it would be traced from (program_keys.py).

The folder is the user's own, trusted as XLA's cache and the machine code of the CPU kernels beside it are: an entry is
machine code and is unpickled, so whoever can write the folder can run code as its user. Files are made for their owner
alone; one of another owner, or that others may write, is not opened. A damaged one is compiled anew.
"""

import contextlib
import hashlib
import os
import pickle
import stat
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

FORMAT = b"jaxserve program 1\n"
MAX_FOLDER_BYTES = 256 * 2**20  # a step of a small model takes about 150 KB
MAX_UNUSED_SECONDS = 60 * 24 * 3600
_TEMPORARY = ".part"
_MAX_TEMPORARY_SECONDS = 3600  # what is older was left by a process that died
_SHA256_BYTES = 32


class EntryRefused(Exception):
    """An entry that is there and cannot be used; the message says why."""


class ProgramCache:
    """Programs under their keys in one folder. `note` hears in one line why one could not be read or kept."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.folder = folder
        self._note = note

    def has(self, key: str) -> bool:
        """Whether there is an entry; it may still turn out to be damaged."""
        return self._path(key).exists()

    def load(self, key: str, arguments: tuple[Any, ...]) -> Any | None:
        """The compiled program for these arguments, or None where there is none that can be used."""
        path = self._path(key)
        try:
            program = _loaded(_read(path), key, arguments)
        except FileNotFoundError:
            return None
        except Exception as error:  # unpickling and XLA raise what they like; compiling is always possible
            self._note(f"compiled program {path} is not used and made anew: {_one_line(error)}")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of eviction
        return program

    def store(self, key: str, program: Any) -> None:
        """Keeps a program, if it can be."""
        try:
            payload = zlib.compress(_dumped(program), 1)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError, pickle.PicklingError) as error:
            self._note(f"compiled programs cannot be kept here: {_one_line(error)}")
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self._path(key), FORMAT + bytes.fromhex(key) + hashlib.sha256(payload).digest() + payload)
            evict(self.folder, MAX_FOLDER_BYTES, MAX_UNUSED_SECONDS)
        except OSError as error:
            self._note(f"compiled programs are not kept: {_one_line(error)}")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.program"


def evict(folder: Path, max_bytes: int, max_unused_seconds: float) -> None:
    """Removes entries not used for so long, then those unused for longest until the others fit in max_bytes."""
    now, total = time.time(), 0
    entries = [(found, path) for path in folder.iterdir() if (found := _status(path)) is not None]
    for found, path in sorted(entries, key=lambda entry: -entry[0].st_mtime):
        total += found.st_size
        max_age = _MAX_TEMPORARY_SECONDS if path.suffix == _TEMPORARY else max_unused_seconds
        if total > max_bytes or now - found.st_mtime > max_age:
            path.unlink(missing_ok=True)


def _status(path: Path) -> os.stat_result | None:
    """None for what another process has just removed."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _read(path: Path) -> bytes:
    """The bytes of a file that only this user can have written. Raises EntryRefused, OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022:
            raise EntryRefused("it belongs to another user, or others may write it")
        return file.read()


def _loaded(content: bytes, key: str, arguments: tuple[Any, ...]) -> Any:
    head = len(FORMAT) + 2 * _SHA256_BYTES
    found, digest, payload = content[: len(FORMAT)], content[head - _SHA256_BYTES : head], content[head:]
    if found != FORMAT or content[len(FORMAT) : head - _SHA256_BYTES] != bytes.fromhex(key):
        raise EntryRefused("it is no entry of this format and key")
    if hashlib.sha256(payload).digest() != digest:
        raise EntryRefused("it is damaged")
    executable, outputs = pickle.loads(zlib.decompress(payload))
    return deserialize_and_load(executable, jax.tree.structure((arguments, {})), jax.tree.structure(outputs))


def _dumped(program: Any) -> bytes:
    """The executable, and a tree with the structure of its outputs: structures themselves cannot be pickled."""
    executable, _, structure = serialize(program)
    return pickle.dumps((executable, jax.tree.unflatten(structure, range(structure.num_leaves))))


def _write(path: Path, content: bytes) -> None:
    """All at once: whoever looks sees the whole file or none."""
    descriptor, temporary = tempfile.mkstemp(suffix=_TEMPORARY, dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
