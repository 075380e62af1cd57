"""Q4_0 and Q4_1: blocks of 32 values of 4 bits with a float16 scale, without and with a float16 minimum.

Values: (q - 8) * scale and q * scale + minimum. Agrees bit for bit with ggml-quants.c (quantize_row_q4_0_ref,
quantize_row_q4_1_ref and the matching dequantize_row).
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
class Q4_0Weight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2] (two values a byte, see `blocks`), scale float16 [O, I/32]."""

    quants: Leaf
    scale: Leaf

    @property
    def format(self) -> str:
        return "Q4_0"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        quants = blocks.unpack_nibbles(jnp.asarray(self.quants)).astype(jnp.float32) - 8
        return blocks.scaled(quants, jnp.asarray(self.scale))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q4_1Weight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2] (two values a byte, see `blocks`), scale and minimum float16 [O, I/32]."""

    quants: Leaf
    scale: Leaf
    minimum: Leaf

    @property
    def format(self) -> str:
        return "Q4_1"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        quants = blocks.unpack_nibbles(jnp.asarray(self.quants)).astype(jnp.float32)
        return blocks.scaled(quants, jnp.asarray(self.scale), jnp.asarray(self.minimum))


def _encode_q4_0(matrix: np.ndarray) -> Q4_0Weight:
    values = blocks.as_blocks(matrix)
    scale = blocks.signed_extreme(values) / np.float32(-8)
    quants = np.minimum(values * blocks.inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    return Q4_0Weight(quants=blocks.pack_nibbles(quants), scale=scale[..., 0].astype(np.float16))


def _encode_q4_1(matrix: np.ndarray) -> Q4_1Weight:
    values = blocks.as_blocks(matrix)
    minimum = values.min(axis=-1, keepdims=True)
    scale = (values.max(axis=-1, keepdims=True) - minimum) / np.float32(15)
    quants = np.minimum((values - minimum) * blocks.inverse(scale) + np.float32(0.5), 15).astype(np.uint8)
    return Q4_1Weight(
        quants=blocks.pack_nibbles(quants),
        scale=scale[..., 0].astype(np.float16),
        minimum=minimum[..., 0].astype(np.float16),
    )


def _q4_0_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q4_0Weight:
    scale, quants = blocks.split_blocks(raw, shape, (2, 16))
    return Q4_0Weight(quants=quants, scale=scale.view(np.float16))


def _q4_1_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q4_1Weight:
    scale, minimum, quants = blocks.split_blocks(raw, shape, (2, 2, 16))
    return Q4_1Weight(quants=quants, scale=scale.view(np.float16), minimum=minimum.view(np.float16))


def _q4_0_spec(num_outputs: int, num_inputs: int) -> Q4_0Weight:
    return Q4_0Weight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        scale=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
    )


def _q4_1_spec(num_outputs: int, num_inputs: int) -> Q4_1Weight:
    return Q4_1Weight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        scale=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
        minimum=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
    )


Q4_0 = Format(
    name="Q4_0",
    block_length=blocks.BLOCK_LENGTH,
    encode=_encode_q4_0,
    from_gguf_bytes=_q4_0_from_gguf_bytes,
    spec=_q4_0_spec,
)
Q4_1 = Format(
    name="Q4_1",
    block_length=blocks.BLOCK_LENGTH,
    encode=_encode_q4_1,
    from_gguf_bytes=_q4_1_from_gguf_bytes,
    spec=_q4_1_spec,
)
