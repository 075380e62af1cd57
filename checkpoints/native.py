"""jaxserve's own checkpoint, opened and checked: a folder that Orbax and any plan of devices can read.

    jaxserve.json       written last: which arrays there are, of which parameters, in which formats
    params/             an Orbax checkpoint of these arrays (tensorstore: Zarr arrays in an OCDBT store)
    config.json         of a model that was safetensors; of a GGUF file origin.gguf instead
    origin.gguf         the file's metadata, and its tensors that are no parameters (`gguf_header`)
    tokenizer files     as they were

Nothing in jaxserve.json names a file. The folder is taken for hostile: sizes are compared with the bytes on disk and
with what each array says of itself before anything of that size is read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.json_files import read_json_object

MANIFEST_NAME = "jaxserve.json"
ARRAYS_NAME = "params"
ORIGIN_NAME = "origin.gguf"
UNFINISHED_SUFFIX = ".unfinished"
VERSION = 1
MAX_MANIFEST_BYTES = 64 << 20
MAX_DIMS = 8
NODE_CACHE_BYTES = 16 << 20

DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in (
        ("float32", "<f4"), ("float16", "<f2"), ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn), ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("uint8", "u1"), ("int8", "i1"), ("uint16", "<u2"), ("int16", "<i2"), ("uint32", "<u4"), ("int32", "<i4"),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """One stored array."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True)
class NativeParameter:
    """One parameter: its format, and its arrays by the part of it they are; a plain one has a single part, ""."""

    format: str
    shape: tuple[int, ...]
    arrays: Mapping[str, ArrayInfo]

    @property
    def num_bytes(self) -> int:
        return sum(array.num_bytes for array in self.arrays.values())


@dataclass(frozen=True, kw_only=True)
class OriginTensor:
    """A tensor of the file this came from: a model's config may follow from which there were, and how large."""

    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What jaxserve.json says."""

    parameters: Mapping[str, NativeParameter]
    origin_tensors: Mapping[str, OriginTensor]


class NativeArrays:
    """The arrays of a finished native checkpoint, read whole or by the slice. Opened with `open_native`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.parameters = manifest.parameters
        self.origin_tensors = manifest.origin_tensors
        import tensorstore  # slow to import, and needed for this container only

        self._tensorstore = tensorstore
        self._context = tensorstore.Context(
            {"cache_pool": {"total_bytes_limit": 0}, "cache_pool#nodes": {"total_bytes_limit": NODE_CACHE_BYTES}}
        )

    def read(self, parameter: str, part: str, index: tuple[slice, ...] | None = None) -> Shaped[np.ndarray, "..."]:
        """One array of a parameter, or what `index` takes of it; only the chunks that hold it are read."""
        store = self._open(parameter, part)
        try:
            return np.asarray((store if index is None else store[index]).read().result())
        except (ValueError, OSError) as error:
            raise self._error(parameter, part, error) from None

    def _open(self, parameter: str, part: str) -> Any:
        info = self.parameters[parameter].arrays[part]
        spec = {
            "driver": "zarr",
            "kvstore": store_spec(self.path / ARRAYS_NAME, array_name(parameter, part)),
            "dtype": info.dtype,
            "metadata": {"shape": list(info.shape), "compressor": None, "filters": None, "order": "C"},
            "fill_missing_data_reads": False,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }
        try:
            store = self._tensorstore.open(spec, open=True, read=True, context=self._context).result()
        except (ValueError, OSError) as error:
            raise self._error(parameter, part, error) from None
        chunk = tuple(size or 0 for size in store.chunk_layout.read_chunk.shape or ())
        if len(chunk) != len(info.shape) or any(c > s for c, s in zip(chunk, info.shape, strict=True)):
            reason = f"chunks of {list(chunk)} for a shape of {list(info.shape)}"
            raise self._error(parameter, part, ValueError(reason))
        return store

    def _error(self, parameter: str, part: str, error: Exception) -> CheckpointError:
        reason = " ".join(str(error).split())[:240]
        return CheckpointError(
            f"{self.path}: array {array_name(parameter, part)!r} is damaged or not what {MANIFEST_NAME} says: {reason}"
        )


def array_name(parameter: str, part: str) -> str:
    """The array's name in the store."""
    return f"{parameter}.{part}" if part else parameter


def store_spec(folder: Path, name: str) -> dict[str, Any]:
    """Where tensorstore finds an array, for reading."""
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{folder.resolve()}/"},
        "cache_pool": "cache_pool#nodes",
        "path": f"{name}/",
    }


def is_native(path: Path) -> bool:
    """Whether it is a native checkpoint, or what an interrupted conversion left of one."""
    return path.is_dir() and (
        (path / MANIFEST_NAME).is_file()
        or path.name.endswith(UNFINISHED_SUFFIX)
        or (path / ARRAYS_NAME / "manifest.ocdbt").is_file()
    )


def origin_file(path: Path) -> Path:
    """origin.gguf of a native checkpoint that was a GGUF file; for anything else the path itself."""
    origin = path / ORIGIN_NAME
    return origin if is_native(path) and origin.is_file() else path


def open_native(path: Path) -> NativeArrays:
    """A finished native checkpoint. Raises CheckpointError for one that is unfinished, damaged or too large for its
    files, UnsupportedCheckpoint for one of a later version."""
    if path.name.endswith(UNFINISHED_SUFFIX) or not (path / MANIFEST_NAME).is_file():
        raise CheckpointError(f"{path}: an unfinished conversion; run `jaxserve convert` again")
    where = path / MANIFEST_NAME
    content = read_json_object(where, max_bytes=MAX_MANIFEST_BYTES)
    version = content.get("version")
    if content.get("container") != "jaxserve" or not isinstance(version, int):
        raise CheckpointError(f"{where}: is none of jaxserve's: container and version are missing")
    if version != VERSION:
        raise UnsupportedCheckpoint(f"{where}: version {version}; this version of jaxserve reads version {VERSION}")
    manifest = Manifest(
        parameters={name: _parameter(where, name, entry) for name, entry in _table(where, content, "parameters")},
        origin_tensors={name: _origin(where, name, entry) for name, entry in _table(where, content, "origin_tensors")},
    )
    _check_size(path, manifest)
    return NativeArrays(path, manifest)


def manifest_content(manifest: Manifest) -> dict[str, Any]:
    """What jaxserve.json holds, as `open_native` reads it."""
    return {
        "container": "jaxserve",
        "version": VERSION,
        "parameters": {
            name: {
                "format": parameter.format,
                "shape": list(parameter.shape),
                "arrays": {
                    part: {"dtype": info.dtype, "shape": list(info.shape)} for part, info in parameter.arrays.items()
                },
            }
            for name, parameter in manifest.parameters.items()
        },
        "origin_tensors": {
            name: {"format": tensor.format, "shape": list(tensor.shape)}
            for name, tensor in manifest.origin_tensors.items()
        },
    }


def _check_size(path: Path, manifest: Manifest) -> None:
    """Arrays are stored as they are, so the files cannot be smaller."""
    declared = sum(parameter.num_bytes for parameter in manifest.parameters.values())
    found = sum(file.stat().st_size for file in (path / ARRAYS_NAME).rglob("*") if file.is_file())
    if declared > found:
        raise CheckpointError(
            f"{path}: {MANIFEST_NAME} declares {declared:,} bytes of arrays, the files of {ARRAYS_NAME} have {found:,}"
        )


def _table(where: Path, content: Mapping[str, Any], field: str) -> list[tuple[str, dict[str, Any]]]:
    table = content.get(field)
    if not isinstance(table, dict) or not all(isinstance(entry, dict) for entry in table.values()):
        raise CheckpointError(f"{where}: {field}: expected a table of tables")
    return list(table.items())


def _parameter(where: Path, name: str, entry: dict[str, Any]) -> NativeParameter:
    arrays = {
        part: ArrayInfo(dtype=_dtype(where, name, array), shape=_shape(where, name, array))
        for part, array in _table(where, entry, "arrays")
    }
    return NativeParameter(format=_format(where, name, entry), shape=_shape(where, name, entry), arrays=arrays)


def _origin(where: Path, name: str, entry: dict[str, Any]) -> OriginTensor:
    return OriginTensor(format=_format(where, name, entry), shape=_shape(where, name, entry))


def _format(where: Path, name: str, entry: dict[str, Any]) -> str:
    value = entry.get("format")
    if isinstance(value, str):
        return value
    raise CheckpointError(f"{where}: {name!r:.80}: format {value!r:.80} is no name")


def _dtype(where: Path, name: str, entry: dict[str, Any]) -> str:
    value = entry.get("dtype")
    if isinstance(value, str) and value in DTYPES:
        return value
    raise CheckpointError(f"{where}: {name!r:.80}: dtype {value!r:.80} is none of {', '.join(DTYPES)}")


def _shape(where: Path, name: str, entry: dict[str, Any]) -> tuple[int, ...]:
    value = entry.get("shape")
    if (
        isinstance(value, list)
        and len(value) <= MAX_DIMS
        and all(type(size) is int and 0 < size < 1 << 48 for size in value)
    ):
        return tuple(value)
    raise CheckpointError(f"{where}: {name!r:.80}: shape {value!r:.80} is no list of up to {MAX_DIMS} sizes")
