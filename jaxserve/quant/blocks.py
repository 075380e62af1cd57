"""GGUF's legacy blocks of 32 values: taking their bytes apart and packing and unpacking 4-bit and single-bit fields.

In a block the low nibbles of its 16 bytes are values 0 to 15 and the high nibbles are values 16 to 31; bit j of the
four "high bit" bytes, little-endian, is the fifth bit of value j. (ggml-quants.c, block_q4_0 and its neighbours.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer, UInt8

BLOCK_LENGTH = 32


def split_blocks(
    raw: UInt8[np.ndarray, "... bytes_per_row"],
    shape: tuple[int, ...],
    field_bytes: tuple[int, ...],
    block_length: int = BLOCK_LENGTH,
) -> list[UInt8[np.ndarray, "..."]]:
    """Each field of all blocks as one array [..., blocks * field_bytes], in the blocks' order; a copy."""
    blocks_per_row = shape[-1] // block_length
    assert shape[-1] % block_length == 0, f"rows of {shape[-1]} values are not whole blocks of {block_length}"
    assert raw.shape == (*shape[:-1], blocks_per_row * sum(field_bytes)), f"{raw.shape} bytes for a shape of {shape}"
    blocks = raw.reshape(*shape[:-1], blocks_per_row, sum(field_bytes))
    ends = np.cumsum(field_bytes)
    return [
        np.ascontiguousarray(blocks[..., end - size : end]).reshape(*shape[:-1], blocks_per_row * size)
        for end, size in zip(ends, field_bytes, strict=True)
    ]


def as_blocks(matrix: np.ndarray) -> Float32[np.ndarray, "... blocks 32"]:
    """A host matrix in float32, its rows cut into blocks."""
    matrix = np.asarray(matrix, np.float32)
    assert matrix.shape[-1] % BLOCK_LENGTH == 0, f"rows of {matrix.shape[-1]} are not whole blocks of {BLOCK_LENGTH}"
    return matrix.reshape(*matrix.shape[:-1], -1, BLOCK_LENGTH)


def inverse(scale: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """1 / scale, and 0 where the scale is 0."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def signed_extreme(values: Float32[np.ndarray, "*rows blocks length"]) -> Float32[np.ndarray, "*rows blocks 1"]:
    """The value of largest magnitude of each block, with its sign; the first of equals."""
    index = np.abs(values).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(values, index, axis=-1)


def nearest_levels(
    values: Float32[np.ndarray, "*rows blocks 32"],
    scale: Float32[np.ndarray, "*rows blocks"],
    levels: tuple[int, ...],
) -> UInt8[np.ndarray, "*rows blocks 32"]:
    """The index of the level that comes nearest to each value when multiplied by the scale; the first of equals."""
    nearest = np.zeros(values.shape, np.uint8)
    least = np.full(values.shape, np.inf, np.float32)
    for index, level in enumerate(levels):
        error = np.abs(scale[..., None] * np.float32(level) - values)
        nearest[error < least] = index
        least = np.minimum(error, least)
    return nearest


def pack_nibbles(quants: UInt8[np.ndarray, "*rows blocks 32"]) -> UInt8[np.ndarray, "*rows half"]:
    """Values below 16, two in a byte; the fifth bit of larger ones is dropped."""
    low, high = quants[..., :16] & 15, quants[..., 16:] & 15
    return (low | high << 4).reshape(*quants.shape[:-2], -1)


def unpack_nibbles(packed: Integer[Array, "*rows half"]) -> Integer[Array, "*rows blocks 32"]:
    """The inverse of `pack_nibbles`."""
    bytes_of_blocks = packed.reshape(*packed.shape[:-1], -1, 16)
    return jnp.concatenate([bytes_of_blocks & jnp.uint8(15), bytes_of_blocks >> jnp.uint8(4)], axis=-1)


def pack_high_bits(quants: UInt8[np.ndarray, "*rows blocks 32"]) -> UInt8[np.ndarray, "*rows eighth"]:
    """The fifth bit of each value, eight in a byte."""
    bits = np.packbits(quants >> 4, axis=-1, bitorder="little")
    return bits.reshape(*quants.shape[:-2], -1)


def unpack_high_bits(packed: Integer[Array, "*rows eighth"]) -> Integer[Array, "*rows blocks 32"]:
    """Each value's fifth bit in place: 0 or 16."""
    shifts = jnp.arange(8, dtype=jnp.uint8).reshape(*(1,) * packed.ndim, 8)
    bits = packed[..., None] >> shifts & jnp.uint8(1)
    return (bits << jnp.uint8(4)).reshape(*packed.shape[:-1], -1, BLOCK_LENGTH)


def scaled(
    quants: Float32[Array, "*rows blocks 32"],
    scale: Float[Array, "*rows blocks"],
    minimum: Float[Array, "*rows blocks"] | None = None,
) -> Float32[Array, "*rows I"]:
    """quants * scale (+ minimum), block by block, as whole rows.

    A quant of at most 8 bits times a float16 scale is exact in float32, so a fused multiply-add changes nothing.
    """
    values = quants * scale.astype(jnp.float32)[..., None]
    if minimum is not None:
        values = values + minimum.astype(jnp.float32)[..., None]
    return values.reshape(*quants.shape[:-2], -1)


def packed_struct(num_outputs: int, num_inputs: int, values_per_item: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The spec of an array with one item for `values_per_item` values of each row."""
    assert num_inputs % BLOCK_LENGTH == 0, f"rows of {num_inputs} values are not whole blocks of {BLOCK_LENGTH}"
    return jax.ShapeDtypeStruct((num_outputs, num_inputs // values_per_item), dtype)
