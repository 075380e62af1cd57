"""Rows as streams of bits: value i of a row lies in the bits from i * bits on, the lowest bit of a byte first.

So do GPTQ and compressed-tensors pack their 32-bit words, little-endian; a value may span two words (3 bits).
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, UInt8

VALUES = 8  # that many values fill whole bytes, whatever their bits


def unpack(packed: Integer[Array, "... bytes"], bits: int) -> Integer[Array, "... I"]:
    """The values of 2, 3, 4 or 8 bits, as uint8."""
    if bits == 8:
        return packed
    in_words = packed.reshape(*packed.shape[:-1], -1, bits).astype(jnp.uint32)
    word = in_words[..., 0]
    for index in range(1, bits):
        word = word | in_words[..., index] << jnp.uint32(8 * index)
    shifts = (jnp.arange(VALUES, dtype=jnp.uint32) * jnp.uint32(bits)).reshape(*(1,) * word.ndim, VALUES)
    fields = word[..., None] >> shifts & jnp.uint32(2**bits - 1)
    return fields.astype(jnp.uint8).reshape(*packed.shape[:-1], -1)


def unpack_on_host(packed: UInt8[np.ndarray, "... bytes"], bits: int) -> UInt8[np.ndarray, "... I"]:
    """The same with numpy."""
    if bits == 3:
        single = np.unpackbits(packed, axis=-1, bitorder="little").reshape(*packed.shape[:-1], -1, bits)
        return np.packbits(single, axis=-1, bitorder="little")[..., 0]
    fields = [packed >> np.uint8(shift) & np.uint8(2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(fields, axis=-1).reshape(*packed.shape[:-1], -1)


def pack_on_host(values: UInt8[np.ndarray, "... I"], bits: int) -> UInt8[np.ndarray, "... bytes"]:
    """The inverse of `unpack`; a multiple of 8 values, each below 2^bits."""
    if bits == 3:
        single = np.unpackbits(values[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(single.reshape(*values.shape[:-1], -1), axis=-1, bitorder="little")
    per_byte = 8 // bits
    packed = values[..., ::per_byte].copy()
    for index in range(1, per_byte):
        packed |= values[..., index::per_byte] << np.uint8(index * bits)
    return packed
