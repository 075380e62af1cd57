"""NVFP4: groups of 16 four-bit floats (E2M1), a float8 scale for each and a float32 that divides them all.

Values: LEVELS[q] * (scale / global_scale), each step rounded to float32 (compressed-tensors' nvfp4-pack-quantized).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from jaxserve.quant import bit_streams
from jaxserve.quant.grouped_int import for_inputs
from jaxserve.quant.quantized import Leaf

GROUP_LENGTH = 16
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class NVFP4Weight:
    """quants uint8 [O, I/2], low nibbles first; scale float8_e4m3fn [O, I/16]; global_scale float32 [O]."""

    quants: Leaf
    scale: Leaf
    global_scale: Leaf

    @property
    def format(self) -> str:
        return "NVFP4"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        levels = jnp.asarray(LEVELS, jnp.float32)[bit_streams.unpack(jnp.asarray(self.quants), 4)]
        scale = jnp.asarray(self.scale).astype(jnp.float32)
        divisor = jnp.broadcast_to(jnp.asarray(self.global_scale)[..., None], scale.shape)
        scale = scale / lax.optimization_barrier(divisor)  # which XLA would else turn into a factor, rounded twice
        return levels * for_inputs(scale, GROUP_LENGTH, levels.shape[-1])
