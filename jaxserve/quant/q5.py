"""Q5_0 and Q5_1: blocks of 32 values of 5 bits with a float16 scale, without and with a float16 minimum.

Values: (q - 16) * scale and q * scale + minimum. The fifth bits lie apart from the other four, as in the file. Agrees
bit for bit with ggml-quants.c (quantize_row_q5_0_ref, quantize_row_q5_1_ref and the matching dequantize_row).
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
class Q5_0Weight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2] (low four bits), high_bits uint8 [O, I/8], scale float16 [O, I/32]."""

    quants: Leaf
    high_bits: Leaf
    scale: Leaf

    @property
    def format(self) -> str:
        return "Q5_0"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        quants = _unpack(self.quants, self.high_bits) - 16
        return blocks.scaled(quants, jnp.asarray(self.scale))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q5_1Weight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2] (low four bits), high_bits uint8 [O, I/8], scale and minimum float16 [O, I/32]."""

    quants: Leaf
    high_bits: Leaf
    scale: Leaf
    minimum: Leaf

    @property
    def format(self) -> str:
        return "Q5_1"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        quants = _unpack(self.quants, self.high_bits)
        return blocks.scaled(quants, jnp.asarray(self.scale), jnp.asarray(self.minimum))


def _unpack(quants: Leaf, high_bits: Leaf) -> Float32[Array, "... blocks 32"]:
    """The five-bit values, 0 to 31."""
    low = blocks.unpack_nibbles(jnp.asarray(quants))
    return (low | blocks.unpack_high_bits(jnp.asarray(high_bits))).astype(jnp.float32)


def _encode_q5_0(matrix: np.ndarray) -> Q5_0Weight:
    values = blocks.as_blocks(matrix)
    scale = blocks.signed_extreme(values) / np.float32(-16)
    quants = np.minimum(values * blocks.inverse(scale) + np.float32(16.5), 31).astype(np.uint8)
    return Q5_0Weight(
        quants=blocks.pack_nibbles(quants),
        high_bits=blocks.pack_high_bits(quants),
        scale=scale[..., 0].astype(np.float16),
    )


def _encode_q5_1(matrix: np.ndarray) -> Q5_1Weight:
    values = blocks.as_blocks(matrix)
    minimum = values.min(axis=-1, keepdims=True)
    scale = (values.max(axis=-1, keepdims=True) - minimum) / np.float32(31)
    quants = np.minimum((values - minimum) * blocks.inverse(scale) + np.float32(0.5), 31).astype(np.uint8)
    return Q5_1Weight(
        quants=blocks.pack_nibbles(quants),
        high_bits=blocks.pack_high_bits(quants),
        scale=scale[..., 0].astype(np.float16),
        minimum=minimum[..., 0].astype(np.float16),
    )


def _q5_0_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q5_0Weight:
    scale, high_bits, quants = blocks.split_blocks(raw, shape, (2, 4, 16))
    return Q5_0Weight(quants=quants, high_bits=high_bits, scale=scale.view(np.float16))


def _q5_1_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q5_1Weight:
    scale, minimum, high_bits, quants = blocks.split_blocks(raw, shape, (2, 2, 4, 16))
    return Q5_1Weight(
        quants=quants, high_bits=high_bits, scale=scale.view(np.float16), minimum=minimum.view(np.float16)
    )


def _q5_0_spec(num_outputs: int, num_inputs: int) -> Q5_0Weight:
    return Q5_0Weight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        high_bits=blocks.packed_struct(num_outputs, num_inputs, 8, jnp.uint8),
        scale=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
    )


def _q5_1_spec(num_outputs: int, num_inputs: int) -> Q5_1Weight:
    return Q5_1Weight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        high_bits=blocks.packed_struct(num_outputs, num_inputs, 8, jnp.uint8),
        scale=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
        minimum=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
    )


Q5_0 = Format(
    name="Q5_0",
    block_length=blocks.BLOCK_LENGTH,
    encode=_encode_q5_0,
    from_gguf_bytes=_q5_0_from_gguf_bytes,
    spec=_q5_0_spec,
)
Q5_1 = Format(
    name="Q5_1",
    block_length=blocks.BLOCK_LENGTH,
    encode=_encode_q5_1,
    from_gguf_bytes=_q5_1_from_gguf_bytes,
    spec=_q5_1_spec,
)
