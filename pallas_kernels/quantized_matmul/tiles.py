"""The layout in which the CPU kernel reads packed weights: 16 outputs side by side.

A weight [O, I] is O/16 groups. A group is, for each block of 32 inputs, the quants of its 16 outputs, and after all
blocks, again for each block, 16 float16 scales (and 16 float16 minima where the format has them). Quants lie in
vectors of 64 bytes: byte 4r + j of a block's vector q holds input 4q + j of output r. Formats of 4 bits have four
vectors, each with inputs 4q + j in the low nibbles and 16 + 4q + j in the high ones; those of 5 bits have one more,
whose bit q is the fifth bit of vector q; those of 8 bits have eight vectors of q + 128. Groups follow each other, so
the tiles of weights with the same inputs can be concatenated into those of one weight with all their outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, UInt8

BLOCK_LENGTH, GROUP_LENGTH = 32, 16


@dataclass(frozen=True, kw_only=True)
class TileFormat:
    """values: (q - zero) * scale, or q * scale + minimum where has_minimum."""

    name: str
    bits: int
    zero: int
    has_minimum: bool

    @property
    def quant_bytes(self) -> int:
        """Of one block of one group."""
        return GROUP_LENGTH * BLOCK_LENGTH * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of one block of one group, minima included."""
        return GROUP_LENGTH * 2 * (2 if self.has_minimum else 1)


TILE_FORMATS = {
    f.name: f
    for f in (
        TileFormat(name="Q4_0", bits=4, zero=8, has_minimum=False),
        TileFormat(name="Q4_1", bits=4, zero=0, has_minimum=True),
        TileFormat(name="Q5_0", bits=5, zero=16, has_minimum=False),
        TileFormat(name="Q5_1", bits=5, zero=0, has_minimum=True),
        TileFormat(name="Q8_0", bits=8, zero=128, has_minimum=False),
    )
}


def tile_format(name: str) -> TileFormat:
    """Raises ValueError for a format that has no tiles."""
    if name not in TILE_FORMATS:
        raise ValueError(f"the CPU kernel has no {name}; it has {', '.join(TILE_FORMATS)}")
    return TILE_FORMATS[name]


def check_tileable(num_outputs: int, num_inputs: int) -> None:
    """Raises ValueError, with the reason, for shapes the kernel does not take."""
    if num_outputs % GROUP_LENGTH or num_outputs < 1:
        raise ValueError(f"the CPU kernel computes {GROUP_LENGTH} outputs at a time; {num_outputs} is no multiple")
    if num_inputs % BLOCK_LENGTH or num_inputs < 1:
        raise ValueError(f"the CPU kernel reads blocks of {BLOCK_LENGTH} inputs; {num_inputs} is no multiple")


def num_tile_bytes(format_name: str, num_outputs: int, num_inputs: int) -> int:
    """Size of a weight's tiles; the same as in the file."""
    fmt = tile_format(format_name)
    return num_outputs // GROUP_LENGTH * (num_inputs // BLOCK_LENGTH) * (fmt.quant_bytes + fmt.scale_bytes)


def tile(format_name: str, parts: Mapping[str, np.ndarray]) -> UInt8[np.ndarray, " tile_bytes"]:
    """The tiles of a weight given as its packed arrays.

    parts: quants uint8 [O, I/2] with, in each block's 16 bytes, values 0-15 in the low nibbles and 16-31 in the high
    ones (Q8_0: int8 [O, I]); scale float16 [O, I/32]; minimum (Q4_1, Q5_1) as scale; high_bits (Q5_0, Q5_1) uint8
    [O, I/8] with a block's fifth bits in order. Raises ValueError for formats and shapes without tiles.
    """
    fmt = tile_format(format_name)
    quants, scale = np.asarray(parts["quants"]), np.asarray(parts["scale"])
    num_outputs, num_blocks = scale.shape
    check_tileable(num_outputs, num_blocks * BLOCK_LENGTH)
    if fmt.bits == 8:
        quants = quants.view(np.uint8) ^ np.uint8(128)
    # In the nibble formats, byte i of a block holds values i and 16 + i, just as vector i // 4 does.
    fields = [_as_vectors(quants, num_blocks)]
    if fmt.bits == 5:
        fields.append(_high_bit_vector(np.asarray(parts["high_bits"]), num_blocks))
    quant_section = np.concatenate(fields, axis=2).reshape(num_outputs // GROUP_LENGTH, -1)
    names = ("scale", "minimum") if fmt.has_minimum else ("scale",)
    halves = np.stack([_by_block(np.asarray(parts[name], np.float16)) for name in names], axis=2)
    scale_section = halves.view(np.uint8).reshape(num_outputs // GROUP_LENGTH, -1)
    return np.concatenate([quant_section, scale_section], axis=1).reshape(-1)


def untile(
    format_name: str, tiles: UInt8[np.ndarray, " tile_bytes"], num_outputs: int, num_inputs: int
) -> Float32[np.ndarray, "O I"]:
    """The values in a weight's tiles, exactly."""
    fmt = tile_format(format_name)
    num_groups, num_blocks = num_outputs // GROUP_LENGTH, num_inputs // BLOCK_LENGTH
    by_group = np.asarray(tiles).reshape(num_groups, -1)
    section_bytes = num_blocks * fmt.quant_bytes
    vectors = by_group[:, :section_bytes].reshape(num_groups, num_blocks, -1, 64)
    if fmt.bits != 8:
        high = vectors[:, :, 4:]
        vectors = np.concatenate([vectors[:, :, :4] & 15, vectors[:, :, :4] >> 4], axis=2)
        if fmt.bits == 5:
            vectors = vectors | (high >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    quants = vectors.reshape(num_groups, num_blocks, 8, GROUP_LENGTH, 4).transpose(0, 3, 1, 2, 4)
    quants = quants.reshape(num_outputs, num_blocks, BLOCK_LENGTH).astype(np.float32) - np.float32(fmt.zero)
    halves = np.ascontiguousarray(by_group[:, section_bytes:]).view(np.float16)
    halves = halves.reshape(num_groups, num_blocks, -1, GROUP_LENGTH).transpose(2, 0, 3, 1)
    halves = halves.reshape(-1, num_outputs, num_blocks, 1).astype(np.float32)
    values = quants * halves[0] + (halves[1] if fmt.has_minimum else 0)
    return values.reshape(num_outputs, num_inputs)


def _by_block(field: np.ndarray) -> np.ndarray:
    """[O, I/32] -> [groups, blocks, 16], contiguous."""
    return np.ascontiguousarray(field.reshape(-1, GROUP_LENGTH, field.shape[1]).transpose(0, 2, 1))


def _as_vectors(quants: UInt8[np.ndarray, "O values"], num_blocks: int) -> UInt8[np.ndarray, "groups blocks V 64"]:
    """Bytes [O, blocks * 4V] as V vectors a block, four consecutive bytes of each output in turn."""
    quads = quants.reshape(-1, GROUP_LENGTH, num_blocks, quants.shape[1] // num_blocks // 4, 4)
    return quads.transpose(0, 2, 3, 1, 4).reshape(len(quads), num_blocks, -1, 64)


def _high_bit_vector(high_bits: np.ndarray, num_blocks: int) -> UInt8[np.ndarray, "groups blocks 1 64"]:
    """Four bytes of 32 bits a block -> one vector whose bit q belongs to vector q."""
    bits = np.unpackbits(high_bits.reshape(-1, num_blocks, 4), axis=-1, bitorder="little")
    by_vector = _as_vectors(bits.reshape(len(bits), -1), num_blocks)
    return np.packbits(by_vector, axis=2, bitorder="little")
