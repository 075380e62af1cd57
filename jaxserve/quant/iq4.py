"""IQ4_NL and IQ4_XS: 4-bit numbers of 16 values that lie closer together near zero.

IQ4_NL: scale * LEVELS[q] in blocks of 32. IQ4_XS: d * scale * LEVELS[q] in super-blocks of 8 blocks of 32, the scales 6
signed bits, kept as bytes (2 more than the file's 136). Decoding agrees bit for bit with ggml-quants.c
(dequantize_row_iq4_nl, dequantize_row_iq4_xs); encoding takes scales from the extremes, where llama.cpp searches.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int8, UInt8

from jaxserve.quant import blocks, super_blocks
from jaxserve.quant.quantized import Format, Leaf

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IQ4_NLWeight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2] (two values a byte, see `blocks`), scale float16 [O, I/32]."""

    quants: Leaf
    scale: Leaf

    @property
    def format(self) -> str:
        return "IQ4_NL"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        return super_blocks.scaled(_levels(self.quants), jnp.asarray(self.scale).astype(jnp.float32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class IQ4_XSWeight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2] (two values a byte, see `blocks`), scales int8 [O, I/32], d float16 [O, I/256]."""

    quants: Leaf
    scales: Leaf
    d: Leaf

    @property
    def format(self) -> str:
        return "IQ4_XS"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        scale = super_blocks.sub_block_scales(jnp.asarray(self.d), jnp.asarray(self.scales))
        return super_blocks.scaled(_levels(self.quants), scale)


def _levels(quants: Leaf) -> Float32[Array, "*rows I"]:
    return jnp.asarray(LEVELS, jnp.float32)[super_blocks.unpack_fields(jnp.asarray(quants), 4, 16)]


def _encode_iq4_nl(matrix: np.ndarray) -> IQ4_NLWeight:
    values = blocks.as_blocks(matrix)
    scale = (blocks.signed_extreme(values)[..., 0] / np.float32(LEVELS[0])).astype(np.float16)
    quants = blocks.nearest_levels(values, scale.astype(np.float32), LEVELS)
    return IQ4_NLWeight(quants=blocks.pack_nibbles(quants), scale=scale)


def _encode_iq4_xs(matrix: np.ndarray) -> IQ4_XSWeight:
    values = super_blocks.as_sub_blocks(matrix, 32)
    wanted = blocks.signed_extreme(values)[..., 0] / np.float32(LEVELS[0])
    d, scales, scale = super_blocks.rounded_scales(wanted, 8, -32)
    quants = blocks.nearest_levels(values, scale, LEVELS)
    return IQ4_XSWeight(quants=blocks.pack_nibbles(quants), scales=scales, d=d)


def _unpack_scales(
    low: UInt8[np.ndarray, "*rows low"], high: UInt8[np.ndarray, "*rows high"]
) -> Int8[np.ndarray, "*rows sub"]:
    """Eight scales from four bytes of low nibbles and two bytes of high two bits, lowest fields first."""
    low_bits = np.stack([low & 15, low >> 4], axis=-1).reshape(*low.shape[:-1], -1)
    high_bits = np.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1).reshape(*low.shape[:-1], -1)
    return (low_bits | high_bits << 4).astype(np.int8) - np.int8(32)


def _iq4_nl_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> IQ4_NLWeight:
    scale, quants = blocks.split_blocks(raw, shape, (2, 16))
    return IQ4_NLWeight(quants=quants, scale=scale.view(np.float16))


def _iq4_xs_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> IQ4_XSWeight:
    d, high, low, quants = blocks.split_blocks(raw, shape, (2, 2, 4, 128), super_blocks.SUPER_BLOCK_LENGTH)
    return IQ4_XSWeight(quants=quants, scales=_unpack_scales(low, high), d=d.view(np.float16))


def _iq4_nl_spec(num_outputs: int, num_inputs: int) -> IQ4_NLWeight:
    return IQ4_NLWeight(
        quants=blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        scale=blocks.packed_struct(num_outputs, num_inputs, 32, jnp.float16),
    )


def _iq4_xs_spec(num_outputs: int, num_inputs: int) -> IQ4_XSWeight:
    return IQ4_XSWeight(
        quants=super_blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        scales=super_blocks.packed_struct(num_outputs, num_inputs, 32, jnp.int8),
        d=super_blocks.packed_struct(num_outputs, num_inputs, 256, jnp.float16),
    )


IQ4_NL = Format(
    name="IQ4_NL",
    block_length=blocks.BLOCK_LENGTH,
    encode=_encode_iq4_nl,
    from_gguf_bytes=_iq4_nl_from_gguf_bytes,
    spec=_iq4_nl_spec,
)
IQ4_XS = Format(
    name="IQ4_XS",
    block_length=super_blocks.SUPER_BLOCK_LENGTH,
    encode=_encode_iq4_xs,
    from_gguf_bytes=_iq4_xs_from_gguf_bytes,
    spec=_iq4_xs_spec,
)
