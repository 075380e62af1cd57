"""Weights laid out for the CPU kernel: the file's bytes, sixteen outputs side by side, nothing expanded."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxserve.quant.grouped_int import GroupedInt, has_tiles, tile_parts
from jaxserve.quant.quantized import Leaf, Weight
from pallas_kernels.quantized_matmul.tiles import GROUP_LENGTH, check_tileable, tile, untile


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TiledWeight:
    """tiles uint8 [bytes], or [E, bytes] for experts; format_name is the packed format they came from, num_outputs and
    num_inputs are one expert's, group_length is that of its INT4 groups."""

    tiles: Leaf
    format_name: str = field(metadata={"static": True})
    num_outputs: int = field(metadata={"static": True})
    num_inputs: int = field(metadata={"static": True})
    group_length: int | None = field(default=None, metadata={"static": True})

    @property
    def format(self) -> str:
        return f"{self.format_name} tiled"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tiles.shape[:-1], self.num_outputs, self.num_inputs)

    def decode(self) -> Float32[Array, "... O I"]:
        """The matrix in float32, on the host: cannot be jitted."""
        sizes = (self.num_outputs, self.num_inputs, self.group_length)
        each = [untile(self.format_name, tiles, *sizes) for tiles in np.atleast_2d(np.asarray(self.tiles))]
        return jnp.asarray(each).reshape(self.shape)


def can_tile(weight: Weight) -> bool:
    """Whether the CPU kernels take a weight of this format and shape, an expert's if it has three axes."""
    return has_kernel(weight.format, weight.shape) and (not isinstance(weight, GroupedInt) or has_tiles(weight))


def has_kernel(format_name: str, shape: tuple[int, ...]) -> bool:
    """Whether there is a CPU kernel for the format and shape; a weight's scales may still not fit it (`can_tile`)."""
    try:
        check_tileable(format_name, *shape[-2:])
    except ValueError:
        return False
    return True


def tiled(weight: Weight) -> TiledWeight:
    """The weight in tiles, on the host. Raises ValueError where `can_tile` is false."""
    if isinstance(weight, GroupedInt):
        parts, group_length = tile_parts(weight)
    else:
        parts, group_length = {name: np.asarray(value) for name, value in vars(weight).items()}, None
    *experts, num_outputs, num_inputs = weight.shape
    if experts:
        each = ({name: value[expert] for name, value in parts.items()} for expert in range(experts[0]))
        tiles = np.stack([tile(weight.format, expert, group_length) for expert in each])
    else:
        tiles = tile(weight.format, parts, group_length)
    return TiledWeight(
        tiles=tiles,
        format_name=weight.format,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        group_length=group_length,
    )


def joined(weights: Mapping[str, Any], neighbours: Sequence[str]) -> dict[str, Any]:
    """The mapping with neighbours of one format joined into one weight, under their names with "+" between.

    Rows follow each other in the order of the names. Weights that are no tiles, or have another format than the ones
    beside them, stay as they are.
    """
    out = {name: weight for name, weight in weights.items() if name not in neighbours}
    present = [name for name in neighbours if name in weights]
    for _, group in itertools.groupby(present, lambda name: _kind(name, weights[name])):
        run = list(group)
        out["+".join(run)] = weights[run[0]] if len(run) == 1 else _concatenated([weights[name] for name in run])
    return out


def _kind(name: str, weight: Any) -> tuple[str, int | None, int]:
    """Equal for weights that can be joined; a group of outputs that is filled up with zeros cannot be."""
    if not isinstance(weight, TiledWeight) or weight.num_outputs % GROUP_LENGTH:
        return (name, None, 0)
    return (weight.format_name, weight.group_length, weight.num_inputs)


def _concatenated(weights: list[TiledWeight]) -> TiledWeight:
    """One weight with all outputs: groups of tiles simply follow each other."""
    tiles = jnp.concatenate([weight.tiles for weight in weights], axis=-1)
    return dataclasses.replace(weights[0], tiles=tiles, num_outputs=sum(weight.num_outputs for weight in weights))
