"""Writes a native checkpoint: array by array, into a folder beside the final one that appears only when finished.

The arrays are stored in Orbax's layout (its documentation, "Checkpoint format guide"; Orbax restores what is written
here), and not through Orbax, which wants all arrays of a checkpoint in memory and picks the chunks itself.
"""

import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
from jaxtyping import Shaped

from checkpoints.errors import CheckpointError
from checkpoints.native import (
    ARRAYS_NAME,
    MANIFEST_NAME,
    UNFINISHED_SUFFIX,
    ArrayInfo,
    Manifest,
    array_name,
    is_native,
    manifest_content,
    store_spec,
)

CHUNKS_PER_ARRAY = 8  # as many devices as usually share an array; any other number reads parts of chunks
LEAST_CHUNK_BYTES = 256 << 10
LARGEST_CHUNK_BYTES = 64 << 20
COMMIT_BYTES = 32 << 20
_TREE_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
_DICT_KEY = 2


class NativeWriter:
    """Takes arrays one after another. `path` is the unfinished folder, for the files that lie beside the arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays = path / ARRAYS_NAME
        self._arrays.mkdir()
        self._names: list[str] = []
        self._context = tensorstore.Context({"file_io_sync": False, "cache_pool": {"total_bytes_limit": 0}})
        self._transaction, self._pending_bytes = tensorstore.Transaction(), 0

    def write(
        self, parameter: str, part: str, array: Shaped[np.ndarray, "..."], parts: Sequence[int] | None = None
    ) -> ArrayInfo:
        """Stores one array; in files once COMMIT_BYTES have come together. parts: see `chunk_shape`."""
        info = ArrayInfo(dtype=array.dtype.name, shape=array.shape)
        name = array_name(parameter, part)
        spec = {
            "driver": "zarr",
            "kvstore": store_spec(self._arrays, name) | _STORE_OPTIONS,
            "dtype": info.dtype,
            "store_data_equal_to_fill_value": True,  # so that what is missing is found missing
            "metadata": {"shape": list(info.shape), "chunks": chunk_shape(info, parts), "compressor": None},
        }
        store = tensorstore.open(spec, create=True, context=self._context, transaction=self._transaction).result()
        store.write(array).result()
        self._names.append(name)
        self._pending_bytes += info.num_bytes
        if self._pending_bytes >= COMMIT_BYTES:
            self._commit()
        return info

    def finish(self, manifest: Manifest) -> None:
        """All on disk, the manifest last."""
        self._commit()
        (self._arrays / "_METADATA").write_text(json.dumps(_orbax_tree(self._names)))
        _write_orbax_marker(self._arrays, _TREE_HANDLER)
        _sync_below(self.path)
        with (self.path / MANIFEST_NAME).open("w") as file:
            json.dump(manifest_content(manifest), file)
            file.flush()
            os.fsync(file.fileno())
        _sync(self.path)

    def _commit(self) -> None:
        self._transaction.commit_sync()
        self._transaction, self._pending_bytes = tensorstore.Transaction(), 0


_STORE_OPTIONS: dict[str, Any] = {
    "cache_pool": "cache_pool",
    "assume_config": True,  # nobody else writes there
    "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
}


def chunk_shape(info: ArrayInfo, parts: Sequence[int] | None = None) -> list[int]:
    """Chunks of whole rows, of several matrices one by one: plans cut outputs and experts, each device a run of rows.

    A row is everything along the last axis. parts: into how many parts devices cut each axis; chunks are then those of
    one device's part, rows of a part too.
    """
    if parts is not None:
        sizes = (size if size % part else size // part for size, part in zip(info.shape, parts, strict=True))
        return chunk_shape(ArrayInfo(dtype=info.dtype, shape=tuple(sizes)))
    shape = list(info.shape)
    if len(shape) < 2:
        return shape
    wanted = min(max(info.num_bytes // CHUNKS_PER_ARRAY, LEAST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)
    for axis in range(len(shape) - 1):
        bytes_below = info.num_bytes // math.prod(info.shape[: axis + 1])  # of one step along the axis
        shape[axis] = max(1, min(info.shape[axis], wanted // max(bytes_below, 1)))
        shape[axis] = _even(info.shape[axis], shape[axis])
        if shape[axis] > 1:
            break
    return shape


def _even(size: int, at_most: int) -> int:
    """The largest divisor of size up to at_most, if it is not less than half of it: chunks then meet device edges."""
    divisor = next(step for step in range(at_most, 0, -1) if size % step == 0)
    return divisor if 2 * divisor > at_most else at_most


@contextmanager
def writing_native(target: Path, *, overwrite: bool) -> Iterator[NativeWriter]:
    """A writer whose folder becomes `target` at the end of the block, or goes if it raises.

    Raises CheckpointError where something is in the way. What a killed run left is removed by the next to the same
    target; two at once exclude each other.
    """
    target = Path(os.path.abspath(target))
    check_target(target, overwrite=overwrite)
    unfinished = target.with_name(target.name + UNFINISHED_SUFFIX)
    unfinished.mkdir(exist_ok=True)
    lock = os.open(unfinished, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{target}: another conversion to it is running") from None
        try:
            _empty(unfinished)
            yield NativeWriter(unfinished)
            _put_in_place(unfinished, target)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def check_target(target: Path, *, overwrite: bool) -> None:
    """Raises CheckpointError where a native checkpoint cannot be put: no folder for it, or something there."""
    target = target.absolute()
    if target.name.endswith(UNFINISHED_SUFFIX):
        raise CheckpointError(f"{target}: names that end in {UNFINISHED_SUFFIX} are for unfinished conversions")
    if not target.parent.is_dir():
        raise CheckpointError(f"{target}: there is no folder {target.parent}")
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise CheckpointError(f"{target}: exists already; choose another name, or --overwrite to replace it")
    if target.is_symlink() or not is_native(target):
        raise CheckpointError(f"{target}: is no native checkpoint, so --overwrite does not replace it; remove it first")


def _put_in_place(unfinished: Path, target: Path) -> None:
    """Renames; an older checkpoint is set aside first, as a folder that does not load."""
    old = target.with_name(f"{target.name}.old{UNFINISHED_SUFFIX}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    unfinished.rename(target)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _sync_below(folder: Path) -> None:
    """Everything in the folder is on the disk: a checkpoint must not look complete after a power cut that it is not."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _orbax_tree(names: list[str]) -> dict[str, Any]:
    """Orbax's _METADATA: nested dicts whose keys are the parts of our names between dots."""
    return {
        "tree_metadata": {
            str(tuple(name.split("."))): {
                "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in name.split(".")],
                "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
            }
            for name in names
        },
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _write_orbax_marker(folder: Path, handlers: str) -> None:
    """Orbax's _CHECKPOINT_METADATA, with which it calls a checkpoint finished."""
    now = time.time_ns()
    content = {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(content))
