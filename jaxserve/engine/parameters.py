"""One parameter of a model from the tensors that hold it in a file: found, accounted for, read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from checkpoints.names import check_accounting
from jaxserve.engine.placement import Units, read_in_units, shape_in_units
from jaxserve.engine.slices import array_from_slices, plain_slices
from jaxserve.models.model import FileLayout, Stored
from jaxserve.quant.dense import FORMAT_OF_DTYPE, Dense
from jaxserve.quant.formats import weight_from_tensor
from jaxserve.quant.quantized import Weight, stacked, take_rows, with_leading_axes
from jaxserve.quant.schemes.scheme import Scheme, check_unread
from sharding.spec import ArraySpec

DTYPE_OF_FORMAT = {name: dtype for dtype, name in FORMAT_OF_DTYPE.items()}


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where one parameter lies: its tensors (several are stacked), the shape of each, and what is ours of them.

    scheme: whose packed matrices the names stand for; the shape is then that of what they unpack to.
    """

    spec: ArraySpec
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored: Stored
    scheme: Scheme | None = None

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The file's tensors with their shapes."""
        if self.scheme is None:
            return dict.fromkeys(self.names, self.shape)
        parts = [self.scheme.tensors(name, self.shape) or {} for name in self.names]
        return {name: shape for part in parts for name, shape in part.items()}

    def optional(self) -> set[str]:
        """Tensors that may lie beside them."""
        return {o for name in self.names for o in self.scheme.optional(name, self.shape)} if self.scheme else set()


class ParameterFile:
    """The parameters of a model in an open file, by our paths.

    scheme: that of a quantized checkpoint. Raises CheckpointError, once for all tensors that are missing, left over or
    misshapen.
    """

    def __init__(
        self,
        source: WeightSource,
        layout: FileLayout,
        config: Any,
        wanted: Mapping[str, ArraySpec],
        scheme: Scheme | None = None,
    ) -> None:
        self._source = source
        self._places = {p: _place(p, spec, layout, config, scheme) for p, spec in wanted.items()}
        packed = [place for place in self._places.values() if place.scheme is not None]
        in_scheme = {name for place in packed for name in place.tensors()}
        expected = {name: shape for place in self._places.values() for name, shape in place.tensors().items()}
        beside = {name for place in packed for name in place.optional()} & source.names() - expected.keys()
        check_unread(source, beside)
        found = {name: source.info(name) for name in source.names() - beside}
        tied = () if "unembed" in wanted else (layout.names.tensor_name("unembed"),)
        check_accounting(expected, found, tied=tied, declared_absent=layout.ignored, source=source.path)
        self.tensor_names = frozenset(expected)
        self.bytes_by_format: dict[str, int] = {}
        for name in expected:
            kind = scheme.name if scheme is not None and name in in_scheme else found[name].format
            self.bytes_by_format[kind] = self.bytes_by_format.get(kind, 0) + found[name].num_bytes

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
        parts = [self._packed_or_plain(place, name) for name in place.names]
        weight = parts[0] if len(parts) == 1 and place.shape == parts[0].shape else stacked(parts)
        if stored.rows is not None:
            weight = take_rows(weight, stored.rows)
        shape = place.spec.shape
        if place.scheme is not None and not stored.is_packed_so:
            weight = weight if stored.columns is None else take_rows(weight, stored.columns)
            return with_leading_axes(weight, shape)
        if stored.columns is not None or stored.is_transposed:
            array = _array(weight)
            array = array if stored.columns is None else array[..., stored.columns]
            inner = (*shape[:-2], shape[-1], shape[-2]) if stored.is_transposed else shape
            array = array.reshape(inner)
            return Dense(array=array.swapaxes(-1, -2) if stored.is_transposed else array)
        return with_leading_axes(weight, shape)

    def placed(self, parameter: str, sharding: NamedSharding, units: Units, dtype: str | None) -> Weight | None:
        """A plain matrix, or several, on devices, each of which reads its part only; in `dtype`, if that is given.

        None for a packed one, and for one that the file keeps in a form of which no parts can be read.
        """
        place = self._places[parameter]
        if self.format_of(parameter) in DTYPE_OF_FORMAT:
            tensors = [self._source.read(name).data for name in place.names]
            slices = plain_slices(tensors, place.spec.shape, place.stored)
            if slices is not None:
                kind = dtype or DTYPE_OF_FORMAT[self.format_of(parameter)]
                shape, read = shape_in_units(place.spec.shape, units), read_in_units(slices, units)
                array = array_from_slices(shape, sharding, lambda index: read(index).astype(kind, copy=False))
                return Dense(array=array)
        return None

    def ask_for(self, parameter: str) -> None:
        """Has a parameter read ahead of its use."""
        for name in self._places[parameter].tensors():
            self._source.ask_for(name)

    def release(self, parameter: str) -> None:
        """Gives back the memory that reading a parameter took, of what is not in use."""
        for name in self._places[parameter].tensors():
            self._source.release(name)

    def format_of(self, parameter: str) -> str:
        """The format the file keeps a parameter in."""
        place = self._places[parameter]
        if place.scheme is not None:
            return place.scheme.format_of(self._source, place.names[0])
        return self._source.info(place.names[0]).format

    def _packed_or_plain(self, place: _Place, name: str) -> Weight:
        if place.scheme is not None:
            return place.scheme.read(self._source, name, place.shape)
        return weight_from_tensor(self._source.read(name))

    def _dense(self, name: str) -> Dense:
        weight = weight_from_tensor(self._source.read(name))
        if isinstance(weight, Dense):
            return weight
        raise CheckpointError(f"tensor {name!r} is a vector in a block format ({weight.format})")


def _place(parameter: str, spec: ArraySpec, layout: FileLayout, config: Any, scheme: Scheme | None) -> _Place:
    stored = layout.stored(parameter, config)
    names = tuple(layout.names.tensor_names(parameter, spec.shape[0]))
    shape = stored.shape
    if shape is None:
        shape = spec.shape if names == (layout.names.tensor_name(parameter),) else spec.shape[1:]
        shape = (*shape[:-2], shape[-1], shape[-2]) if stored.is_transposed else shape
    plain = _Place(spec=spec, names=names, shape=shape, stored=stored)
    if scheme is None or spec.is_vector:
        return plain
    outputs_first = shape if stored.is_packed_so else (*shape[:-2], shape[-1], shape[-2])
    packed = [name for name in names if scheme.tensors(name, outputs_first) is not None]
    if packed and len(packed) < len(names):
        plain_name = next(name for name in names if name not in packed)
        raise CheckpointError(f"{packed[0]!r} is quantized and {plain_name!r} is not: experts of a layer must be alike")
    return dataclasses.replace(plain, shape=outputs_first, scheme=scheme) if packed else plain


def _array(weight: Weight) -> np.ndarray:
    """The matrix written out; in its own type if it is a plain one."""
    return np.asarray(weight.array if isinstance(weight, Dense) else jax.device_get(weight.decode()))
