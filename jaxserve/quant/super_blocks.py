"""GGUF's super-blocks of 256 values (K-quants, IQ4_XS): bit fields in groups, and scales of sub-blocks under a float16.

A super-block holds 8 or 16 sub-blocks. The scale of each is a small whole number, to be multiplied by the super-block's
float16. Agrees with ggml-quants.c (block_q2_K and its neighbours) about where the bits lie; the encoders here choose
scales from each sub-block's extremes, where llama.cpp searches for the ones of least error.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Float32, Integer, UInt8

from jaxserve.quant import blocks

SUPER_BLOCK_LENGTH = 256


def unpack_fields(packed: Integer[Array, "*rows bytes"], bits: int, group: int) -> Integer[Array, "*rows I"]:
    """Fields of 4, 2 or 1 bits. In each group of bytes the lowest field of every byte comes first, then the next."""
    num_fields = 8 // bits
    in_groups = packed.reshape(*packed.shape[:-1], -1, 1, group)
    shifts = (jnp.arange(num_fields, dtype=jnp.uint8) * jnp.uint8(bits)).reshape(*(1,) * packed.ndim, num_fields, 1)
    fields = in_groups >> shifts & jnp.uint8(2**bits - 1)
    return fields.reshape(*packed.shape[:-1], -1)


def pack_fields(values: UInt8[np.ndarray, "*rows I"], bits: int, group: int) -> UInt8[np.ndarray, "*rows bytes"]:
    """The inverse of `unpack_fields`; bits above the lowest `bits` of a value are dropped."""
    num_fields = 8 // bits
    in_groups = values.reshape(*values.shape[:-1], -1, num_fields, group) & np.uint8(2**bits - 1)
    shifts = (np.arange(num_fields, dtype=np.uint8) * np.uint8(bits))[:, None]
    return np.bitwise_or.reduce(in_groups << shifts, axis=-2).reshape(*values.shape[:-1], -1)


def sub_block_scales(
    super_scale: Float[Array, "*rows super"], scales: Integer[Array, "*rows sub"]
) -> Float32[Array, "*rows sub"]:
    """super_scale * scale for each sub-block; exact, because a float16 times 8 bits fits a float32."""
    in_super_blocks = scales.reshape(*super_scale.shape, -1).astype(jnp.float32)
    return (super_scale.astype(jnp.float32)[..., None] * in_super_blocks).reshape(scales.shape)


def scaled(
    quants: Float32[Array, "*rows I"],
    scale: Float32[Array, "*rows sub"],
    minimum: Float32[Array, "*rows sub"] | None = None,
) -> Float32[Array, "*rows I"]:
    """quants * scale (- minimum), sub-block by sub-block.

    A float16 times a scale and a quant of 11 bits together is exact, so a fused multiply-add changes nothing.
    """
    values = quants.reshape(*scale.shape, -1) * scale[..., None]
    if minimum is not None:
        values = values - minimum[..., None]
    return values.reshape(quants.shape)


def as_sub_blocks(matrix: np.ndarray, length: int) -> Float32[np.ndarray, "*rows sub length"]:
    """A host matrix in float32, its rows cut into sub-blocks of `length`."""
    matrix = np.asarray(matrix, np.float32)
    assert matrix.shape[-1] % SUPER_BLOCK_LENGTH == 0, f"rows of {matrix.shape[-1]} are not whole super-blocks"
    return matrix.reshape(*matrix.shape[:-1], -1, length)


def rounded_scales(
    wanted: Float32[np.ndarray, "*rows sub"], sub_blocks: int, limit: int
) -> tuple[Float16[np.ndarray, "*rows super"], Integer[np.ndarray, "*rows sub"], Float32[np.ndarray, "*rows sub"]]:
    """float16 and whole numbers whose products are near the wanted scales, and the products.

    The scale of largest magnitude becomes `limit`; a negative limit allows both signs, as two's complement does.
    """
    in_super_blocks = wanted.reshape(*wanted.shape[:-1], -1, sub_blocks)
    super_scale = (blocks.signed_extreme(in_super_blocks) / np.float32(limit)).astype(np.float16)
    stored = super_scale.astype(np.float32)
    lowest, highest = (limit, -limit - 1) if limit < 0 else (0, limit)
    whole = np.clip(np.rint(in_super_blocks * blocks.inverse(stored)), lowest, highest)
    scales = whole.astype(np.int8 if limit < 0 else np.uint8).reshape(wanted.shape)
    return super_scale[..., 0], scales, (whole * stored).reshape(wanted.shape)


def rounded_quants(
    values: Float32[np.ndarray, "*rows sub length"], scale: Float32[np.ndarray, "*rows sub"], lowest: int, highest: int
) -> Float32[np.ndarray, "*rows sub length"]:
    """values / scale as whole numbers of a range."""
    return np.clip(np.rint(values * blocks.inverse(scale)[..., None]), lowest, highest)


def minima_and_scales(
    values: Float32[np.ndarray, "*rows sub length"], highest: int
) -> tuple[Float32[np.ndarray, "*rows sub"], Float32[np.ndarray, "*rows sub"]]:
    """How far each sub-block reaches below zero, and the step that takes `highest` quants from there to its top."""
    below = np.maximum(-values.min(axis=-1), 0)
    return below, (np.maximum(values.max(axis=-1), 0) + below) / np.float32(highest)


def packed_struct(num_outputs: int, num_inputs: int, values_per_item: int, dtype: Any) -> jax.ShapeDtypeStruct:
    """The spec of an array with one item for `values_per_item` values of each row."""
    assert num_inputs % SUPER_BLOCK_LENGTH == 0, f"rows of {num_inputs} values are not whole super-blocks"
    return jax.ShapeDtypeStruct((num_outputs, num_inputs // values_per_item), dtype)
