"""One parameter of a model from the tensors that hold it in a file: found, accounted for, read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from checkpoints.names import check_accounting
from jaxserve.engine.slices import array_from_slices, check_cuts_no_row, plain_slices
from jaxserve.models.model import FileLayout, Stored
from jaxserve.quant.dense import FORMAT_OF_DTYPE, Dense
from jaxserve.quant.formats import weight_from_tensor
from jaxserve.quant.quantized import Weight, stacked, take_rows, with_leading_axes
from sharding.spec import ArraySpec

DTYPE_OF_FORMAT = {name: dtype for dtype, name in FORMAT_OF_DTYPE.items()}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where one parameter lies: its tensors (several are stacked), the shape of each, and what is ours of them."""

    spec: ArraySpec
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored: Stored


class ParameterFile:
    """The parameters of a model in an open file, by our paths.

    Raises CheckpointError, once for all tensors that are missing, left over or misshapen.
    """

    def __init__(self, source: WeightSource, layout: FileLayout, config: Any, wanted: Mapping[str, ArraySpec]) -> None:
        self._source = source
        self._places = {parameter: _place(parameter, spec, layout, config) for parameter, spec in wanted.items()}
        found = {name: source.info(name) for name in source.names()}
        expected = {name: place.shape for place in self._places.values() for name in place.names}
        tied = () if "unembed" in wanted else (layout.names.tensor_name("unembed"),)
        check_accounting(expected, found, tied=tied, declared_absent=layout.ignored, source=source.path)
        self.tensor_names = frozenset(expected)
        self.bytes_by_format: dict[str, int] = {}
        for name in expected:
            info = found[name]
            self.bytes_by_format[info.format] = self.bytes_by_format.get(info.format, 0) + info.num_bytes

    def vector(self, parameter: str) -> np.ndarray:
        """A parameter that is a vector, or one for each expert, in float32 on the host."""
        place = self._places[parameter]
        parts = [np.asarray(self._dense(name).array, np.float32) for name in place.names]
        values = parts[0] if len(parts) == 1 else np.stack(parts)
        if place.stored.rows is not None:
            values = values[..., place.stored.rows]
        return values.reshape(place.spec.shape) + np.float32(place.stored.added)

    def matrix(self, parameter: str) -> Weight:
        """A parameter that is a matrix, or several, on the host: packed as in the file where that is possible."""
        place, stored = self._places[parameter], self._places[parameter].stored
        parts = [weight_from_tensor(self._source.read(name)) for name in place.names]
        weight = parts[0] if len(parts) == 1 and place.shape == parts[0].shape else stacked(parts)
        if stored.rows is not None:
            weight = take_rows(weight, stored.rows)
        shape = place.spec.shape
        if stored.columns is not None or stored.is_transposed:
            array = _array(weight)
            array = array if stored.columns is None else array[..., stored.columns]
            inner = (*shape[:-2], shape[-1], shape[-2]) if stored.is_transposed else shape
            array = array.reshape(inner)
            return Dense(array=array.swapaxes(-1, -2) if stored.is_transposed else array)
        return weight if weight.shape == shape else with_leading_axes(weight, shape)

    def placed(self, parameter: str, sharding: jax.sharding.Sharding, dtype: str | None) -> Weight:
        """A parameter that is a matrix, or several, on devices; a plain one in `dtype`, if that is given.

        Of a plain one each device reads its part only; a packed one is on the host as a whole on its way.
        """
        place = self._places[parameter]
        if self.format_of(parameter) in DTYPE_OF_FORMAT:
            tensors = [self._source.read(name).data for name in place.names]
            slices = plain_slices(tensors, place.spec.shape, place.stored)
            if slices is not None:
                kind = dtype or DTYPE_OF_FORMAT[self.format_of(parameter)]
                array = array_from_slices(
                    place.spec.shape, sharding, lambda index: slices(index).astype(kind, copy=False)
                )
                return Dense(array=array)
        weight = self.matrix(parameter)
        for leaf in jax.tree.leaves(weight):
            if not isinstance(weight, Dense):
                check_cuts_no_row(parameter, leaf.shape, sharding)
        return jax.device_put(weight, sharding)

    def ask_for(self, parameter: str) -> None:
        """Has a parameter read ahead of its use."""
        for name in self._places[parameter].names:
            self._source.ask_for(name)

    def release(self, parameter: str) -> None:
        """Gives back the memory that reading a parameter took, of what is not in use."""
        for name in self._places[parameter].names:
            self._source.release(name)

    def format_of(self, parameter: str) -> str:
        """The format the file keeps a parameter in."""
        return self._source.info(self._places[parameter].names[0]).format

    def _dense(self, name: str) -> Dense:
        weight = weight_from_tensor(self._source.read(name))
        if isinstance(weight, Dense):
            return weight
        raise CheckpointError(f"tensor {name!r} is a vector in a block format ({weight.format})")


def _place(parameter: str, spec: ArraySpec, layout: FileLayout, config: Any) -> _Place:
    stored = layout.stored(parameter, config)
    names = tuple(layout.names.tensor_names(parameter, spec.shape[0]))
    shape = stored.shape
    if shape is None:
        shape = spec.shape if names == (layout.names.tensor_name(parameter),) else spec.shape[1:]
        shape = (*shape[:-2], shape[-1], shape[-2]) if stored.is_transposed else shape
    return _Place(spec=spec, names=names, shape=shape, stored=stored)


def _array(weight: Weight) -> np.ndarray:
    """The matrix written out; in its own type if it is a plain one."""
    return np.asarray(weight.array if isinstance(weight, Dense) else jax.device_get(weight.decode()))
