"""Parameters of a native checkpoint as weights: read whole, or each device's part."""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Float32

from checkpoints.errors import CheckpointError
from checkpoints.native import ArrayInfo, NativeArrays, NativeParameter
from jaxserve.engine.parameters import DTYPE_OF_FORMAT
from jaxserve.engine.placement import Units, leaf_sharding, read_in_units, shape_in_units
from jaxserve.engine.slices import array_from_slices
from jaxserve.quant.dense import Dense
from jaxserve.quant.formats import format_named
from jaxserve.quant.quantized import Weight
from sharding.spec import ArraySpec


class NativeParameters:
    """The parameters of a model in a native checkpoint, by our paths.

    Raises CheckpointError, once for all that are missing, left over or not of the model's shapes.
    """

    def __init__(self, arrays: NativeArrays, wanted: Mapping[str, ArraySpec]) -> None:
        self._arrays = arrays
        self._specs: dict[str, Weight] = {}
        found = arrays.parameters
        missing, extra = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
        wrong = [n for n in wanted if n in found and found[n].shape != wanted[n].shape]
        for problem, names in (("missing", missing), ("unexpected", extra), ("wrongly shaped", wrong)):
            if names:
                listed = ", ".join(f"{name:.80}" for name in names[:20])
                raise CheckpointError(
                    f"{arrays.path}: the parameters are not those of the model: {len(names)} {problem}: {listed}"
                )
        self.bytes_by_format: dict[str, int] = {}
        for name, spec in wanted.items():
            parameter = found[name]
            self._specs[name] = self._checked(name, parameter, spec)
            so_far = self.bytes_by_format.get(parameter.format, 0)
            self.bytes_by_format[parameter.format] = so_far + parameter.num_bytes

    def vector(self, parameter: str) -> Float32[np.ndarray, "..."]:
        """A parameter that is a vector, or one for each expert, on the host."""
        return self._arrays.read(parameter, "")

    def matrix(self, parameter: str) -> Weight:
        """A parameter that is a matrix, or several, on the host, in the format it is stored in."""
        spec = self._specs[parameter]
        if isinstance(spec, Dense):
            return Dense(array=self._arrays.read(parameter, ""))
        parts = {part: self._arrays.read(parameter, part) for part in vars(spec)}
        return dataclasses.replace(spec, **parts)  # type: ignore[type-var]

    def placed(self, parameter: str, sharding: NamedSharding, units: Units, dtype: str | None) -> Weight | None:
        """The same on devices, each of which reads its part only; a plain one in `dtype`, if that is given.

        None for a packed one whose values are copied, filled up or written out on the way.
        """
        spec = self._specs[parameter]
        if isinstance(spec, Dense):
            kind = dtype or str(spec.array.dtype)
            read = read_in_units(lambda index: self._arrays.read(parameter, "", index), units)
            shape = shape_in_units(spec.shape, units)
            return Dense(array=array_from_slices(shape, sharding, lambda index: read(index).astype(kind, copy=False)))
        if dtype is not None or any(unit is not None for unit in units):
            return None
        parts = {}
        for part, info in self._arrays.parameters[parameter].arrays.items():
            cut = leaf_sharding(parameter, info.shape, spec.shape, sharding)
            parts[part] = array_from_slices(
                info.shape, cut, lambda index, part=part: self._arrays.read(parameter, part, index)
            )
        return dataclasses.replace(spec, **parts)  # type: ignore[type-var]

    def format_of(self, parameter: str) -> str:
        """The format it is stored in."""
        return self._arrays.parameters[parameter].format

    def ask_for(self, parameter: str) -> None:
        """Nothing: reads are not mapped."""

    def release(self, parameter: str) -> None:
        """Nothing: reads are not mapped."""

    def _checked(self, name: str, parameter: NativeParameter, spec: ArraySpec) -> Weight:
        """The weight with a ShapeDtypeStruct for each array, if these are the parameter's arrays."""
        where = f"{self._arrays.path}: parameter {name}"
        stored = "F32" if spec.is_vector else parameter.format
        if parameter.format != stored:
            raise CheckpointError(f"{where}: a vector in format {parameter.format!r:.40}; F32 is expected")
        if stored in DTYPE_OF_FORMAT:
            dtype = DTYPE_OF_FORMAT[stored]
            weight: Weight = Dense(array=jax.ShapeDtypeStruct(parameter.shape, dtype))
            expected = {"": ArrayInfo(dtype=dtype, shape=parameter.shape)}
        else:
            weight = self._packed_spec(where, parameter)
            expected = {part: ArrayInfo(dtype=a.dtype.name, shape=a.shape) for part, a in vars(weight).items()}
        if dict(parameter.arrays) != expected:
            raise CheckpointError(f"{where}: its arrays are not those of {stored} {list(parameter.shape)}")
        return weight

    def _packed_spec(self, where: str, parameter: NativeParameter) -> Weight:
        known = format_named(parameter.format, wanted_by=where)
        *leading, num_outputs, num_inputs = parameter.shape
        if num_inputs % known.block_length:
            raise CheckpointError(f"{where}: rows of {num_inputs} are not whole blocks of {known.block_length}")
        spec = known.spec(num_outputs, num_inputs)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*leading, *leaf.shape), leaf.dtype), spec)
