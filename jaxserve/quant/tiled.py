"""Weights laid out for the CPU kernel: the file's bytes, sixteen outputs side by side, nothing expanded."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxserve.quant.quantized import Leaf, Weight
from pallas_kernels.quantized_matmul.tiles import check_tileable, tile, untile


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TiledWeight:
    """tiles uint8 [bytes]; format_name is the packed format they came from, group_length that of its INT4 groups."""

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
        return (self.num_outputs, self.num_inputs)

    def decode(self) -> Float32[Array, "O I"]:
        """The matrix in float32, on the host: cannot be jitted."""
        return jnp.asarray(untile(self.format_name, np.asarray(self.tiles), *self.shape, self.group_length))


def can_tile(weight: Weight) -> bool:
    """Whether the CPU kernel takes a weight of this format and shape."""
    if len(weight.shape) != 2:
        return False
    try:
        check_tileable(weight.format, *weight.shape)
    except ValueError:
        return False
    return True


def tiled(weight: Weight) -> TiledWeight:
    """The weight in tiles, on the host. Raises ValueError where `can_tile` is false."""
    parts = {name: np.asarray(value) for name, value in vars(weight).items()}
    num_outputs, num_inputs = weight.shape
    return TiledWeight(
        tiles=tile(weight.format, parts), format_name=weight.format, num_outputs=num_outputs, num_inputs=num_inputs
    )
