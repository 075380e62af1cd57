"""AWQ, version "gemm": whole numbers of 4 bits with a float16 scale and a zero for each group of inputs.

qweight [I, O/8] and qzeros [groups, O/8] pack along the outputs: nibble i of a word holds column COLUMNS[i] of its 8.
Zeros are stored as they are. (AutoAWQ's dequantize_gemm.)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from jaxserve.quant.grouped_int import GroupedInt
from jaxserve.quant.schemes import settings
from jaxserve.quant.schemes.scheme import FLOATS, blocks_in, module_of, read_part, unread_beside

COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, kw_only=True)
class AWQ:
    """group_length None: the row."""

    group_length: int | None
    names: Collection[str]
    name: str = "awq"
    notes: tuple[str, ...] = ()

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        module = module_of(name)
        if len(shape) != 2 or not any(f"{module}.{part}" in self.names for part in _PARTS):
            return None
        num_outputs, num_inputs = shape
        if num_outputs % 8 or num_inputs % 8:
            raise CheckpointError(f"{name}: {list(shape)} does not fill AWQ's words of 8 outputs")
        num_groups = blocks_in(num_inputs, self.group_length or num_inputs)
        return {
            f"{module}.qweight": (num_inputs, num_outputs // 8),
            f"{module}.qzeros": (num_groups, num_outputs // 8),
            f"{module}.scales": (num_groups, num_outputs),
        }

    def optional(self, name: str, shape: tuple[int, ...]) -> set[str]:
        return unread_beside(module_of(name))

    def format_of(self, source: WeightSource, name: str) -> str:
        return "INT4"

    def read(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedInt:
        tensors = self.tensors(name, shape)
        if tensors is None:
            raise CheckpointError(f"{source.path}: has no AWQ tensors for {name!r}")
        words, zero_words, scale = (
            read_part(source, part, part_shape, formats)
            for (part, part_shape), formats in zip(tensors.items(), (("I32",), ("I32",), FLOATS), strict=True)
        )
        return GroupedInt(
            quants=_pairs_of_inputs(words),
            scale=np.ascontiguousarray(scale.T),
            zero=_unpacked(zero_words),
            bits=4,
            group_length=min(self.group_length or shape[1], shape[1]),
        )


def awq_scheme(config: Mapping[str, Any], names: Collection[str]) -> AWQ:
    """Raises CheckpointError, UnsupportedCheckpoint for variants."""
    version = config.get("version")
    lowered = {**config, "version": version.lower() if isinstance(version, str) else version}
    settings.one_of(lowered, "version", ("gemm",), "gemm")
    settings.one_of(config, "bits", (4,), 4)
    settings.one_of(config, "zero_point", (True,), True)
    settings.one_of(config, "backend", ("autoawq",), "autoawq")
    return AWQ(group_length=settings.group_length(config, 128), names=names)


def _unpacked(words: Int32[np.ndarray, "I words"]) -> UInt8[np.ndarray, "O I"]:
    """A byte for each value, the outputs first."""
    shifts = 4 * np.argsort(COLUMNS)  # of each column
    columns = words[:, :, None] >> shifts & 15
    return np.ascontiguousarray(columns.astype(np.uint8).reshape(len(words), -1).T)


def _pairs_of_inputs(words: Int32[np.ndarray, "I words"]) -> UInt8[np.ndarray, "O half"]:
    """The nibbles in the order of `bit_streams`, the outputs first. Goes a column at a time: nothing is expanded."""
    num_inputs, num_words = words.shape
    out = np.empty((num_words, 8, num_inputs // 2), np.uint8)
    unsigned = words.view(np.uint32)
    for nibble, column in enumerate(COLUMNS):
        values = (unsigned >> np.uint32(4 * nibble) & np.uint32(15)).astype(np.uint8)
        out[:, column] = (values[::2] | values[1::2] << np.uint8(4)).T
    return out.reshape(num_words * 8, num_inputs // 2)
