"""Compiled programs on disk, loaded without tracing or lowering the model again.

XLA's own cache spares the compilation; finding an entry of it takes the traced and lowered program, most of a second
for a step of thirty layers. Here executables lie under a key of their lowered text, and beside them entries that lead
there from what the text was traced from (program_keys.py). After a change of sources that changes no program, only
these are made anew.

The folder is the user's own, trusted as XLA's cache and the machine code of the CPU kernels beside it are: an entry is
machine code and is unpickled, so whoever can write the folder can run code as its user. Files are made for their owner
alone; one of another owner, or that others may write, is not opened. A damaged one is made anew.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

FORMAT = b"jaxserve program 1\n"
MAX_FOLDER_BYTES = 256 * 2**20  # a step of a small model takes about 150 KB
MAX_UNUSED_DAYS = 60
_TEMPORARY = ".part"
_MAX_TEMPORARY_SECONDS = 3600  # what is older was left by a process that died
_DAY_SECONDS = 24 * 3600
_SHA256_BYTES = 32


class EntryRefused(Exception):
    """An entry that is there and is not used; the message says why."""


class EntryDamaged(EntryRefused):
    """An entry that nobody can use."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where a traced program's executable is, a tree with the structure of its outputs, and its temporary bytes."""

    lowered_key: str
    outputs: Any
    temp_bytes: int


@dataclass(frozen=True, kw_only=True)
class HeldProgram:
    """A program in memory as it is on disk, a tenth of what it takes when loaded."""

    link: Link
    entry: bytes


class ProgramCache:
    """Programs under their keys in one folder. `note` hears in one line why one could not be read or kept."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self.folder = folder
        self._note = note

    def load_traced(self, key: str, arguments: tuple[Any, ...]) -> Any | None:
        """The program under the key of what it is traced from, or None where there is none that can be used."""
        held = self.hold(key)
        return None if held is None else self.load_held(held, arguments)

    def hold(self, key: str) -> HeldProgram | None:
        """The same program, not loaded yet."""
        link = self._read(key)
        entry = None if link is None else self._entry(link.lowered_key)
        return HeldProgram(link=link, entry=entry) if link and entry else None

    def load_held(self, held: HeldProgram, arguments: tuple[Any, ...]) -> Any | None:
        """A program that was held, or None, which is said, where it cannot be loaded."""
        return self._program(held.link.lowered_key, held.entry, arguments, jax.tree.structure(held.link.outputs))

    def load_lowered(self, key: str, arguments: tuple[Any, ...], outputs: Any) -> Any | None:
        """The program under the key of its text, or None. outputs: the structure of what it returns."""
        entry = self._entry(key)
        return None if entry is None else self._program(key, entry, arguments, outputs)

    def store(self, key: str, program: Any) -> bool:
        """Keeps a program that XLA has just compiled under the key of its text; whether it could."""
        try:
            executable, _, _ = serialize(program)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            self._note(f"compiled programs cannot be kept on disk: {_one_line(error)}")
            return False
        return self._write(key, executable)

    def link(self, key: str, lowered_key: str, program: Any, outputs: Any) -> None:
        """Leads from the key of what a program is traced from to that of its text."""
        tree = jax.tree.unflatten(outputs, range(outputs.num_leaves))  # structures themselves cannot be pickled
        self._write(key, Link(lowered_key=lowered_key, outputs=tree, temp_bytes=temp_bytes(program)))

    def _program(self, key: str, entry: bytes, arguments: tuple[Any, ...], outputs: Any) -> Any | None:
        try:
            executable = _unpacked(entry)
            return deserialize_and_load(executable, jax.tree.structure((arguments, {})), outputs)
        except Exception as error:  # XLA and unpickling raise what they like; compiling is always possible
            self._note(f"compiled program {self._path(key)} cannot be loaded, it is made anew: {_one_line(error)}")
            return None

    def _read(self, key: str) -> Link | None:
        entry = self._entry(key)
        try:
            return None if entry is None else _unpacked(entry)
        except Exception as error:
            self._note(f"compiled program {self._path(key)} is not used, it is made anew: {_one_line(error)}")
            return None

    def _entry(self, key: str) -> bytes | None:
        """What is stored under a key, sound but still packed; None where nothing is that can be used."""
        path = self._path(key)
        try:
            entry = _checked(_read(path), key)
        except FileNotFoundError:
            return None
        except (OSError, EntryRefused) as error:
            self._note(f"compiled program {path} is not used, it is made anew: {_one_line(error)}")
            if isinstance(error, EntryDamaged):
                path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the order of eviction
        return entry

    def _write(self, key: str, entry: Any) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(self._path(key), _packed(entry, key))
            evict(self.folder, MAX_FOLDER_BYTES, MAX_UNUSED_DAYS)
        except OSError as error:
            self._note(f"compiled programs are not kept on disk: {_one_line(error)}")
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.program"


def temp_bytes(program: Any) -> int:
    """What a compiled program allocates while it runs, besides arguments and results."""
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes if memory else 0


def evict(folder: Path, max_bytes: int, max_unused_days: int) -> None:
    """Removes entries not used for so long, then those unused for longest until the others fit in max_bytes."""
    now, total = time.time(), 0
    entries = [(found, path) for path in folder.iterdir() if (found := _status(path)) is not None]
    for found, path in sorted(entries, key=lambda entry: -entry[0].st_mtime):
        total += found.st_size
        max_age = _MAX_TEMPORARY_SECONDS if path.suffix == _TEMPORARY else max_unused_days * _DAY_SECONDS
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


def _packed(entry: Any, key: str) -> bytes:
    payload = zlib.compress(pickle.dumps(entry), 1)
    return FORMAT + bytes.fromhex(key) + hashlib.sha256(payload).digest() + payload


def _unpacked(entry: bytes) -> Any:
    return pickle.loads(zlib.decompress(entry))


def _checked(content: bytes, key: str) -> bytes:
    """The packed entry of a file's content. Raises EntryDamaged."""
    digest_at = len(FORMAT) + _SHA256_BYTES
    payload_at = digest_at + _SHA256_BYTES
    if content[:digest_at] != FORMAT + bytes.fromhex(key):
        raise EntryDamaged("it is no entry of this format and key")
    if hashlib.sha256(content[payload_at:]).digest() != content[digest_at:payload_at]:
        raise EntryDamaged("it is damaged")
    return content[payload_at:]


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
