"""Where the parameters of a model go when it is loaded, and what of the file's arrays each device is given."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Int, Shaped

from jaxserve.engine.arrays import put
from jaxserve.engine.slices import Index, array_from_slices
from jaxserve.quant.dense import Dense
from jaxserve.quant.quantized import Weight
from sharding.divide import taken
from sharding.spec import ArraySpec

type Units = list[Int[np.ndarray, "u"] | None]


def as_in_the_file(spec: ArraySpec) -> Units:
    """Every axis whole and in order."""
    return [None] * len(spec.shape)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """sharding: of one parameter, None for the default device. units: for each of its axes which of the file's values
    it has (-1: a zero), None where it has them all in order."""

    sharding: Callable[[str, ArraySpec], NamedSharding | None]
    units: Callable[[ArraySpec], Units] = as_in_the_file


def shape_in_units(shape: tuple[int, ...], units: Units) -> tuple[int, ...]:
    """The shape of a parameter that has these of the file's values."""
    return tuple(size if unit is None else len(unit) for size, unit in zip(shape, units, strict=True))


def read_in_units(read: Callable[[Index], np.ndarray], units: Units) -> Callable[[Index], np.ndarray]:
    """A function that takes slices of what has these units, out of one that takes slices of the file's array.

    Reads from the first to the last value it needs of each axis, no others.
    """

    def of_slices(index: Index) -> Shaped[np.ndarray, "..."]:
        wanted = [None if unit is None else unit[part] for part, unit in zip(index, units, strict=True)]
        ranges = tuple(part if w is None else _range(w) for part, w in zip(index, wanted, strict=True))
        array = read(ranges)
        for axis, (values, part) in enumerate(zip(wanted, ranges, strict=True)):
            if values is not None:
                array = taken(array, np.where(values < 0, -1, values - part.start), axis)
        return array

    return of_slices


def _range(values: Int[np.ndarray, "u"]) -> slice:
    """From the first to the last value; one, for its type, where all are zeros."""
    real = values[values >= 0]
    return slice(int(real.min()), int(real.max()) + 1) if real.size else slice(0, 1)


def placed_vector(vector: Shaped[np.ndarray, "..."], units: Units, sharding: NamedSharding) -> jax.Array:
    """A vector, or one for each expert, on devices."""
    for axis, unit in enumerate(units):
        vector = vector if unit is None else taken(vector, unit, axis)
    return put(vector, sharding)


def placed_packed(name: str, weight: Weight, units: Units, sharding: NamedSharding) -> Weight:
    """A packed matrix on devices, still packed. ValueError where its blocks would have to be cut or filled up."""
    shape = weight.shape
    if units[-1] is not None:
        raise ValueError(f"{name}: {_ADVICE}")
    for axis, unit in enumerate(units[:-1]):
        if unit is not None:
            weight = _with_units(name, weight, unit, axis, len(shape))
    return jax.tree.map(lambda leaf: put(leaf, leaf_sharding(name, leaf.shape, weight.shape, sharding)), weight)


def _with_units[W: Weight](name: str, weight: W, unit: Int[np.ndarray, "u"], axis: int, rank: int) -> W:
    def of_leaf(leaf: np.ndarray) -> np.ndarray:
        if leaf.ndim < rank - 1 or (leaf.ndim < rank and axis == rank - 1):
            raise ValueError(f"{name}: {_ADVICE}")
        return taken(np.asarray(leaf), unit, axis)

    return jax.tree.map(of_leaf, weight)


def leaf_sharding(
    name: str, leaf_shape: tuple[int, ...], shape: tuple[int, ...], sharding: NamedSharding
) -> NamedSharding:
    """How one array of a packed matrix of this shape is cut: whole blocks, or ValueError.

    Of its arrays some have a value for each output only, or one for each input.
    """
    cut: Sequence[str | tuple[str, ...] | None] = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    if len(leaf_shape) == len(shape):
        cut = (*cut[:-1], None) if leaf_shape[-1] == 1 else cut
    elif leaf_shape == shape[:-1]:
        cut = cut[:-1]
    elif cut[-1] is None and leaf_shape[-1] == shape[-1]:
        cut = (*cut[: len(leaf_shape) - 1], None)
    else:
        raise ValueError(f"{name}: {_ADVICE}")
    for size, axis in zip(leaf_shape, cut, strict=True):
        names = () if axis is None else (axis,) if isinstance(axis, str) else axis
        if size % math.prod(sharding.mesh.shape[name] for name in names):
            raise ValueError(f"{name}: {_ADVICE}")
    return NamedSharding(sharding.mesh, PartitionSpec(*cut))


_ADVICE = "its packed blocks cannot be cut so; --expand-weights always writes weights out"


def host_dense(weight: Weight, dtype: str | None, decode: Callable[[Weight], jax.Array]) -> Dense:
    """A matrix written out on the host, in a type of its own where none is given."""
    plain = np.asarray(weight.array if isinstance(weight, Dense) else jax.device_get(decode(weight)))
    return Dense(array=plain if dtype is None else plain.astype(dtype, copy=False))


def placed_dense(weight: Dense, units: Units, sharding: NamedSharding) -> Dense:
    """A matrix of the host on devices, part by part."""
    read = read_in_units(lambda index: np.asarray(weight.array[index]), units)
    return Dense(array=array_from_slices(shape_in_units(weight.shape, units), sharding, read))
