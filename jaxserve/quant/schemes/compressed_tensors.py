"""compressed-tensors: whole numbers packed in 32-bit words or as int8, float8, NVFP4 and MXFP4, by groups of modules.

All of them keep the outputs first. Packed whole numbers are stored plus 2^(bits - 1), their zero points too, these
packed along the outputs. With actorder "group" weight_g_idx says which group each input is in. Values are those of
compressed-tensors' own decompress() in float32.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import UInt8

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.load import WeightSource
from jaxserve.quant import bit_streams, nvfp4
from jaxserve.quant.float8 import Float8
from jaxserve.quant.grouped_int import GroupedInt, in_group_order
from jaxserve.quant.mxfp4 import MXFP4Weight
from jaxserve.quant.nvfp4 import NVFP4Weight
from jaxserve.quant.quantized import Weight
from jaxserve.quant.schemes import mxfp4
from jaxserve.quant.schemes.compressed_groups import Group, activation_notes, group_of, read_groups
from jaxserve.quant.schemes.fp8 import FLOAT8, for_outputs
from jaxserve.quant.schemes.gptq import as_bytes, check_groups
from jaxserve.quant.schemes.scheme import FLOATS, blocks_in, module_of, read_number, read_part, unread_beside


@dataclass(frozen=True, kw_only=True)
class CompressedTensors:
    """The groups of modules and, in `names`, what the file has."""

    groups: tuple[Group, ...]
    names: Collection[str]
    notes: tuple[str, ...]
    name: str = "compressed-tensors"

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        module = module_of(name)
        is_quantized = any(f"{module}.{leaf}" in self.names for leaf in ("weight_packed", "weight_scale"))
        if len(shape) != 2 or not is_quantized:
            return None
        group = group_of(module, self.groups)
        _check_shape(name, shape, group)
        leaves = {"weight_scale": _scale_shape(group, shape)}
        match group.storage:
            case "packed":
                leaves |= {"weight_packed": (shape[0], blocks_in(shape[1] * group.bits, 32)), "weight_shape": (2,)}
            case "nvfp4":
                leaves |= {"weight_packed": (shape[0], shape[1] // 2), "weight_global_scale": (1,)}
            case "mxfp4":
                leaves |= {"weight_packed": (shape[0], shape[1] // 2)}
            case _:
                leaves |= {"weight": shape}
        if not group.is_symmetric:
            leaves |= {"weight_zero_point": _zero_shape(group, shape)}
        if group.has_order:
            leaves |= {"weight_g_idx": (shape[1],)}
        return {f"{module}.{leaf}": leaf_shape for leaf, leaf_shape in leaves.items()}

    def optional(self, name: str, shape: tuple[int, ...]) -> set[str]:
        module = module_of(name)
        return unread_beside(module) | {f"{module}.weight_zero_point", f"{module}.weight_g_idx"}

    def format_of(self, source: WeightSource, name: str) -> str:
        module = module_of(name)
        group = group_of(module, self.groups)
        match group.storage:
            case "packed" | "int8":
                return f"INT{group.bits}"
            case "float8":
                return source.info(f"{module}.weight").format
            case storage:
                return storage.upper()

    def read(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> Weight:
        tensors = self.tensors(name, shape)
        if tensors is None:
            raise CheckpointError(f"{source.path}: has no compressed-tensors weight for {name!r}")
        module = module_of(name)

        def part(leaf: str, *formats: str) -> np.ndarray:
            return read_part(source, f"{module}.{leaf}", tensors[f"{module}.{leaf}"], formats)

        group = group_of(module, self.groups)
        match group.storage:
            case "packed" | "int8":
                return _grouped_int(source, name, shape, group, part)
            case "float8":
                quants, scale = part("weight", *FLOAT8), _row_scale(group, part("weight_scale", *FLOATS), shape)
                return Float8(quants=quants, scale=scale, run_length=_run_length(group, shape))
            case "nvfp4":
                whole = np.float32(read_number(source, f"{module}.weight_global_scale"))
                quants, scale = part("weight_packed", "U8"), part("weight_scale", "F8_E4M3")
                return NVFP4Weight(quants=quants, scale=scale, global_scale=np.full(shape[0], whole, np.float32))
            case _:
                quants, exponents = part("weight_packed", "U8"), part("weight_scale", "U8", "F8_E8M0")
                return MXFP4Weight(quants=mxfp4.in_gguf_order(quants), exponents=exponents.view(np.uint8))


def compressed_tensors_scheme(config: Mapping[str, Any], names: Collection[str]) -> CompressedTensors:
    """Raises CheckpointError, UnsupportedCheckpoint for variants."""
    return CompressedTensors(groups=read_groups(config), names=names, notes=activation_notes(config))


def _check_shape(name: str, shape: tuple[int, ...], group: Group) -> None:
    """Raises UnsupportedCheckpoint for rows that do not fill what the format packs."""
    lengths = {"packed": 8, "nvfp4": nvfp4.GROUP_LENGTH, "mxfp4": mxfp4.BLOCK_LENGTH}
    length = lengths.get(group.storage, 1)
    if shape[1] % length:
        raise UnsupportedCheckpoint(f"{name}: rows of {shape[1]} inputs; this version reads multiples of {length}")
    if group.storage in ("nvfp4", "mxfp4") and group.block[1] != length:
        raise UnsupportedCheckpoint(f"{name}: group_size is {group.block[1]}; {group.storage} has groups of {length}")


def _run_length(group: Group, shape: tuple[int, ...]) -> int:
    """Inputs that share a scale."""
    return min(group.block[1] or shape[1], shape[1])


def _scale_shape(group: Group, shape: tuple[int, ...]) -> tuple[int, ...]:
    if group.block == (None, None):
        return (1,)
    return blocks_in(shape[0], group.block[0] or shape[0]), blocks_in(shape[1], group.block[1] or shape[1])


def _zero_shape(group: Group, shape: tuple[int, ...]) -> tuple[int, ...]:
    scale_shape = _scale_shape(group, shape)
    return (blocks_in(shape[0] * group.bits, 32), scale_shape[1]) if group.storage == "packed" else scale_shape


def _row_scale(group: Group, per_block: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A scale, or a zero, for each output and run of inputs."""
    if per_block.shape[0] == shape[0] and group.block[0] == 1:
        return per_block
    return for_outputs(per_block.reshape(-1, per_block.shape[-1]), group.block[0] or shape[0], shape[0])


def _grouped_int(
    source: WeightSource, name: str, shape: tuple[int, ...], group: Group, part: Callable[..., np.ndarray]
) -> GroupedInt:
    if group.storage == "packed":
        _check_stored_shape(source, name, part("weight_shape", "I64", "I32"), shape)
        quants = as_bytes(part("weight_packed", "I32"))[:, : shape[1] * group.bits // 8]
    else:
        quants = part("weight", "I8").view(np.uint8) ^ np.uint8(128)
    order = None
    if group.has_order:
        g_idx = part("weight_g_idx", "I32", "I64")
        check_groups(source, f"{module_of(name)}.weight_g_idx", g_idx, _run_length(group, shape))
        quants, order = in_group_order(quants, group.bits, g_idx)
    return GroupedInt(
        quants=quants,
        scale=_row_scale(group, part("weight_scale", *FLOATS), shape),
        zero=None if group.is_symmetric else _zeros(group, part, shape),
        input_order=order,
        bits=group.bits,
        group_length=_run_length(group, shape),
    )


def _zeros(group: Group, part: Callable[..., np.ndarray], shape: tuple[int, ...]) -> UInt8[np.ndarray, "O groups"]:
    if group.storage == "packed":
        words = part("weight_zero_point", "I32").T
        return np.ascontiguousarray(bit_streams.unpack_on_host(as_bytes(words), group.bits)[:, : shape[0]].T)
    return _row_scale(group, part("weight_zero_point", "I8").view(np.uint8) ^ np.uint8(128), shape)


def _check_stored_shape(source: WeightSource, name: str, stored: np.ndarray, shape: tuple[int, ...]) -> None:
    if tuple(stored.tolist()) != shape:
        module = module_of(name)
        raise CheckpointError(f"{source.path}: tensor '{module}.weight_shape' is {stored.tolist()}, not {list(shape)}")
