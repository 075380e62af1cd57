"""mxfp4, as gpt-oss has it: the experts' matrices in blocks of 32 four-bit floats with a power of two as scale.

`<name>_blocks` is [E, O, I/32, 16] with low nibbles first, `<name>_scales` [E, O, I/32] exponents plus 127. Held in
GGUF's order of nibbles, so that there is one format of this name.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from jaxserve.quant.mxfp4 import MXFP4Weight
from jaxserve.quant.schemes.scheme import read_part

BLOCK_LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class MXFP4:
    """Matrices with experts in front; everything else of the file is as it is."""

    names: Collection[str]
    name: str = "mxfp4"
    notes: tuple[str, ...] = ()

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if len(shape) < 2 or (blocks not in self.names and scales not in self.names):
            return None
        if shape[-1] % BLOCK_LENGTH:
            raise CheckpointError(f"{name}: rows of {shape[-1]} inputs are not whole MXFP4 blocks of {BLOCK_LENGTH}")
        in_blocks = (*shape[:-1], shape[-1] // BLOCK_LENGTH)
        return {blocks: (*in_blocks, BLOCK_LENGTH // 2), scales: in_blocks}

    def optional(self, name: str, shape: tuple[int, ...]) -> set[str]:
        return set()

    def format_of(self, source: WeightSource, name: str) -> str:
        return "MXFP4"

    def read(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> MXFP4Weight:
        tensors = self.tensors(name, shape)
        if tensors is None:
            raise CheckpointError(f"{source.path}: has no MXFP4 tensors for {name!r}")
        pairs, exponents = (read_part(source, part, part_shape, ("U8",)) for part, part_shape in tensors.items())
        return MXFP4Weight(quants=in_gguf_order(pairs.reshape(*shape[:-1], -1)), exponents=exponents)


def mxfp4_scheme(config: Mapping[str, Any], names: Collection[str]) -> MXFP4:
    return MXFP4(names=names)


def in_gguf_order(pairs: UInt8[np.ndarray, "... half"]) -> UInt8[np.ndarray, "... half"]:
    """Blocks of neighbours in a byte -> values 0 to 15 in a block's low nibbles and 16 to 31 in its high ones."""
    in_blocks = pairs.reshape(*pairs.shape[:-1], -1, 16)
    first, second = in_blocks[..., :8], in_blocks[..., 8:]
    out = np.empty_like(in_blocks)
    out[..., ::2] = (first & 15) | (second << 4)
    out[..., 1::2] = (first >> 4) | (second & 0xF0)
    return out.reshape(pairs.shape)
