"""Q2_K and Q3_K: super-blocks of 16 sub-blocks of 16 values.

Q2_K: d * scale * q - dmin * min, q of 2 bits, scale and min of 4. Q3_K: d * scale * (q - 4), q of 3 bits, scale of 6
signed ones, kept as a byte (4 more bytes than the file's 110). Decoding agrees bit for bit with ggml-quants.c
(dequantize_row_q2_K, dequantize_row_q3_K); encoding takes scales from the extremes, where llama.cpp searches.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int8, UInt8

from jaxserve.quant import blocks, super_blocks
from jaxserve.quant.quantized import Format, Leaf

_SUB_BLOCK_LENGTH = 16
_SUB_BLOCKS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q2_KWeight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/4], scales uint8 [O, I/16] (scale in the low nibble), d and dmin float16 [O, I/256].

    Of 128 values in 32 bytes, the lowest two bits of each byte are values 0 to 31, the next two 32 to 63.
    """

    quants: Leaf
    scales: Leaf
    d: Leaf
    dmin: Leaf

    @property
    def format(self) -> str:
        return "Q2_K"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 4)

    def decode(self) -> Float32[Array, "... O I"]:
        quants = super_blocks.unpack_fields(jnp.asarray(self.quants), 2, 32).astype(jnp.float32)
        both = jnp.asarray(self.scales)
        scale = super_blocks.sub_block_scales(jnp.asarray(self.d), both & jnp.uint8(15))
        minimum = super_blocks.sub_block_scales(jnp.asarray(self.dmin), both >> jnp.uint8(4))
        return super_blocks.scaled(quants, scale, minimum)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q3_KWeight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/4] (low two bits), high_bits uint8 [O, I/8], scales int8 [O, I/16], d float16 [O, I/256].

    Bit j of a super-block's byte l in high_bits is bit 2 of value 32 j + l.
    """

    quants: Leaf
    high_bits: Leaf
    scales: Leaf
    d: Leaf

    @property
    def format(self) -> str:
        return "Q3_K"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 4)

    def decode(self) -> Float32[Array, "... O I"]:
        low = super_blocks.unpack_fields(jnp.asarray(self.quants), 2, 32)
        high = super_blocks.unpack_fields(jnp.asarray(self.high_bits), 1, 32)
        quants = (low | high << jnp.uint8(2)).astype(jnp.float32) - 4
        scale = super_blocks.sub_block_scales(jnp.asarray(self.d), jnp.asarray(self.scales))
        return super_blocks.scaled(quants, scale)


def _encode_q2_k(matrix: np.ndarray) -> Q2_KWeight:
    values = super_blocks.as_sub_blocks(matrix, _SUB_BLOCK_LENGTH)
    below, wanted = super_blocks.minima_and_scales(values, 3)
    d, scales, scale = super_blocks.rounded_scales(wanted, _SUB_BLOCKS, 15)
    dmin, mins, minimum = super_blocks.rounded_scales(below, _SUB_BLOCKS, 15)
    quants = super_blocks.rounded_quants(values + minimum[..., None], scale, 0, 3).astype(np.uint8)
    return Q2_KWeight(
        quants=super_blocks.pack_fields(quants.reshape(np.shape(matrix)), 2, 32),
        scales=scales | mins << 4,
        d=d,
        dmin=dmin,
    )


def _encode_q3_k(matrix: np.ndarray) -> Q3_KWeight:
    values = super_blocks.as_sub_blocks(matrix, _SUB_BLOCK_LENGTH)
    wanted = blocks.signed_extreme(values)[..., 0] / np.float32(-4)
    d, scales, scale = super_blocks.rounded_scales(wanted, _SUB_BLOCKS, -32)
    quants = (super_blocks.rounded_quants(values, scale, -4, 3) + 4).astype(np.uint8).reshape(np.shape(matrix))
    return Q3_KWeight(
        quants=super_blocks.pack_fields(quants, 2, 32),
        high_bits=super_blocks.pack_fields(quants >> 2, 1, 32),
        scales=scales,
        d=d,
    )


def _unpack_scales(packed: UInt8[np.ndarray, "*rows bytes"]) -> Int8[np.ndarray, "*rows sub"]:
    """The 16 scales from each super-block's 12 bytes.

    Low four bits: the low nibbles of bytes 0 to 7, then their high nibbles. High two bits: the lowest fields of bytes
    8 to 11, then the next. 32 is taken off.
    """
    in_blocks = packed.reshape(*packed.shape[:-1], -1, 12)
    low = np.concatenate([in_blocks[..., :8] & 15, in_blocks[..., :8] >> 4], axis=-1)
    high = np.concatenate([in_blocks[..., 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)
    return ((low | high << 4).astype(np.int8) - np.int8(32)).reshape(*packed.shape[:-1], -1)


def _q2_k_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q2_KWeight:
    scales, quants, d, dmin = blocks.split_blocks(raw, shape, (16, 64, 2, 2), super_blocks.SUPER_BLOCK_LENGTH)
    return Q2_KWeight(quants=quants, scales=scales, d=d.view(np.float16), dmin=dmin.view(np.float16))


def _q3_k_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q3_KWeight:
    high_bits, quants, scales, d = blocks.split_blocks(raw, shape, (32, 64, 12, 2), super_blocks.SUPER_BLOCK_LENGTH)
    return Q3_KWeight(quants=quants, high_bits=high_bits, scales=_unpack_scales(scales), d=d.view(np.float16))


def _q2_k_spec(num_outputs: int, num_inputs: int) -> Q2_KWeight:
    return Q2_KWeight(
        quants=super_blocks.packed_struct(num_outputs, num_inputs, 4, jnp.uint8),
        scales=super_blocks.packed_struct(num_outputs, num_inputs, 16, jnp.uint8),
        d=super_blocks.packed_struct(num_outputs, num_inputs, 256, jnp.float16),
        dmin=super_blocks.packed_struct(num_outputs, num_inputs, 256, jnp.float16),
    )


def _q3_k_spec(num_outputs: int, num_inputs: int) -> Q3_KWeight:
    return Q3_KWeight(
        quants=super_blocks.packed_struct(num_outputs, num_inputs, 4, jnp.uint8),
        high_bits=super_blocks.packed_struct(num_outputs, num_inputs, 8, jnp.uint8),
        scales=super_blocks.packed_struct(num_outputs, num_inputs, 16, jnp.int8),
        d=super_blocks.packed_struct(num_outputs, num_inputs, 256, jnp.float16),
    )


Q2_K = Format(
    name="Q2_K",
    block_length=super_blocks.SUPER_BLOCK_LENGTH,
    encode=_encode_q2_k,
    from_gguf_bytes=_q2_k_from_gguf_bytes,
    spec=_q2_k_spec,
)
Q3_K = Format(
    name="Q3_K",
    block_length=super_blocks.SUPER_BLOCK_LENGTH,
    encode=_encode_q3_k,
    from_gguf_bytes=_q3_k_from_gguf_bytes,
    spec=_q3_k_spec,
)
