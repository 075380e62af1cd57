"""GPTQ: whole numbers of 2, 3, 4 or 8 bits with a float16 scale and a zero for each group of inputs.

qweight packs along the inputs, qzeros along the outputs, both as streams of bits in 32-bit words; scales are
[groups, O]. Version 1 stores zeros less one, version 2 ("gptq_v2") as they are. With desc_act the groups are of inputs
in order of importance, and g_idx says which group each is in. (GPTQModel's unpacking.)
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from jaxserve.quant import bit_streams
from jaxserve.quant.grouped_int import GroupedInt, in_group_order
from jaxserve.quant.schemes import settings
from jaxserve.quant.schemes.scheme import FLOATS, blocks_in, module_of, read_part, unread_beside

_PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """group_length None: the row. zeros_less_one: version 1 of the format."""

    bits: int
    group_length: int | None
    desc_act: bool
    zeros_less_one: bool
    names: Collection[str]
    name: str = "gptq"
    notes: tuple[str, ...] = ()

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        module = module_of(name)
        if len(shape) != 2 or not any(f"{module}.{part}" in self.names for part in _PARTS):
            return None
        num_outputs, num_inputs = shape
        num_groups = blocks_in(num_inputs, self.group_length or num_inputs)
        if num_inputs * self.bits % 32 or num_outputs * self.bits % 32:
            raise CheckpointError(f"{name}: {list(shape)} with {self.bits} bits does not fill GPTQ's words of 32 bits")
        return {
            f"{module}.qweight": (num_inputs * self.bits // 32, num_outputs),
            f"{module}.qzeros": (num_groups, num_outputs * self.bits // 32),
            f"{module}.scales": (num_groups, num_outputs),
        }

    def optional(self, name: str, shape: tuple[int, ...]) -> set[str]:
        module = module_of(name)
        return {f"{module}.g_idx", *unread_beside(module)}

    def format_of(self, source: WeightSource, name: str) -> str:
        return f"INT{self.bits}"

    def read(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedInt:
        tensors = self.tensors(name, shape)
        if tensors is None:
            raise CheckpointError(f"{source.path}: has no GPTQ tensors for {name!r}")
        words, zero_words, scale = (
            read_part(source, part, part_shape, formats)
            for (part, part_shape), formats in zip(tensors.items(), (("I32",), ("I32",), FLOATS), strict=True)
        )
        quants, order = as_bytes(words.T), None
        group_of_input = self._group_of_input(source, name, shape[1])
        if group_of_input is not None:
            quants, order = in_group_order(quants, self.bits, group_of_input)
        zero = bit_streams.unpack_on_host(as_bytes(zero_words), self.bits)
        if self.zeros_less_one:
            zero = zero.astype(np.uint16 if self.bits == 8 else np.uint8) + np.uint8(1)
        return GroupedInt(
            quants=quants,
            scale=np.ascontiguousarray(scale.T),
            zero=np.ascontiguousarray(zero.T),
            input_order=order,
            bits=self.bits,
            group_length=min(self.group_length or shape[1], shape[1]),
        )

    def _group_of_input(self, source: WeightSource, name: str, num_inputs: int) -> Int32[np.ndarray, " I"] | None:
        """g_idx where groups are not of neighbours. Raises CheckpointError if it contradicts the configuration."""
        g_idx, length = f"{module_of(name)}.g_idx", self.group_length
        is_there = g_idx in source.names()
        if length is None or length >= num_inputs or not (is_there or self.desc_act):
            return None
        group_of_input = read_part(source, g_idx, (num_inputs,), ("I32",))
        check_groups(source, g_idx, group_of_input, length)
        if self.desc_act:
            return group_of_input
        if not (group_of_input == np.arange(num_inputs) // length).all():
            raise CheckpointError(f"{source.path}: tensor {g_idx!r} reorders the inputs, but desc_act is false")
        return None


def gptq_scheme(config: Mapping[str, Any], names: Collection[str]) -> GPTQ:
    """Raises CheckpointError, UnsupportedCheckpoint for variants."""
    settings.refuse(config, "is_marlin_format")
    settings.one_of(config, "pack_dtype", ("int32",), "int32")
    file_format = {"checkpoint_format": config.get("checkpoint_format") or config.get("format")}
    version = settings.one_of(file_format, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    overrides = settings.table(config.get("dynamic"), "dynamic")  # "-:" excludes modules, which the file shows
    settings.refuse({"dynamic": [rule for rule in overrides if not rule.startswith("-:")]}, "dynamic")
    return GPTQ(
        bits=settings.one_of(config, "bits", (2, 3, 4, 8), None),
        group_length=settings.group_length(config, -1),
        desc_act=settings.one_of(config, "desc_act", (False, True), False),
        zeros_less_one=version == "gptq",
        names=names,
    )


def as_bytes(words: Int32[np.ndarray, "R words"]) -> UInt8[np.ndarray, "R bytes"]:
    """32-bit words, little-endian, as the bytes of each row."""
    return np.ascontiguousarray(words).view(np.uint8)


def check_groups(source: WeightSource, name: str, group_of_input: Shaped[np.ndarray, " I"], length: int) -> None:
    """Raises CheckpointError unless every group has `length` inputs, the last one the rest."""
    num_groups = blocks_in(len(group_of_input), length)
    if group_of_input.min() < 0 or group_of_input.max() >= num_groups:
        raise CheckpointError(f"{source.path}: tensor {name!r}: groups are 0 to {num_groups - 1}, and it has others")
    expected = np.full(num_groups, length)
    expected[-1] = len(group_of_input) - length * (num_groups - 1)
    if not (np.bincount(group_of_input, minlength=num_groups) == expected).all():
        raise CheckpointError(f"{source.path}: tensor {name!r}: its groups are not of {length} inputs each")
