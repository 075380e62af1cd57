"""Safetensors weights, opened and checked: one file, or the shards that an index names.

The headers are read here and not by the `safetensors` library because tensors are handed out as views on the mapped
file, bfloat16 included, which its numpy interface does not offer. Headers are hostile like any file: sizes, shapes and
offsets are compared with the file before use, and an index can only name files beside itself.
Format: the safetensors README (8 bytes of header length, a JSON header, the data).
"""

import contextlib
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.json_files import parse_json_object, read_json_object
from checkpoints.pages import ask_for_pages, release_pages
from checkpoints.tensors import TensorInfo

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
MAX_HEADER_BYTES = 32 << 20
MAX_INDEX_BYTES = 64 << 20
MAX_DIMS = 8

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in (
        ("F64", "<f8"), ("F32", "<f4"), ("F16", "<f2"), ("BF16", ml_dtypes.bfloat16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2), ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
        ("I64", "<i8"), ("I32", "<i4"), ("I16", "<i2"), ("I8", "i1"),
        ("U64", "<u8"), ("U32", "<u4"), ("U16", "<u2"), ("U8", "u1"), ("BOOL", "?"),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Shard:
    """One mapped file and where its tensors lie."""

    path: Path
    mapping: mmap.mmap
    tensors: dict[str, TensorInfo]


class SafetensorsFiles:
    """The tensors of one safetensors file or of all shards of an index. `TensorInfo.offset` counts in its own shard."""

    def __init__(self, *, path: Path, shards: list[_Shard]) -> None:
        self.path = path
        self.tensors = {name: info for shard in shards for name, info in shard.tensors.items()}
        self.paths = [shard.path for shard in shards]
        self._mappings = [shard.mapping for shard in shards]
        self._mapping_of = {name: shard.mapping for shard in shards for name in shard.tensors}

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """One tensor in its stored dtype: a read-only view on the file (a copy where its offset is not aligned)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        info = self.tensors[name]
        mapping = self._mapping_of[name]
        flat = np.frombuffer(mapping, DTYPES[info.format], count=info.num_elements, offset=info.offset)
        return np.require(flat, requirements="A").reshape(info.shape)

    def release(self, name: str) -> None:
        """Gives back the memory that the tensor's pages took; they are read again where a view still needs them."""
        release_pages(self._mapping_of[name], self.tensors[name])

    def ask_for(self, name: str) -> None:
        """Has the system read the tensor's pages soon."""
        ask_for_pages(self._mapping_of[name], self.tensors[name])

    def close(self) -> None:
        for mapping in self._mappings:
            with contextlib.suppress(BufferError):  # a view is still in use somewhere; the mapping is released with it
                mapping.close()

    def __enter__[S](self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_safetensors(folder_or_file: Path) -> SafetensorsFiles:
    """The weights in a file, or in a folder with `model.safetensors`, an index of shards, or one safetensors file.

    Raises CheckpointError, naming the file and the field.
    """
    path = Path(folder_or_file)
    file = _weights_file(path) if path.is_dir() else path
    if file.suffix in PICKLE_SUFFIXES:
        raise _pickle_offered(file)
    if file.name.endswith(".index.json"):
        return SafetensorsFiles(path=path, shards=_open_index(file))
    return SafetensorsFiles(path=path, shards=[_open_shard(file)])


def _weights_file(folder: Path) -> Path:
    for name in (SINGLE_NAME, INDEX_NAME):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return files[0]
    pickled = next((file for file in sorted(folder.iterdir()) if file.suffix in PICKLE_SUFFIXES), None)
    if not files and pickled is not None:
        raise _pickle_offered(pickled)
    found = f"{len(files)} safetensors files without {INDEX_NAME}" if files else "no safetensors file"
    raise CheckpointError(f"{folder}: {found}; expected {SINGLE_NAME}, {INDEX_NAME} or one *.safetensors")


def _pickle_offered(file: Path) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        f"{file}: a pickle, which may run any code when it is read; take the model's safetensors or a GGUF file"
    )


def _open_index(index: Path) -> list[_Shard]:
    weight_map = _read_weight_map(index)
    shards: list[_Shard] = []
    try:
        for file_name in sorted(set(weight_map.values())):
            shards.append(_open_shard(index.parent / file_name))
        _check_index(index, weight_map, shards)
    except BaseException:
        for shard in shards:
            shard.mapping.close()
        raise
    return shards


def _read_weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> shard file name; every shard is a plain name, so it lies in the index's own folder."""
    content = read_json_object(index, max_bytes=MAX_INDEX_BYTES)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: expected a table of tensor name -> file name")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name):
            raise CheckpointError(
                f"{index}: weight_map: tensor {name!r} names the file {file_name!r:.200}; "
                "only a safetensors file in the index's own folder is allowed"
            )
    return weight_map


def _is_plain_name(file_name: str) -> bool:
    return file_name.endswith(".safetensors") and not any(sign in file_name for sign in "/\\\0:")


def _check_index(index: Path, weight_map: dict[str, str], shards: list[_Shard]) -> None:
    declared = set(weight_map.items())
    found = {(name, shard.path.name) for shard in shards for name in shard.tensors}
    missing, extra = sorted(declared - found), sorted(found - declared)
    if missing:
        name, file_name = missing[0]
        raise CheckpointError(f"{index}: {len(missing)} tensors are not where it says: first {name!r} in {file_name}")
    if extra:
        name, file_name = extra[0]
        raise CheckpointError(f"{index}: {len(extra)} tensors are not listed: first {name!r} in {file_name}")


def _open_shard(path: Path) -> _Shard:
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return _Shard(path=path, mapping=mapping, tensors=_read_header(path, mapping))
    except BaseException:
        mapping.close()
        raise


def _read_header(path: Path, mapping: mmap.mmap) -> dict[str, TensorInfo]:
    if len(mapping) < 8:
        raise CheckpointError(f"{path}: header length: the file has {len(mapping)} bytes, it needs at least 8")
    num_bytes = int.from_bytes(mapping[:8], "little")
    largest = min(MAX_HEADER_BYTES, len(mapping) - 8)
    if num_bytes > largest:
        raise CheckpointError(f"{path}: header length: {num_bytes:,} bytes, at most {largest:,} are possible here")
    header = parse_json_object(mapping[8 : 8 + num_bytes], where=f"{path}: header")
    header.pop("__metadata__", None)
    data_start = 8 + num_bytes
    tensors = {name: _tensor_info(path, name, entry, data_start, len(mapping)) for name, entry in header.items()}
    _check_overlaps(path, tensors)
    return tensors


def _check_overlaps(path: Path, tensors: dict[str, TensorInfo]) -> None:
    end_of_last, last = 0, ""
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes)):
        if info.offset < end_of_last:
            raise CheckpointError(f"{path}: tensor {info.name!r}: its bytes overlap those of tensor {last!r}")
        end_of_last, last = info.offset + info.num_bytes, info.name


def _tensor_info(path: Path, name: str, entry: Any, data_start: int, file_size: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{where}: expected a table with dtype, shape and data_offsets")
    format_name, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(format_name, str):
        raise CheckpointError(f"{where}: dtype: {format_name!r:.80} is no name")
    if format_name not in DTYPES:
        raise UnsupportedCheckpoint(f"{where}: dtype {format_name!r:.80} is unknown to this version")
    if not _is_list_of_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where}: shape: {shape!r:.80} is no list of up to {MAX_DIMS} sizes")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: data_offsets: {offsets!r:.80} is no pair of offsets")
    start, end = offsets
    if not start <= end <= file_size - data_start:
        raise CheckpointError(
            f"{where}: data_offsets: [{start}, {end}] leaves the file's {file_size - data_start:,} bytes"
        )
    num_bytes = math.prod(shape) * DTYPES[format_name].itemsize
    if end - start != num_bytes:
        raise CheckpointError(
            f"{where}: {format_name} {shape} needs {num_bytes:,} bytes, the header gives {end - start:,}"
        )
    return TensorInfo(name=name, shape=tuple(shape), format=format_name, offset=data_start + start, num_bytes=num_bytes)


def _is_list_of_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)
