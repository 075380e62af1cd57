"""How one tensor lies in a file, whatever the container: its name, format, shape and bytes.

Knows the block sizes of every tensor type that GGUF names, so that any sound file can be listed. Which of them can be
computed with is decided above this package.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file. `shape` is row-major (a GGUF's dimensions reversed); `offset` is from the file's start."""

    name: str
    shape: tuple[int, ...]
    format: str
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class HostTensor:
    """A tensor as it lies in the file, on the host, nothing expanded.

    A block format ("Q4_1") has uint8 `data` of shape [rows..., bytes_per_row]; a plain format ("F32", "F16", "BF16",
    "I32", ...) has `data` of its own dtype and of `shape`.
    """

    name: str
    data: np.ndarray[Any, np.dtype[Any]]
    format: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BlockSize:
    """`num_elements` consecutive values of a row are stored in `num_bytes` bytes."""

    num_elements: int
    num_bytes: int

    def row_bytes(self, row_length: int) -> int:
        """Bytes of one row; the row must hold whole blocks (the caller checks)."""
        return row_length // self.num_elements * self.num_bytes


GGUF_TYPE_NAMES: dict[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# Numbers that GGUF once gave out and took back; a file with them is old, not damaged.
GGUF_REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip

BLOCK_SIZES: dict[str, BlockSize] = {
    name: BlockSize(num_elements=num_elements, num_bytes=num_bytes)
    for name, num_elements, num_bytes in (
        ("F64", 1, 8), ("F32", 1, 4), ("F16", 1, 2), ("BF16", 1, 2), ("I64", 1, 8), ("I32", 1, 4), ("I16", 1, 2),
        ("I8", 1, 1), ("Q4_0", 32, 18), ("Q4_1", 32, 20), ("Q5_0", 32, 22), ("Q5_1", 32, 24), ("Q8_0", 32, 34),
        ("Q8_1", 32, 40), ("Q2_K", 256, 84), ("Q3_K", 256, 110), ("Q4_K", 256, 144), ("Q5_K", 256, 176),
        ("Q6_K", 256, 210), ("Q8_K", 256, 292), ("IQ1_S", 256, 50), ("IQ1_M", 256, 56), ("IQ2_XXS", 256, 66),
        ("IQ2_XS", 256, 74), ("IQ2_S", 256, 82), ("IQ3_XXS", 256, 98), ("IQ3_S", 256, 110), ("IQ4_NL", 32, 18),
        ("IQ4_XS", 256, 136), ("TQ1_0", 256, 54), ("TQ2_0", 256, 66), ("MXFP4", 32, 17), ("NVFP4", 64, 36),
        ("Q1_0", 128, 18),
    )
}  # fmt: skip
