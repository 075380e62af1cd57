"""Quants of weights to and from the vectors in which the CPU kernel reads them (see tiles.py), on the host."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

BLOCK_LENGTH, GROUP_LENGTH = 32, 16


def pack(format_name: str, bits: int, arrays: Mapping[str, np.ndarray], num_blocks: int) -> np.ndarray:
    """The section of quants, for each group its bytes, of a weight's arrays as `tiles.tile` takes them."""
    if bits in (16, 32):
        array = _whole_blocks(arrays["array"], num_blocks).view(np.uint16 if bits == 16 else np.uint32)
        return array.reshape(-1, GROUP_LENGTH, array.shape[1]).transpose(0, 2, 1)
    if bits == 8:
        return _as_vectors(_whole_blocks(arrays["quants"], num_blocks).view(np.uint8) ^ np.uint8(128), num_blocks)
    if format_name == "INT4":
        return _as_vectors(_nibbles(_whole_blocks(arrays["quants"], num_blocks)), num_blocks)
    if format_name == "Q6_K":
        values = _values_of_q6_k(arrays["low"], arrays["high"])
        high = _as_vectors(values >> 4, num_blocks).reshape(-1, num_blocks, 2, 4, 64)
        pairs = np.bitwise_or.reduce(high << (2 * np.arange(4, dtype=np.uint8))[:, None], axis=3)
        return np.concatenate([_as_vectors(_nibbles(values & 15), num_blocks), pairs], axis=2)
    quants, high_bits = arrays["quants"], arrays.get("high_bits")
    if format_name.endswith("_K"):
        quants = _nibbles_of_super_blocks(quants)
        high_bits = None if high_bits is None else _high_bits_of_super_blocks(high_bits)
    # Byte i of a block holds values i and 16 + i, just as vector i // 4 does.
    vectors = _as_vectors(quants, num_blocks)
    return vectors if high_bits is None else np.concatenate([vectors, _fifth_bits(high_bits, num_blocks)], axis=2)


def unpack(bits: int, section: UInt8[np.ndarray, "groups bytes"], num_blocks: int) -> UInt8[np.ndarray, "O values"]:
    """The quants of formats of 4 to 8 bits, one a byte."""
    vectors = section.reshape(len(section), num_blocks, -1, 64)
    if bits != 8:
        high = vectors[:, :, 4:]
        vectors = np.concatenate([vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4], axis=2)
        if bits == 5:
            vectors = vectors | (high >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
        if bits == 6:
            pairs = high[:, :, :, None] >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
            vectors = vectors | pairs.reshape(vectors.shape) << 4
    quads = vectors.reshape(len(section), num_blocks, 8, GROUP_LENGTH, 4).transpose(0, 3, 1, 2, 4)
    return quads.reshape(len(section) * GROUP_LENGTH, -1)


def _whole_blocks(array: np.ndarray, num_blocks: int) -> np.ndarray:
    """Zeros for the inputs that are missing in the last block; the array itself where none are."""
    missing = num_blocks * BLOCK_LENGTH - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing))) if missing else np.ascontiguousarray(array)


def _as_vectors(quants: UInt8[np.ndarray, "O values"], num_blocks: int) -> UInt8[np.ndarray, "groups blocks V 64"]:
    """Bytes [O, blocks * 4V] as V vectors a block, four consecutive bytes of each output in turn."""
    quads = quants.reshape(-1, GROUP_LENGTH, num_blocks, quants.shape[1] // num_blocks // 4, 4)
    return quads.transpose(0, 2, 3, 1, 4).reshape(len(quads), num_blocks, -1, 64)


def _nibbles(values: UInt8[np.ndarray, "O I"]) -> UInt8[np.ndarray, "O bytes"]:
    """Values i and 16 + i of each block in one byte."""
    halves = values.reshape(len(values), -1, 2, BLOCK_LENGTH // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(len(values), -1)


def _fifth_bits(high_bits: np.ndarray, num_blocks: int) -> UInt8[np.ndarray, "groups blocks 1 64"]:
    """Four bytes of 32 bits a block -> one vector whose bit q belongs to vector q."""
    bits = np.unpackbits(high_bits.reshape(-1, num_blocks, 4), axis=-1, bitorder="little")
    by_vector = _as_vectors(bits.reshape(len(bits), -1), num_blocks)
    return np.packbits(by_vector, axis=2, bitorder="little")


def _nibbles_of_super_blocks(quants: UInt8[np.ndarray, "O bytes"]) -> UInt8[np.ndarray, "O bytes"]:
    """From 32 bytes with a block in the low nibbles and the next in the high ones to two blocks of 16 bytes."""
    pairs = quants.reshape(len(quants), -1, 2, 16)
    first, second = pairs[:, :, 0], pairs[:, :, 1]
    blocks = np.stack([first & 15 | second << 4, first >> 4 | second & 0xF0], axis=2)
    return blocks.reshape(quants.shape)


def _high_bits_of_super_blocks(high_bits: UInt8[np.ndarray, "O bytes"]) -> UInt8[np.ndarray, "O bytes"]:
    """From 32 bytes whose bit s belongs to block s to eight blocks of 32 bits in order."""
    bits = np.unpackbits(high_bits.reshape(-1, 32, 1), axis=2, bitorder="little")
    return np.packbits(bits.transpose(0, 2, 1), axis=2, bitorder="little").reshape(high_bits.shape)


def _values_of_q6_k(low: UInt8[np.ndarray, "O low"], high: UInt8[np.ndarray, "O high"]) -> UInt8[np.ndarray, "O I"]:
    """One value a byte. Of 128 values, 64 bytes hold the low four bits and 32 bytes the high two."""
    nibbles = low.reshape(len(low), -1, 1, 64)
    nibbles = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).reshape(len(low), -1, 4, 32)
    pairs = high.reshape(len(low), -1, 1, 32) >> (2 * np.arange(4, dtype=np.uint8))[:, None] & 3
    return (nibbles | pairs << 4).reshape(len(low), -1)
