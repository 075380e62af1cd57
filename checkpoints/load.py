"""Weights by name from a GGUF file or from safetensors, through one interface; a native checkpoint is opened here too.

`open_weights` picks the container; a model family reads its tensors from the result without knowing which it is.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.gguf import GGUFFile, open_gguf
from checkpoints.native import ORIGIN_NAME, NativeArrays, is_native, open_native
from checkpoints.safetensors import SafetensorsFiles, open_safetensors
from checkpoints.tensors import HostTensor, TensorInfo

_GGUF_PLAIN_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in (
        ("F64", "<f8"), ("F32", "<f4"), ("F16", "<f2"), ("BF16", ml_dtypes.bfloat16),
        ("I64", "<i8"), ("I32", "<i4"), ("I16", "<i2"), ("I8", "i1"),
    )
}  # fmt: skip


@runtime_checkable
class WeightSource(Protocol):
    """Tensors by name. `read` gives them as they lie in the file; the arrays are read-only views where possible."""

    @property
    def path(self) -> Path: ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """A GGUF's metadata; empty for safetensors, whose configuration lies beside them."""
        ...

    def names(self) -> set[str]: ...

    def info(self, name: str) -> TensorInfo: ...

    def read(self, name: str) -> HostTensor: ...

    def ask_for(self, name: str) -> None:
        """Has the tensor read ahead of its use, where that is possible."""
        ...

    def release(self, name: str) -> None:
        """Gives back the memory its pages took. Views stay valid."""
        ...

    def close(self) -> None: ...

    def __enter__[S](self: S) -> S: ...

    def __exit__(self, *_: object) -> None: ...


class _Source:
    """What both containers share: an open file with a table of tensors."""

    def __init__(self, file: GGUFFile | SafetensorsFiles) -> None:
        self.path = file.path
        self._tensors = file.tensors
        self._close = file.close
        self.ask_for, self.release = file.ask_for, file.release

    def names(self) -> set[str]:
        return set(self._tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        return self._tensors[name]

    def close(self) -> None:
        self._close()

    def __enter__[S](self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GGUFWeights(_Source):
    """A GGUF file as a WeightSource: block formats as uint8 rows, plain formats in their own dtype."""

    def __init__(self, file: GGUFFile) -> None:
        super().__init__(file)
        self.metadata: Mapping[str, Any] = file.metadata
        self._file = file

    def read(self, name: str) -> HostTensor:
        info = self.info(name)
        data = self._file.raw(name)
        if info.format in _GGUF_PLAIN_DTYPES:
            data = np.require(data.view(_GGUF_PLAIN_DTYPES[info.format]), requirements="A")
        return HostTensor(name=name, data=data, format=info.format, shape=info.shape)


class SafetensorsWeights(_Source):
    """Safetensors as a WeightSource: every tensor in its own dtype."""

    def __init__(self, files: SafetensorsFiles) -> None:
        super().__init__(files)
        self.metadata: Mapping[str, Any] = {}
        self._files = files

    def read(self, name: str) -> HostTensor:
        info = self.info(name)
        return HostTensor(name=name, data=self._files.read(name), format=info.format, shape=info.shape)


class NativeWeights:
    """A native checkpoint as a WeightSource: metadata and table of the file it came from, of whose tensors only those
    that are no parameters can be read by name. The parameters are in `arrays`, under our paths."""

    def __init__(self, arrays: NativeArrays, origin: GGUFWeights | None) -> None:
        self.path = arrays.path
        self.arrays = arrays
        self.metadata: Mapping[str, Any] = origin.metadata if origin else {}
        self._origin = origin

    def names(self) -> set[str]:
        return set(self.arrays.origin_tensors) | (self._origin.names() if self._origin else set())

    def info(self, name: str) -> TensorInfo:
        if self._origin and name in self._origin.names():
            return self._origin.info(name)
        if name not in self.arrays.origin_tensors:
            raise CheckpointError(f"{self.path}: has no tensor {name!r}")
        tensor = self.arrays.origin_tensors[name]
        return TensorInfo(name=name, shape=tensor.shape, format=tensor.format, offset=0, num_bytes=0)

    def read(self, name: str) -> HostTensor:
        if self._origin and name in self._origin.names():
            return self._origin.read(name)
        raise CheckpointError(f"{self.path}: keeps no tensor {name!r} of the file it came from")

    def ask_for(self, name: str) -> None:
        pass

    def release(self, name: str) -> None:
        pass

    def close(self) -> None:
        if self._origin:
            self._origin.close()

    def __enter__[S](self: S) -> S:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_weights(path: Path) -> GGUFWeights | SafetensorsWeights | NativeWeights:
    """The weights at `path`: a .gguf file, a .safetensors file, a folder of safetensors, or a native checkpoint.

    Raises CheckpointError; UnsupportedCheckpoint for one part of a split GGUF.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist")
    if is_native(path):
        arrays, origin = open_native(path), path / ORIGIN_NAME
        return NativeWeights(arrays, _open_gguf_weights(origin) if origin.is_file() else None)
    return _open_gguf_weights(path) if is_gguf(path) else SafetensorsWeights(open_safetensors(path))


def _open_gguf_weights(path: Path) -> GGUFWeights:
    file = open_gguf(path)
    num_splits = file.metadata.get("split.count", 1)
    if num_splits not in (0, 1):
        file.close()
        raise UnsupportedCheckpoint(
            f"{path}: one of {num_splits} parts of a split GGUF; merge them into one file first"
        )
    return GGUFWeights(file)


def is_gguf(path: Path) -> bool:
    """Whether the file is a GGUF, by name or by its first bytes (a file of the hub's cache may have no suffix)."""
    if path.is_dir():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
