"""fp8: float8 matrices with a float32 scale for each block of 128 x 128 values (DeepSeek-V3), or one for the matrix.

Value: weight * weight_scale_inv[o // 128, i // 128], whatever its name says. The last blocks may not be full: the grid
is the shape over 128, rounded up.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from checkpoints.errors import CheckpointError
from checkpoints.load import WeightSource
from jaxserve.quant.float8 import Float8
from jaxserve.quant.schemes import settings
from jaxserve.quant.schemes.scheme import FLOATS, blocks_in, module_of, read_number, read_part, unread_beside

FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALE_FORMATS = (*FLOATS, "F8_E8M0")
_SCALE_NAMES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, kw_only=True)
class FP8:
    """block is outputs and inputs that share a scale; None: all of the matrix, or each output."""

    block: tuple[int, int] | None
    names: Collection[str]
    notes: tuple[str, ...]
    name: str = "fp8"

    def tensors(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]] | None:
        scale = self._scale_of(name)
        if len(shape) != 2 or scale is None:
            return None
        return {name: shape} if self.block is None else {name: shape, scale: scale_grid(shape, self.block)}

    def optional(self, name: str, shape: tuple[int, ...]) -> set[str]:
        scale = self._scale_of(name)
        return unread_beside(module_of(name)) | ({scale} if scale and self.block is None else set())

    def format_of(self, source: WeightSource, name: str) -> str:
        return source.info(name).format

    def read(self, source: WeightSource, name: str, shape: tuple[int, ...]) -> Float8:
        scale_name = self._scale_of(name)
        if scale_name is None or len(shape) != 2:
            raise CheckpointError(f"{source.path}: has no {' or '.join(_SCALE_NAMES)} for the matrix {name!r}")
        quants = read_part(source, name, shape, FLOAT8)
        if self.block is None:
            return Float8(quants=quants, scale=_row_scale(source, scale_name, shape[0]), run_length=shape[1])
        grid = read_part(source, scale_name, scale_grid(shape, self.block), _SCALE_FORMATS)
        scale = for_outputs(_as_float(grid), self.block[0], shape[0])
        return Float8(quants=quants, scale=scale, run_length=min(self.block[1], shape[1]))

    def _scale_of(self, name: str) -> str | None:
        candidates = [f"{module_of(name)}.{leaf}" for leaf in _SCALE_NAMES]
        return next((candidate for candidate in candidates if candidate in self.names), None)


def fp8_scheme(config: Mapping[str, Any], names: Collection[str]) -> FP8:
    """Raises CheckpointError, UnsupportedCheckpoint for variants."""
    settings.one_of(config, "fmt", ("e4m3", "e5m2", "float8_e4m3fn"), "e4m3")
    activations = settings.one_of(config, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = config.get("weight_block_size")
    return FP8(
        block=None if block is None else settings.block_shape(block, "weight_block_size"),
        names=names,
        notes=(f"activations are not rounded to float8 ({activations} in the checkpoint's configuration)",),
    )


def scale_grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Blocks along the outputs and along the inputs."""
    return blocks_in(shape[0], block[0]), blocks_in(shape[1], block[1])


def for_outputs(
    per_block: Float[np.ndarray, "blocks runs"], block_length: int, num_outputs: int
) -> Float[np.ndarray, "O runs"]:
    """The scales of its block for each output."""
    return per_block[np.arange(num_outputs) // block_length]


def _row_scale(source: WeightSource, name: str, num_outputs: int) -> Float32[np.ndarray, "O 1"]:
    """A scale for each output, from as many or from one."""
    shape = source.info(name).shape
    if shape in ((num_outputs,), (num_outputs, 1)):
        return _as_float(read_part(source, name, shape, _SCALE_FORMATS)).reshape(-1, 1)
    return np.full((num_outputs, 1), _as_float(read_number(source, name, _SCALE_FORMATS)), np.float32)


def _as_float(scale: np.ndarray) -> Float32[np.ndarray, "..."]:
    return scale.astype(np.float32)
