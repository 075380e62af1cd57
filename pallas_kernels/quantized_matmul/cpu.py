"""The product with a packed weight on CPUs, by a kernel that reads the packed bytes.

Activations are rounded to 8 bits in blocks of 32, as llama.cpp does, and multiplied as integers; so the result differs
from the reference by that rounding. `definition` is the exact result of the rounded product. Weights that are not
quantized (F32, F16, BF16) are multiplied in float32, with activations as they are.
"""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, UInt8

from pallas_kernels.cpu.targets import Targets
from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.around import Before, GatedUnit, RmsNorm
from pallas_kernels.quantized_matmul.cases import random_parts
from pallas_kernels.quantized_matmul.reference import PackedWeight
from pallas_kernels.quantized_matmul.rows import GELU_TANH, NO_BEFORE, RMS_NORM, SILU, workspace_bytes
from pallas_kernels.quantized_matmul.tiles import (
    BLOCK_LENGTH,
    TILE_FORMATS,
    check_group_length,
    check_tileable,
    num_tile_bytes,
    tile,
    tile_format,
    untile,
)

_SMALLEST_PEAK = np.float32(2.0**-100)


@runtime_checkable
class TiledWeight(Protocol):
    """A weight in tiles, with what is needed to read them."""

    @property
    def tiles(self) -> Any: ...

    @property
    def format_name(self) -> str: ...

    @property
    def num_outputs(self) -> int: ...

    @property
    def group_length(self) -> int | None: ...


def function_of(format_name: str) -> str:
    """What to pass to `register` for a format. Raises ValueError for a format without a kernel."""
    return f"pallas_kernels.quantized_matmul.cpu_compiled:{tile_format(format_name).name.lower()}"


def all_functions() -> tuple[str, ...]:
    """Every target of this op."""
    return tuple(map(function_of, TILE_FORMATS))


def code_of(before: Before) -> int:
    """The attribute for what a product takes over."""
    if isinstance(before, RmsNorm):
        return RMS_NORM
    if isinstance(before, GatedUnit):
        return SILU if before.activation == "silu" else GELU_TANH
    return NO_BEFORE


def tiled_matmul(
    x: Float32[Array, "T X"],
    tiles: UInt8[Array, " tile_bytes"],
    *,
    format_name: str,
    num_outputs: int,
    group_length: int | None = None,
    before: Before = None,
    residual: Float32[Array, "T O"] | None = None,
    targets: Targets,
) -> Float32[Array, "T O"]:
    """round_activations(apply_before(x)) @ weight.T + residual for the weight [num_outputs, I] in `tiles`.

    A row's result does not depend on the other rows. NaN and infinite activations give NaN in their row. Raises
    ValueError for shapes the kernel does not take, NotRegistered.
    """
    num_rows, num_columns = x.shape
    num_inputs = num_columns // 2 if isinstance(before, GatedUnit) else num_columns
    check_tileable(format_name, num_outputs, num_inputs)
    check_group_length(format_name, group_length)
    expected = num_tile_bytes(format_name, num_outputs, num_inputs, group_length)
    if tiles.shape != (expected,):
        raise ValueError(
            f"{format_name} tiles of [{num_outputs}, {num_inputs}] have {expected} bytes, not {tiles.size}"
        )
    norm = before.weight.astype(jnp.float32) if isinstance(before, RmsNorm) else jnp.zeros(0, jnp.float32)
    results = (
        jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
        jax.ShapeDtypeStruct((workspace_bytes(tile_format(format_name), num_rows, num_inputs),), jnp.uint8),
    )
    return jax.ffi.ffi_call(targets.name_of(function_of(format_name)), results)(
        x,
        tiles,
        norm,
        jnp.zeros((0, 0), jnp.float32) if residual is None else residual,
        before=np.int64(code_of(before)),
        eps=np.float32(before.eps if isinstance(before, RmsNorm) else 0),
        span_blocks=np.int64((group_length or 0) // BLOCK_LENGTH),
    )[0]


def quantized_matmul(
    x: Float[Array, "T X"],
    weight: TiledWeight | PackedWeight,
    *,
    before: Before = None,
    residual: Float[Array, "T O"] | None = None,
    targets: Targets,
) -> Float32[Array, "T O"]:
    """The kernel for a weight in tiles; XLA's product for any other, which was expanded because it has none."""
    if not isinstance(weight, TiledWeight):
        return xla.quantized_matmul(x, weight, before=before, residual=residual)
    return tiled_matmul(
        x.astype(jnp.float32),
        weight.tiles,
        format_name=weight.format_name,
        num_outputs=weight.num_outputs,
        group_length=weight.group_length,
        before=before,
        residual=None if residual is None else residual.astype(jnp.float32),
        targets=targets,
    )


def round_activations(x: Float32[np.ndarray, "T I"]) -> Float64[np.ndarray, "T I"]:
    """Each block of 32 as multiples, -127 to 127, of its largest magnitude / 127; 0 for blocks all below 2^-100."""
    blocks = _blocks(x)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak >= _SMALLEST_PEAK)
    steps = np.rint(blocks * inverse).astype(np.float64) * (peak / np.float32(127))
    return steps.reshape(len(x), -1)[:, : x.shape[1]]


def _blocks(x: np.ndarray) -> np.ndarray:
    """[T, blocks, 32], with zeros in the last block where it is not whole."""
    return np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK_LENGTH))).reshape(len(x), -1, BLOCK_LENGTH)


def activations(x: Float32[np.ndarray, "T X"], before: Before) -> Float32[np.ndarray, "T I"]:
    """`apply_before` in float64, rounded to float32 at the end."""
    wide = x.astype(np.float64)
    if isinstance(before, RmsNorm):
        mean_square = np.square(wide).mean(axis=1, keepdims=True)
        wide = wide / np.sqrt(mean_square + np.float32(before.eps)) * np.asarray(before.weight, np.float64)
    if isinstance(before, GatedUnit):
        gate, up = np.split(wide, 2, axis=1)
        slope = 1 if before.activation == "silu" else np.sqrt(8 / np.pi) * (1 + 0.044715 * np.square(gate))
        wide = gate / (1 + np.exp(np.minimum(-gate * slope, 700))) * up
    return wide.astype(np.float32)


def definition(
    x: Float32[np.ndarray, "T X"],
    tiles: UInt8[np.ndarray, " tile_bytes"],
    *,
    format_name: str,
    num_outputs: int,
    group_length: int | None = None,
    before: Before = None,
    residual: Float32[np.ndarray, "T O"] | None = None,
) -> Float64[np.ndarray, "T O"]:
    """What `tiled_matmul` computes, in float64."""
    values = activations(x, before)
    weight = untile(format_name, tiles, num_outputs, values.shape[1], group_length)
    rounded = round_activations(values) if tile_format(format_name).is_quantized else values.astype(np.float64)
    product = rounded @ weight.astype(np.float64).T
    return product if residual is None else product + residual


def self_test(targets: Targets, format_names: Iterable[str] | None = None) -> float:
    """The largest error of the kernels against their definition, relative to the largest result; about 1e-7.

    Of the given formats, or of all that are registered. Raises NotRegistered.
    """
    if format_names is None:
        format_names = [name for name in TILE_FORMATS if function_of(name) in targets.names]
    return max(_relative_error(targets, format_name) for format_name in format_names)


def _relative_error(targets: Targets, format_name: str) -> float:
    """Over random weights and 21 rows, which take tiles of eight, four and one, with all that is fused."""
    rng = np.random.default_rng(0)
    parts = random_parts(rng, format_name, 48, 256)
    tiles = tile(format_name, parts)
    x, residual = rng.standard_normal((21, 512), np.float32), rng.standard_normal((21, 48), np.float32)
    norm = RmsNorm(weight=jnp.asarray(rng.uniform(0.5, 1.5, 256).astype(np.float32)), eps=1e-5)
    cases = (
        (None, x[:, :256], None),
        (norm, x[:, :256], residual),
        (GatedUnit(activation="silu"), x[:19], residual[:19]),
        (GatedUnit(activation="gelu_tanh"), x[:3], None),
    )
    return max(_case_error(targets, format_name, tiles, *case) for case in cases)


def _case_error(
    targets: Targets, format_name: str, tiles: np.ndarray, before: Before, x: np.ndarray, residual: np.ndarray | None
) -> float:
    call: Any = {"format_name": format_name, "num_outputs": 48, "before": before}
    want = definition(x, tiles, residual=residual, **call)
    added = None if residual is None else jnp.asarray(residual)
    got = tiled_matmul(jnp.asarray(x), jnp.asarray(tiles), residual=added, targets=targets, **call)
    error = np.abs(np.asarray(got, np.float64) - want)
    if before is not None and tile_format(format_name).is_quantized:
        error -= undecided_steps(activations(x, before)) @ np.abs(untile(format_name, tiles, 48, 256)).T
    return float(error.max() / np.abs(want).max())


def undecided_steps(values: Float32[np.ndarray, "T I"]) -> Float64[np.ndarray, "T I"]:
    """The step of each activation that lies so near the middle of two that float32 arithmetic before it may decide
    which one it is rounded to; 0 for the others."""
    peak = np.abs(_blocks(values)).max(axis=-1) / np.float32(127)
    steps = np.maximum(np.repeat(peak, BLOCK_LENGTH, axis=1)[:, : values.shape[1]], _SMALLEST_PEAK)
    in_steps = values.astype(np.float64) / steps
    return np.where(np.abs(in_steps - np.floor(in_steps) - 0.5) < 1e-4, steps, 0).astype(np.float64)
