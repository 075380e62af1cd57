"""Q4_K and Q5_K: super-blocks of 8 sub-blocks of 32 values, each with a 6-bit scale and a 6-bit minimum.

Values: d * scale * q - dmin * min, q of 4 or 5 bits. The packed 6-bit numbers of the file are kept as bytes, which
costs 4 bytes in 144 and saves taking them apart in every step. Decoding agrees bit for bit with ggml-quants.c
(dequantize_row_q4_K, dequantize_row_q5_K); encoding takes scales from the extremes, where llama.cpp searches.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Integer, UInt8

from jaxserve.quant import blocks, super_blocks
from jaxserve.quant.quantized import Format, Leaf

_SUB_BLOCK_LENGTH = 32
_SUB_BLOCKS = 8
_MAX_SCALE = 63


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q4_KWeight:  # noqa: N801 - the format's own name
    """quants uint8 [O, I/2], scales and mins uint8 [O, I/32], d and dmin float16 [O, I/256].

    In the 32 bytes of 64 values the low nibbles are the first sub-block, the high nibbles the second.
    """

    quants: Leaf
    scales: Leaf
    mins: Leaf
    d: Leaf
    dmin: Leaf

    @property
    def format(self) -> str:
        return "Q4_K"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        return _values(self, super_blocks.unpack_fields(jnp.asarray(self.quants), 4, 32))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Q5_KWeight:  # noqa: N801 - the format's own name
    """As Q4_KWeight, and high_bits uint8 [O, I/8]: bit j of a super-block's byte l is bit 4 of its value 32 j + l."""

    quants: Leaf
    high_bits: Leaf
    scales: Leaf
    mins: Leaf
    d: Leaf
    dmin: Leaf

    @property
    def format(self) -> str:
        return "Q5_K"

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.quants.shape[:-1], self.quants.shape[-1] * 2)

    def decode(self) -> Float32[Array, "... O I"]:
        low = super_blocks.unpack_fields(jnp.asarray(self.quants), 4, 32)
        high = super_blocks.unpack_fields(jnp.asarray(self.high_bits), 1, 32)
        return _values(self, low | high << jnp.uint8(4))


def _values(weight: Q4_KWeight | Q5_KWeight, quants: Integer[Array, "*rows I"]) -> Float32[Array, "*rows I"]:
    scale = super_blocks.sub_block_scales(jnp.asarray(weight.d), jnp.asarray(weight.scales))
    minimum = super_blocks.sub_block_scales(jnp.asarray(weight.dmin), jnp.asarray(weight.mins))
    return super_blocks.scaled(quants.astype(jnp.float32), scale, minimum)


def _encode(matrix: np.ndarray, highest: int) -> tuple[UInt8[np.ndarray, "*rows I"], dict[str, np.ndarray]]:
    """The quants, one a byte, and the other arrays by name."""
    values = super_blocks.as_sub_blocks(matrix, _SUB_BLOCK_LENGTH)
    below, wanted = super_blocks.minima_and_scales(values, highest)
    d, scales, scale = super_blocks.rounded_scales(wanted, _SUB_BLOCKS, _MAX_SCALE)
    dmin, mins, minimum = super_blocks.rounded_scales(below, _SUB_BLOCKS, _MAX_SCALE)
    quants = super_blocks.rounded_quants(values + minimum[..., None], scale, 0, highest).astype(np.uint8)
    return quants.reshape(np.shape(matrix)), {"scales": scales, "mins": mins, "d": d, "dmin": dmin}


def _encode_q4_k(matrix: np.ndarray) -> Q4_KWeight:
    quants, scales = _encode(matrix, 15)
    return Q4_KWeight(quants=super_blocks.pack_fields(quants, 4, 32), **scales)


def _encode_q5_k(matrix: np.ndarray) -> Q5_KWeight:
    quants, scales = _encode(matrix, 31)
    return Q5_KWeight(
        quants=super_blocks.pack_fields(quants, 4, 32),
        high_bits=super_blocks.pack_fields(quants >> 4, 1, 32),
        **scales,
    )


def _unpack_scales(packed: UInt8[np.ndarray, "*rows bytes"]) -> dict[str, UInt8[np.ndarray, "*rows sub"]]:
    """Scales and minima from the 12 bytes of each super-block.

    Bytes 0 to 3 are the scales and 4 to 7 the minima of sub-blocks 0 to 3; of sub-blocks 4 to 7 the low four bits are
    in bytes 8 to 11 (scale in the low nibble, minimum in the high one), the high two in the top bits of bytes 0 to 7.
    """
    first, second, third = (packed.reshape(*packed.shape[:-1], -1, 3, 4)[..., index, :] for index in range(3))
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], axis=-1)
    mins = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], axis=-1)
    return {"scales": scales.reshape(*packed.shape[:-1], -1), "mins": mins.reshape(*packed.shape[:-1], -1)}


def _q4_k_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q4_KWeight:
    d, dmin, scales, quants = blocks.split_blocks(raw, shape, (2, 2, 12, 128), super_blocks.SUPER_BLOCK_LENGTH)
    return Q4_KWeight(quants=quants, **_unpack_scales(scales), d=d.view(np.float16), dmin=dmin.view(np.float16))


def _q5_k_from_gguf_bytes(raw: np.ndarray, shape: tuple[int, ...]) -> Q5_KWeight:
    fields = blocks.split_blocks(raw, shape, (2, 2, 12, 32, 128), super_blocks.SUPER_BLOCK_LENGTH)
    d, dmin, scales, high_bits, quants = fields
    return Q5_KWeight(
        quants=quants,
        high_bits=high_bits,
        **_unpack_scales(scales),
        d=d.view(np.float16),
        dmin=dmin.view(np.float16),
    )


def _scale_structs(num_outputs: int, num_inputs: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: super_blocks.packed_struct(num_outputs, num_inputs, values_per_item, dtype)
        for name, values_per_item, dtype in (
            ("scales", 32, jnp.uint8), ("mins", 32, jnp.uint8), ("d", 256, jnp.float16), ("dmin", 256, jnp.float16),
        )
    }  # fmt: skip


def _q4_k_spec(num_outputs: int, num_inputs: int) -> Q4_KWeight:
    return Q4_KWeight(
        quants=super_blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        **_scale_structs(num_outputs, num_inputs),
    )


def _q5_k_spec(num_outputs: int, num_inputs: int) -> Q5_KWeight:
    return Q5_KWeight(
        quants=super_blocks.packed_struct(num_outputs, num_inputs, 2, jnp.uint8),
        high_bits=super_blocks.packed_struct(num_outputs, num_inputs, 8, jnp.uint8),
        **_scale_structs(num_outputs, num_inputs),
    )


Q4_K = Format(
    name="Q4_K",
    block_length=super_blocks.SUPER_BLOCK_LENGTH,
    encode=_encode_q4_k,
    from_gguf_bytes=_q4_k_from_gguf_bytes,
    spec=_q4_k_spec,
)
Q5_K = Format(
    name="Q5_K",
    block_length=super_blocks.SUPER_BLOCK_LENGTH,
    encode=_encode_q5_k,
    from_gguf_bytes=_q5_k_from_gguf_bytes,
    spec=_q5_k_spec,
)
