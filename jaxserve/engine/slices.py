"""What a device needs of a plain matrix, out of the file's tensors, and arrays put together from devices' parts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Shaped

from jaxserve.models.model import Stored

type Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlainSlices:
    """A parameter as views on the file: one matrix, or one for each step of the first axis if `is_stacked`.

    rows: the file's row for each of ours, in the shape of all axes but the last, of one matrix; columns likewise, None
    for all as they are. shape is ours; with is_transposed the file's last two axes are the other way round.
    """

    views: tuple[np.ndarray, ...]
    is_stacked: bool
    rows: np.ndarray
    columns: np.ndarray | None
    shape: tuple[int, ...]
    is_transposed: bool

    def __call__(self, index: Index) -> Shaped[np.ndarray, "..."]:
        """A copy of what the index takes; nothing else is read."""
        if self.is_transposed:
            index = (*index[:-2], index[-1], index[-2])
        if self.is_stacked:
            taken = np.stack([self._of_matrix(view, index[1:]) for view in self.views[index[0]]])
        else:
            taken = self._of_matrix(self.views[0], index)
        return np.ascontiguousarray(taken.swapaxes(-1, -2)) if self.is_transposed else taken

    def _of_matrix(self, view: np.ndarray, index: Index) -> np.ndarray:
        rows = self.rows[index[:-1]]
        if self.columns is not None:
            taken = view[np.ix_(rows.ravel(), self.columns[index[-1]])]
        elif rows.size and _follow_each_other(rows.ravel()):
            first = int(rows.flat[0])
            taken = np.array(view[first : first + rows.size, index[-1]])
        else:
            taken = view[:, index[-1]][rows.ravel()]
        return taken.reshape(*rows.shape, taken.shape[-1])


def plain_slices(tensors: list[np.ndarray], shape: tuple[int, ...], stored: Stored) -> PlainSlices | None:
    """The parameter of `shape` in these tensors; None where its first axis is none of the file's."""
    inner = (*shape[:-2], shape[-1], shape[-2]) if stored.is_transposed else shape
    is_stacked = len(tensors) > 1 or tensors[0].ndim == 3
    views = tuple(tensors) if tensors[0].ndim == 2 else tuple(tensors[0])
    num_rows, num_columns = views[0].shape if views[0].ndim == 2 else (0, 0)
    ours = inner[1:-1] if is_stacked else inner[:-1]
    rows = np.arange(num_rows) if stored.rows is None else stored.rows
    columns = num_columns if stored.columns is None else len(stored.columns)
    if views[0].ndim != 2 or rows.size != int(np.prod(ours)) or columns != inner[-1]:
        return None
    if is_stacked and len(views) != inner[0]:
        return None
    return PlainSlices(
        views=views,
        is_stacked=is_stacked,
        rows=rows.reshape(ours),
        columns=stored.columns,
        shape=shape,
        is_transposed=stored.is_transposed,
    )


def array_from_slices(
    shape: tuple[int, ...], sharding: jax.sharding.Sharding, read: Callable[[Index], np.ndarray]
) -> Shaped[Array, "..."]:
    """The array in this sharding, one device's part after another: the host never holds more of it than one part.

    A part that several devices hold is read once and copied between them.
    """
    placed: dict[Any, jax.Array] = {}
    parts = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        index = tuple(slice(*axis.indices(size)) for axis, size in zip(index or (), shape, strict=True))
        key = tuple((axis.start, axis.stop) for axis in index)
        part = jax.device_put(placed[key] if key in placed else read(index), device)
        placed[key] = jax.block_until_ready(part)
        parts.append(part)
    return jax.make_array_from_single_device_arrays(shape, sharding, parts)


def _follow_each_other(rows: np.ndarray) -> bool:
    return bool(rows[-1] - rows[0] == rows.size - 1 and (np.diff(rows) == 1).all())
