"""The product with a packed weight on CPUs, by a kernel that reads the packed bytes.

Activations are rounded to 8 bits in blocks of 32, as llama.cpp does, and multiplied as integers; so the result differs
from the reference by that rounding. `definition` is the exact result of the rounded product.
"""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Float64, UInt8

from pallas_kernels.cpu.targets import Targets
from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.around import Before, apply_before
from pallas_kernels.quantized_matmul.reference import PackedWeight, plus
from pallas_kernels.quantized_matmul.tiles import (
    BLOCK_LENGTH,
    TILE_FORMATS,
    check_tileable,
    num_tile_bytes,
    tile_format,
    untile,
)

_WORKSPACE_BYTES_PER_BLOCK = BLOCK_LENGTH + 8
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


def function_of(format_name: str) -> str:
    """What to pass to `register` for a format. Raises ValueError for a format without a kernel."""
    return f"pallas_kernels.quantized_matmul.cpu_compiled:{tile_format(format_name).name.lower()}"


def tiled_matmul(
    x: Float32[Array, "T I"],
    tiles: UInt8[Array, " tile_bytes"],
    *,
    format_name: str,
    num_outputs: int,
    targets: Targets,
) -> Float32[Array, "T O"]:
    """round_activations(x) @ weight.T for the weight [num_outputs, I] that `tile` made `tiles` from.

    A row's result does not depend on the other rows. NaN and infinite activations give NaN in their row. Raises
    ValueError for shapes the kernel does not take, NotRegistered.
    """
    num_rows, num_inputs = x.shape
    check_tileable(num_outputs, num_inputs)
    expected = num_tile_bytes(format_name, num_outputs, num_inputs)
    if tiles.shape != (expected,):
        raise ValueError(
            f"{format_name} tiles of [{num_outputs}, {num_inputs}] have {expected} bytes, not {tiles.size}"
        )
    workspace_bytes = num_rows * (num_inputs // BLOCK_LENGTH) * _WORKSPACE_BYTES_PER_BLOCK
    results = (
        jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
        jax.ShapeDtypeStruct((workspace_bytes,), jnp.uint8),
    )
    return jax.ffi.ffi_call(targets.name_of(function_of(format_name)), results)(x, tiles)[0]


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
    out = tiled_matmul(
        apply_before(x, before).astype(jnp.float32),
        weight.tiles,
        format_name=weight.format_name,
        num_outputs=weight.num_outputs,
        targets=targets,
    )
    return plus(out, residual)


def round_activations(x: Float32[np.ndarray, "T I"]) -> Float64[np.ndarray, "T I"]:
    """Each block of 32 as multiples, -127 to 127, of its largest magnitude / 127; 0 for blocks all below 2^-100."""
    blocks = x.reshape(len(x), -1, BLOCK_LENGTH)
    peak = np.abs(blocks).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), peak, out=np.zeros_like(peak), where=peak >= _SMALLEST_PEAK)
    steps = np.rint(blocks * inverse).astype(np.float64) * (peak / np.float32(127))
    return steps.reshape(x.shape)


def definition(
    x: Float32[np.ndarray, "T I"],
    tiles: UInt8[np.ndarray, " tile_bytes"],
    *,
    format_name: str,
    num_outputs: int,
) -> Float64[np.ndarray, "T O"]:
    """What `tiled_matmul` computes, in float64."""
    weight = untile(format_name, tiles, num_outputs, x.shape[1])
    return round_activations(x) @ weight.astype(np.float64).T


def self_test(targets: Targets, format_names: Iterable[str] | None = None) -> float:
    """The largest error of the kernels against their definition, relative to the largest result; about 1e-7.

    Of the given formats, or of all that are registered. Raises NotRegistered.
    """
    if format_names is None:
        format_names = [name for name in TILE_FORMATS if function_of(name) in targets.names]
    return max(_relative_error(targets, format_name) for format_name in format_names)


def _relative_error(targets: Targets, format_name: str) -> float:
    """Over random bytes as tiles and 13 rows, which take tiles of eight, four and one."""
    num_outputs, num_inputs = 48, 96
    rng = np.random.default_rng(0)
    fmt = tile_format(format_name)
    groups, blocks = num_outputs // 16, num_inputs // BLOCK_LENGTH
    quants = rng.integers(0, 256, (groups, blocks * fmt.quant_bytes), np.uint8)
    halves = rng.uniform(-1, 1, (groups, blocks * fmt.scale_bytes // 2)).astype(np.float16)
    tiles = np.concatenate([quants, halves.view(np.uint8)], axis=1).reshape(-1)
    x = rng.standard_normal((13, num_inputs), np.float32)
    want = definition(x, tiles, format_name=format_name, num_outputs=num_outputs)
    got = tiled_matmul(
        jnp.asarray(x), jnp.asarray(tiles), format_name=format_name, num_outputs=num_outputs, targets=targets
    )
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
