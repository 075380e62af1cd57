"""A GGUF file, opened and checked: its metadata as Python values, its tensors as views on the mapped file.

Reads version 2 and 3, little-endian. The file is taken for hostile: every length, count and offset is compared with
the bytes that are left before anything of that size is read or allocated. What a tensor's bytes mean is not known here.
Layout: the GGUF specification in the ggml repository (docs/gguf.md).
"""

import contextlib
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.pages import ask_for_pages, release_pages
from checkpoints.tensors import BLOCK_SIZES, GGUF_REMOVED_TYPES, GGUF_TYPE_NAMES, TensorInfo

MAX_STRING_BYTES = 16 << 20  # the longest real one, a chat template, is below 100 kB
MAX_ARRAY_ITEMS = 1 << 23  # of all arrays together; a vocabulary of 262,144 with its merges stays below 2 million
MAX_ARRAY_DEPTH = 4
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), _BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
_LEAST_ITEM_BYTES = {_STRING: 8, _ARRAY: 12} | {kind: scalar.size for kind, scalar in _SCALARS.items()}
_LEAST_KEY_VALUE_BYTES = 8 + 4 + 1
_LEAST_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8


class GGUFFile:
    """One open GGUF file. Views given out by `raw` stay valid after `close`; the mapping goes with the last of them."""

    def __init__(
        self,
        *,
        path: Path,
        version: int,
        metadata: dict[str, Any],
        tensors: dict[str, TensorInfo],
        mapping: mmap.mmap,
        metadata_end: int,
    ) -> None:
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self.metadata_end = metadata_end
        self._mapping = mapping
        self._bytes: np.ndarray | None = np.frombuffer(mapping, np.uint8)

    def raw(self, name: str) -> UInt8[np.ndarray, "..."]:
        """The stored bytes of one tensor, shaped [rows..., bytes_per_row]: a read-only view, nothing is copied."""
        assert self._bytes is not None, f"{self.path} is closed"
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        info = self.tensors[name]
        rows = info.shape[:-1]
        flat = self._bytes[info.offset : info.offset + info.num_bytes]
        return flat.reshape(*rows, info.num_bytes // math.prod(rows))

    def before_tensors(self) -> bytes:
        """The file up to its table of tensors: magic, version, counts and metadata."""
        return self._mapping[: self.metadata_end]

    def release(self, name: str) -> None:
        """Gives back the memory that the tensor's pages took; they are read again where a view still needs them."""
        release_pages(self._mapping, self.tensors[name])

    def ask_for(self, name: str) -> None:
        """Has the system read the tensor's pages soon."""
        ask_for_pages(self._mapping, self.tensors[name])

    def close(self) -> None:
        self._bytes = None
        with contextlib.suppress(BufferError):  # a view is still in use somewhere; the mapping is released with it
            self._mapping.close()

    def __enter__[S](self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_gguf(path: Path) -> GGUFFile:
    """The file, mapped, with everything but the tensors' values read and checked.

    Raises CheckpointError, naming the file and the field, for a damaged file; UnsupportedCheckpoint for a sound one of
    another version, byte order or tensor type.
    """
    path = Path(path)
    mapping = _map(path)
    try:
        cursor = _Cursor(path, mapping)
        version = _read_version(cursor)
        num_tensors = cursor.count("tensor count", _LEAST_TENSOR_INFO_BYTES)
        num_keys = cursor.count("metadata count", _LEAST_KEY_VALUE_BYTES)
        metadata = _read_metadata(cursor, num_keys)
        metadata_end = cursor.position
        alignment = _alignment(path, metadata)
        tensors = _read_tensor_infos(cursor, num_tensors, alignment)
    except BaseException:
        mapping.close()
        raise
    return GGUFFile(
        path=path, version=version, metadata=metadata, tensors=tensors, mapping=mapping, metadata_end=metadata_end
    )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None


class _Cursor:
    """A position in the mapped file that never moves past its end, and the array items still allowed."""

    def __init__(self, path: Path, mapping: mmap.mmap) -> None:
        self.path = path
        self.position = 0
        self.size = len(mapping)
        self._mapping = mapping
        self._items_left = MAX_ARRAY_ITEMS

    def error(self, field: str, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {field}: {reason}")

    def take(self, num_bytes: int, field: str) -> int:
        """The offset of the next `num_bytes` bytes; the position moves behind them."""
        start = self.position
        if num_bytes > self.size - start:
            raise self.error(field, f"needs {num_bytes:,} bytes at offset {start:,}, the file ends at {self.size:,}")
        self.position = start + num_bytes
        return start

    def scalar(self, kind: int, field: str) -> int | float | bool:
        layout = _SCALARS[kind]
        (value,) = layout.unpack_from(self._mapping, self.take(layout.size, field))
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.error(field, f"a bool is stored as {value}, allowed are 0 and 1")
        return bool(value)

    def unsigned(self, kind: int, field: str) -> int:
        return int(self.scalar(kind, field))

    def count(self, field: str, least_item_bytes: int) -> int:
        """A stored number of items that the rest of the file could hold."""
        count = self.unsigned(10, field)
        left = self.size - self.position
        if count * least_item_bytes > left:
            raise self.error(field, f"{count:,} items cannot fit into the {left:,} bytes that follow")
        return count

    def string(self, field: str) -> str:
        num_bytes = self.count(f"{field}, string length", 1)
        if num_bytes > MAX_STRING_BYTES:
            raise self.error(field, f"a string of {num_bytes:,} bytes; {MAX_STRING_BYTES:,} are allowed")
        start = self.take(num_bytes, field)
        try:
            return self._mapping[start : start + num_bytes].decode()
        except UnicodeDecodeError:
            raise self.error(field, "a string is not UTF-8") from None

    def value(self, kind: int, field: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(kind, field)
        if kind == _STRING:
            return self.string(field)
        if kind == _ARRAY:
            return self._array(field, depth + 1)
        raise self.error(field, f"value type {kind} is none of 0 to 12")

    def _array(self, field: str, depth: int) -> list[Any]:
        if depth > MAX_ARRAY_DEPTH:
            raise self.error(field, f"arrays are nested more than {MAX_ARRAY_DEPTH} deep")
        kind = self.unsigned(4, f"{field}, item type")
        if kind not in _LEAST_ITEM_BYTES:
            raise self.error(field, f"array item type {kind} is none of 0 to 12")
        count = self.count(f"{field}, array length", _LEAST_ITEM_BYTES[kind])
        self._items_left -= count
        if self._items_left < 0:
            raise self.error(field, f"the arrays hold more than {MAX_ARRAY_ITEMS:,} items together")
        if kind == _STRING:
            return self._strings(count, field)
        if kind in _SCALARS and kind != _BOOL:
            return self._scalars(kind, count, field)
        return [self.value(kind, field, depth) for _ in range(count)]

    def _strings(self, count: int, field: str) -> list[str]:
        """As many calls of `string`, in one loop: a vocabulary and its merges are hundreds of thousands of strings."""
        strings: list[str] = []
        start = self.position
        for _ in range(count):
            end_of_length = start + 8
            end = end_of_length + int.from_bytes(self._mapping[start:end_of_length], "little")
            if end > self.size or end - end_of_length > MAX_STRING_BYTES:
                break
            try:
                strings.append(self._mapping[end_of_length:end].decode())
            except UnicodeDecodeError:
                break
            start = end
        self.position = start
        while len(strings) < count:  # where the loop broke off, this raises with the reason
            strings.append(self.string(field))
        return strings

    def _scalars(self, kind: int, count: int, field: str) -> list[int] | list[float]:
        layout = f"<{count}{_SCALARS[kind].format[-1]}"
        start = self.take(struct.calcsize(layout), field)
        return list(struct.unpack_from(layout, self._mapping, start))


def _read_version(cursor: _Cursor) -> int:
    magic = cursor.unsigned(4, "magic")
    if magic.to_bytes(4, "little") != b"GGUF":
        found = magic.to_bytes(4, "little")
        raise cursor.error("magic", f"the file starts with {found!r}, not b'GGUF': it is no GGUF file")
    version = cursor.unsigned(4, "version")
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        raise UnsupportedCheckpoint(f"{cursor.path}: a big-endian GGUF file; only little-endian ones are read")
    raise UnsupportedCheckpoint(f"{cursor.path}: GGUF version {version}; versions 2 and 3 are read")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index}")
        if key in metadata:
            raise cursor.error(f"metadata {key!r}", "the key occurs twice")
        kind = cursor.unsigned(4, f"metadata {key!r}, type")
        metadata[key] = cursor.value(kind, f"metadata {key!r}")
    return metadata


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_integer = isinstance(alignment, int) and not isinstance(alignment, bool)
    if is_integer and 0 < alignment <= MAX_ALIGNMENT and alignment & (alignment - 1) == 0:
        return alignment
    raise CheckpointError(
        f"{path}: metadata 'general.alignment': {alignment!r:.40} is no power of two from 1 to {MAX_ALIGNMENT:,}"
    )


def _read_tensor_infos(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    """All tensors with offsets from the file's start; none leaves the file, none overlaps another."""
    relative: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        info = _read_tensor_info(cursor, index, alignment)
        if info.name in relative:
            raise cursor.error(f"tensor {info.name!r}", "the name occurs twice")
        relative[info.name] = info
    data_start = -(-cursor.position // alignment) * alignment
    end_of_last, last = 0, ""
    for info in sorted(relative.values(), key=lambda info: info.offset):
        if info.offset < end_of_last:
            raise cursor.error(f"tensor {info.name!r}", f"its bytes overlap those of tensor {last!r}")
        end_of_last, last = info.offset + info.num_bytes, info.name
        if data_start + end_of_last > cursor.size:
            end = data_start + end_of_last
            raise cursor.error(f"tensor {info.name!r}", f"ends at byte {end:,}, the file at {cursor.size:,}")
    return {
        info.name: TensorInfo(
            name=info.name,
            shape=info.shape,
            format=info.format,
            offset=data_start + info.offset,
            num_bytes=info.num_bytes,
        )
        for info in relative.values()
    }


def _read_tensor_info(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """One tensor; `offset` still counts from the start of the data section."""
    name = cursor.string(f"name of tensor {index}")
    field = f"tensor {name!r}"
    num_dims = cursor.unsigned(4, f"{field}, number of dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(field, f"{num_dims:,} dimensions; 1 to {MAX_DIMS} are allowed")
    shape = tuple(cursor.unsigned(10, f"{field}, dimension") for _ in range(num_dims))[::-1]
    if 0 in shape:
        raise cursor.error(field, f"a dimension of {list(shape)} is 0")
    format_name = _format_name(cursor, cursor.unsigned(4, f"{field}, type"), field)
    offset = cursor.unsigned(10, f"{field}, offset")
    if offset % alignment:
        raise cursor.error(field, f"its offset {offset:,} is no multiple of the alignment {alignment}")
    block = BLOCK_SIZES[format_name]
    if shape[-1] % block.num_elements:
        raise cursor.error(
            field, f"rows of {shape[-1]:,} values are not whole {format_name} blocks of {block.num_elements}"
        )
    num_bytes = math.prod(shape[:-1]) * block.row_bytes(shape[-1])
    return TensorInfo(name=name, shape=shape, format=format_name, offset=offset, num_bytes=num_bytes)


def _format_name(cursor: _Cursor, type_number: int, field: str) -> str:
    if type_number in GGUF_TYPE_NAMES:
        return GGUF_TYPE_NAMES[type_number]
    removed = GGUF_REMOVED_TYPES.get(type_number)
    known = f"{removed}, which GGUF no longer has" if removed else "unknown to this version"
    raise UnsupportedCheckpoint(f"{cursor.path}: {field}: tensor type {type_number} is {known}")
