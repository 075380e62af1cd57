"""The layout in which the CPU kernel reads packed weights: 16 outputs side by side.

A weight [O, I] is ceil(O/16) groups, the last one filled up with zeros. A group has three sections: for each block of
32 inputs the quants of its 16 outputs; for each block the scales; for each span of blocks the scales that these share
(`Scales` says what is where). Groups follow each other, so the tiles of weights with the same inputs, and outputs that
are multiples of 16, can be concatenated into those of one weight with all their outputs.

Quants lie in vectors of 64 bytes: byte 4r + j of a block's vector q holds input 4q + j of output r. Formats of 4 bits
have four vectors, each with inputs 4q + j in the low nibbles and 16 + 4q + j in the high ones; those of 5 bits have one
more, whose bit q is the fifth bit of vector q, and those of 6 bits two, of which the first has two bits each for
vectors 0 to 3; those of 8 bits have eight vectors of q + 128. Formats that are not quantized have for each input its
16 outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float32, UInt8

from pallas_kernels.quantized_matmul import quant_vectors

BLOCK_LENGTH, GROUP_LENGTH = quant_vectors.BLOCK_LENGTH, quant_vectors.GROUP_LENGTH

Scales = Literal["block", "block_minimum", "super_block_minimum", "super_block_halves", "row", "span", "none"]
# Bytes of one group: in the scales of a block, and in those of a span.
_SCALE_BYTES: dict[Scales, tuple[int, int]] = {
    "block": (32, 0),  # float16
    "block_minimum": (64, 0),  # float16 scales, float16 minima
    "super_block_minimum": (32, 64),  # bytes: scales, minima; span: float16 d, float16 -dmin
    "super_block_halves": (32, 32),  # int8: scales of inputs 0 to 15, of 16 to 31; span: float16 d
    "row": (0, 64),  # span: float32
    "span": (0, 48),  # span: float16 scales, the zeros as bytes
    "none": (0, 0),
}


@dataclass(frozen=True, kw_only=True)
class TileFormat:
    """values: (q - zero) * scale, or q * scale + minimum where there are minima."""

    name: str
    bits: int
    zero: int = 0
    scales: Scales
    dtype: str = ""  # of values that are not quantized

    @property
    def is_quantized(self) -> bool:
        return self.scales != "none"

    @property
    def has_minimum(self) -> bool:
        """Also a zero that each span chooses: (q - zero) * scale is q * scale + minimum."""
        return self.scales in ("block_minimum", "super_block_minimum", "span")

    @property
    def num_sums(self) -> int:
        """Words with which a block's products begin: of the whole block, or one for each half."""
        return 2 if self.scales == "super_block_halves" else 1

    @property
    def span_blocks(self) -> int:
        """Blocks that share a scale; 0 for all of the row's, or where each weight has its own `group_length`."""
        return 8 if self.scales.startswith("super_block") else 0

    @property
    def quant_bytes(self) -> int:
        """Of one block of one group."""
        return GROUP_LENGTH * BLOCK_LENGTH * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Of one block of one group, minima included."""
        return _SCALE_BYTES[self.scales][0]

    @property
    def span_bytes(self) -> int:
        """Of one span of one group."""
        return _SCALE_BYTES[self.scales][1]


TILE_FORMATS = {
    f.name: f
    for f in (
        TileFormat(name="Q4_0", bits=4, zero=8, scales="block"),
        TileFormat(name="Q4_1", bits=4, scales="block_minimum"),
        TileFormat(name="Q5_0", bits=5, zero=16, scales="block"),
        TileFormat(name="Q5_1", bits=5, scales="block_minimum"),
        TileFormat(name="Q8_0", bits=8, zero=128, scales="block"),
        TileFormat(name="Q4_K", bits=4, scales="super_block_minimum"),
        TileFormat(name="Q5_K", bits=5, scales="super_block_minimum"),
        TileFormat(name="Q6_K", bits=6, zero=32, scales="super_block_halves"),
        TileFormat(name="INT8", bits=8, zero=128, scales="row"),
        TileFormat(name="INT4", bits=4, scales="span"),
        TileFormat(name="F32", bits=32, scales="none", dtype="float32"),
        TileFormat(name="F16", bits=16, scales="none", dtype="float16"),
        TileFormat(name="BF16", bits=16, scales="none", dtype="bfloat16"),
    )
}
_ANY_LENGTH = ("INT8", "INT4", "F32", "F16", "BF16")  # the others' files have whole blocks only


def tile_format(name: str) -> TileFormat:
    """Raises ValueError for a format that has no tiles."""
    if name not in TILE_FORMATS:
        raise ValueError(f"the CPU kernel has no {name}; it has {', '.join(TILE_FORMATS)}")
    return TILE_FORMATS[name]


def check_tileable(format_name: str, num_outputs: int, num_inputs: int) -> None:
    """Raises ValueError, with the reason, for formats and shapes the kernel does not take."""
    fmt = tile_format(format_name)
    if num_outputs < 1 or num_inputs < 1:
        raise ValueError(f"a weight has outputs and inputs; this one is [{num_outputs}, {num_inputs}]")
    block_length = 1 if format_name in _ANY_LENGTH else BLOCK_LENGTH * max(fmt.span_blocks, 1)
    if num_inputs % block_length:
        raise ValueError(f"{format_name} has blocks of {block_length} inputs; {num_inputs} is no multiple")


def check_group_length(format_name: str, group_length: int | None) -> None:
    """Raises ValueError for a length of groups that the format does not have."""
    if group_length is None:
        return
    if tile_format(format_name).scales != "span":
        raise ValueError(f"{format_name} has no groups of a length to choose; group_length is {group_length}")
    if group_length < 1 or group_length % BLOCK_LENGTH:
        raise ValueError(
            f"groups have a multiple of {BLOCK_LENGTH} inputs, or the whole row (None); not {group_length}"
        )


def num_blocks_of(num_inputs: int) -> int:
    """Blocks of a row; the last may be filled up with zeros."""
    return -(-num_inputs // BLOCK_LENGTH)


def span_blocks_of(fmt: TileFormat, num_inputs: int, group_length: int | None) -> int:
    """Blocks of a span."""
    return (group_length or 0) // BLOCK_LENGTH or fmt.span_blocks or num_blocks_of(num_inputs)


def section_bytes(format_name: str, num_inputs: int, group_length: int | None = None) -> tuple[int, int, int]:
    """Bytes of one group: quants, scales of blocks, scales of spans."""
    fmt, num_blocks = tile_format(format_name), num_blocks_of(num_inputs)
    num_spans = -(-num_blocks // span_blocks_of(fmt, num_inputs, group_length))
    return num_blocks * fmt.quant_bytes, num_blocks * fmt.scale_bytes, num_spans * fmt.span_bytes


def num_tile_bytes(format_name: str, num_outputs: int, num_inputs: int, group_length: int | None = None) -> int:
    """Size of a weight's tiles; the same as in the file for most formats and whole tiles (see `Scales`)."""
    return -(-num_outputs // GROUP_LENGTH) * sum(section_bytes(format_name, num_inputs, group_length))


def tile(
    format_name: str, parts: Mapping[str, np.ndarray], group_length: int | None = None
) -> UInt8[np.ndarray, " tile_bytes"]:
    """The tiles of a weight given as its packed arrays.

    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: quants uint8 [O, I/2] with, in each block's 16 bytes, values 0-15 in the low nibbles
    and 16-31 in the high ones (Q8_0: int8 [O, I]); scale float16 [O, I/32]; minimum (Q4_1, Q5_1) as scale; high_bits
    (Q5_0, Q5_1) uint8 [O, I/8] with a block's fifth bits in order.
    Q4_K, Q5_K: quants uint8 [O, I/2] and high_bits (Q5_K) uint8 [O, I/8] as in the file; scales and mins uint8
    [O, I/32], d and dmin float16 [O, I/256]. Q6_K: low uint8 [O, I/2] and high uint8 [O, I/4] as in the file, scales
    int8 [O, I/16], d float16 [O, I/256].
    INT8: quants int8 [O, I], scale float32 or float16 [O]. INT4: quants uint8 [O, I], each 0 to 15; scale float16 and
    zero uint8 [O, groups], for groups of `group_length` inputs or, if None, the whole row. F32, F16, BF16: array
    [O, I].
    Raises ValueError for formats and shapes without tiles.
    """
    fmt = tile_format(format_name)
    check_group_length(format_name, group_length)
    arrays = {name: np.asarray(value) for name, value in parts.items()}
    num_outputs, num_inputs = _shape_of(fmt, arrays)
    check_tileable(format_name, num_outputs, num_inputs)
    if num_outputs % GROUP_LENGTH:
        missing = -num_outputs % GROUP_LENGTH
        arrays = {n: np.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1)) for n, a in arrays.items()}
    num_groups = -(-num_outputs // GROUP_LENGTH)
    sections = [
        quant_vectors.pack(fmt.name, fmt.bits, arrays, num_blocks_of(num_inputs)),
        *_scale_sections(fmt, arrays),
    ]
    in_bytes = [np.ascontiguousarray(section).view(np.uint8).reshape(num_groups, -1) for section in sections]
    tiles = np.concatenate(in_bytes, axis=1).reshape(-1)
    expected = num_tile_bytes(format_name, num_outputs, num_inputs, group_length)
    if tiles.size != expected:
        shapes = ", ".join(f"{name} {list(a.shape)}" for name, a in arrays.items())
        raise ValueError(f"{shapes} are no {format_name} weight in groups of {group_length or num_inputs}")
    return tiles


def untile(
    format_name: str,
    tiles: UInt8[np.ndarray, " tile_bytes"],
    num_outputs: int,
    num_inputs: int,
    group_length: int | None = None,
) -> Float32[np.ndarray, "O I"]:
    """The values in a weight's tiles, exactly."""
    fmt, num_blocks = tile_format(format_name), num_blocks_of(num_inputs)
    num_groups = -(-num_outputs // GROUP_LENGTH)
    by_group = np.asarray(tiles).reshape(num_groups, -1)
    ends = np.cumsum(section_bytes(format_name, num_inputs, group_length))
    quants, scales, spans = (np.ascontiguousarray(part) for part in np.split(by_group, ends[:2], axis=1))
    if not fmt.is_quantized:
        values = quants.view(np.dtype(getattr(ml_dtypes, fmt.dtype, fmt.dtype))).astype(np.float32)
        values = values.reshape(num_groups, -1, GROUP_LENGTH).transpose(0, 2, 1)
    else:
        whole = quant_vectors.unpack(fmt.bits, quants, num_blocks).astype(np.float32) - np.float32(fmt.zero)
        span_blocks = span_blocks_of(fmt, num_inputs, group_length)
        scale, minimum = _read_scales(fmt, scales, spans, num_blocks, span_blocks)
        values = whole.reshape(*scale.shape, -1) * scale[..., None]
        if minimum is not None:
            values = values + minimum[..., None]
    return values.reshape(num_groups * GROUP_LENGTH, num_blocks * BLOCK_LENGTH)[:num_outputs, :num_inputs]


def _shape_of(fmt: TileFormat, arrays: Mapping[str, np.ndarray]) -> tuple[int, int]:
    """[O, I] of a weight's packed arrays."""
    array = arrays["low" if fmt.name == "Q6_K" else "quants" if fmt.is_quantized else "array"]
    values_per_item = 2 if fmt.is_quantized and fmt.bits != 8 and fmt.scales != "span" else 1
    return array.shape[0], array.shape[1] * values_per_item


def _by_block(field: np.ndarray) -> np.ndarray:
    """[O, blocks] -> [groups, blocks, 16]."""
    return field.reshape(-1, GROUP_LENGTH, field.shape[1]).transpose(0, 2, 1)


def _side_by_side(*fields: np.ndarray) -> np.ndarray:
    """Of each [O, n], in bytes: 16 outputs of the first, then of the next."""
    in_bytes = [np.ascontiguousarray(_by_block(field)).view(np.uint8) for field in fields]
    return np.concatenate(in_bytes, axis=2).reshape(len(in_bytes[0]), -1)


def _scale_sections(fmt: TileFormat, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The scales of blocks and of spans, of each group its bytes."""
    half = {name: arrays[name].astype(np.float16) for name in ("minimum", "d", "dmin") if name in arrays}
    writers: dict[Scales, Callable[[], list[np.ndarray]]] = {
        "block": lambda: [_side_by_side(arrays["scale"].astype(np.float16))],
        "block_minimum": lambda: [_side_by_side(arrays["scale"].astype(np.float16), half["minimum"])],
        "super_block_minimum": lambda: [
            _side_by_side(arrays["scales"], arrays["mins"]),
            _side_by_side(half["d"], -half["dmin"]),
        ],
        "super_block_halves": lambda: [
            _side_by_side(arrays["scales"][:, ::2], arrays["scales"][:, 1::2]),
            _side_by_side(half["d"]),
        ],
        "row": lambda: [_side_by_side(arrays["scale"].astype(np.float32)[:, None])],
        "span": lambda: [_side_by_side(arrays["scale"].astype(np.float16), arrays["zero"].astype(np.uint8))],
        "none": lambda: [],
    }
    return writers[fmt.scales]()


def _read_scales(
    fmt: TileFormat, scales: np.ndarray, spans: np.ndarray, num_blocks: int, span_blocks: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """float32 [groups, 16, parts of a row]: scales, and minima where there are some."""

    def read(section: np.ndarray, dtype: type, start: int, stride: int) -> np.ndarray:
        size = GROUP_LENGTH * np.dtype(dtype).itemsize
        field = section.reshape(len(section), -1, stride)[:, :, start : start + size]
        return np.ascontiguousarray(field).view(dtype).astype(np.float32).transpose(0, 2, 1)

    def for_blocks(of_spans: np.ndarray) -> np.ndarray:
        return np.repeat(of_spans, span_blocks, axis=2)[:, :, :num_blocks]

    match fmt.scales:
        case "block":
            return read(scales, np.float16, 0, 32), None
        case "block_minimum":
            return read(scales, np.float16, 0, 64), read(scales, np.float16, 32, 64)
        case "super_block_minimum":
            d, dmin = (for_blocks(read(spans, np.float16, start, 64)) for start in (0, 32))
            return d * read(scales, np.uint8, 0, 32), dmin * read(scales, np.uint8, 16, 32)
        case "super_block_halves":
            d = for_blocks(read(spans, np.float16, 0, 32))
            halves = np.stack([d * read(scales, np.int8, start, 32) for start in (0, 16)], axis=3)
            return halves.reshape(*d.shape[:2], -1), None
        case "row":
            return for_blocks(read(spans, np.float32, 0, 64)), None
        case _:
            scale = for_blocks(read(spans, np.float16, 0, 48))
            return scale, -scale * for_blocks(read(spans, np.uint8, 32, 48))
