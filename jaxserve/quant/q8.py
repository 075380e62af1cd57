"""Q8_0: blocks of 32 values of 8 bits with a float16 scale.

Values: q * scale. Agrees bit for bit with ggml-quants.c (quantize_row_q8_0_ref, dequantize_row_q8_0).
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from jaxserve.quant import blocks
from jaxserve.quant.quantized import Format, Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q8_0Weight:  # noqa: N801 - the format's own name
    """quants int8 [O, I], scale float16 [O, I/32]."""

    quants: Leaf
    scale: Leaf

    @property
    def format(self) -> str:
        return "Q8_0"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.quants.shape

    def decode(self) -> Float32[Array, "... O I"]:
        quants = jnp.asarray(self.quants).astype(jnp.float32)
        in_blocks = quants.reshape(*quants.shape[:-1], -1, blocks.BLOCK_LENGTH)
        return blocks.scaled(in_blocks, jnp.asarray(self.scale))


def _encode(matrix: np.ndarray) -> Q8_0Weight:
    values = blocks.as_blocks(matrix)
    scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(127)
    quants = _round_half_away(values * blocks.inverse(scale)).astype(np.int8)
    return Q8_0Weight(quants=quants.reshape(np.shape(matrix)), scale=scale[..., 0].astype(np.float16))


def _round_half_away(values: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """C's roundf. Adding a half and cutting would be wrong just below a half, where the sum rounds up."""
    whole = np.trunc(values)
    return whole + np.trunc(2 * (values - whole))


def _from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q8_0Weight:
    scale, quants = blocks.split_blocks(raw, shape, (2, 32))
    return Q8_0Weight(quants=quants.view(np.int8), scale=scale.view(np.float16))


def _spec(num_outputs: int, num_inputs: int) -> Q8_0Weight:
    return Q8_0Weight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 1, jnp.int8),
        scale=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
    )


Q8_0 = Format(
    name="Q8_0", block_length=blocks.BLOCK_LENGTH, encode=_encode, from_gguf_bytes=_from_gguf_bytes, spec=_spec
)
