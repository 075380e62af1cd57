"""The product with the weight of each row's expert on CPUs, by the tiles of the single product's kernels.

Activations are rounded as in quantized_matmul/cpu.py; a row's result is exactly that of `tiled_matmul` with its expert.
"""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, UInt8

from pallas_kernels.cpu.targets import Targets
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.reference import PackedExperts
from pallas_kernels.quantized_matmul.around import Before, GatedUnit, RmsNorm
from pallas_kernels.quantized_matmul.cases import random_parts
from pallas_kernels.quantized_matmul.cpu import code_of, definition
from pallas_kernels.quantized_matmul.rows import JOB_BYTES, workspace_bytes
from pallas_kernels.quantized_matmul.tiles import (
    BLOCK_LENGTH,
    TILE_FORMATS,
    check_group_length,
    check_tileable,
    num_tile_bytes,
    tile,
    tile_format,
)


@runtime_checkable
class TiledExperts(Protocol):
    """Weights of one shape in tiles uint8 [E, bytes], with what is needed to read them."""

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
    return f"pallas_kernels.grouped_matmul.cpu_compiled:{tile_format(format_name).name.lower()}"


def all_functions() -> tuple[str, ...]:
    """Every target of this op."""
    return tuple(map(function_of, TILE_FORMATS))


def tiled_grouped_matmul(
    x: Float32[Array, "T X"],
    tiles: UInt8[Array, "E tile_bytes"],
    group_sizes: Int32[Array, "E"],
    *,
    format_name: str,
    num_outputs: int,
    group_length: int | None = None,
    before: Before = None,
    targets: Targets,
) -> Float32[Array, "T O"]:
    """round_activations(apply_before(x))[t] @ weight[expert of t].T for the weights [E, num_outputs, I] in `tiles`.

    The groups must hold all rows. Experts without rows are not read. Raises ValueError for shapes the kernel does not
    take, NotRegistered; the program raises JaxRuntimeError for groups that do not have T rows together.
    """
    num_rows, num_columns = x.shape
    num_inputs = num_columns // 2 if isinstance(before, GatedUnit) else num_columns
    check_tileable(format_name, num_outputs, num_inputs)
    check_group_length(format_name, group_length)
    num_experts, expected = len(tiles), num_tile_bytes(format_name, num_outputs, num_inputs, group_length)
    if tiles.shape[1] != expected:
        raise ValueError(
            f"{format_name} tiles of [{num_outputs}, {num_inputs}] have {expected} bytes, not {tiles.shape[1]}"
        )
    norm = before.weight.astype(jnp.float32) if isinstance(before, RmsNorm) else jnp.zeros(0, jnp.float32)
    results = (
        jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
        jax.ShapeDtypeStruct(
            (workspace_bytes(tile_format(format_name), num_rows, num_inputs, num_experts),), jnp.uint8
        ),
        jax.ShapeDtypeStruct((num_experts * JOB_BYTES,), jnp.uint8),
    )
    return jax.ffi.ffi_call(targets.name_of(function_of(format_name)), results)(
        x,
        tiles.reshape(-1),
        norm,
        jnp.zeros((0, 0), jnp.float32),
        group_sizes,
        before=np.int64(code_of(before)),
        eps=np.float32(before.eps if isinstance(before, RmsNorm) else 0),
        span_blocks=np.int64((group_length or 0) // BLOCK_LENGTH),
    )[0]


def grouped_matmul(
    x: Float[Array, "T X"],
    weight: TiledExperts | PackedExperts,
    group_sizes: Int32[Array, "E"],
    *,
    before: Before = None,
    targets: Targets,
) -> Float32[Array, "T O"]:
    """The kernel for weights in tiles; XLA's product for others, which were expanded because they have none."""
    if not isinstance(weight, TiledExperts):
        return xla.grouped_matmul(x, weight, group_sizes, before=before)
    return tiled_grouped_matmul(
        x.astype(jnp.float32),
        weight.tiles,
        group_sizes,
        format_name=weight.format_name,
        num_outputs=weight.num_outputs,
        group_length=weight.group_length,
        before=before,
        targets=targets,
    )


def self_test(targets: Targets, format_names: Iterable[str]) -> float:
    """The largest error of the kernels against their definition, relative to the largest result; about 1e-7.

    Raises NotRegistered.
    """
    return max(_relative_error(targets, format_name) for format_name in format_names)


def _relative_error(targets: Targets, format_name: str) -> float:
    """Over random weights of four experts, one of them without rows."""
    rng, sizes = np.random.default_rng(0), np.asarray([0, 9, 1, 11], np.int32)
    tiles = np.stack([tile(format_name, random_parts(rng, format_name, 48, 256)) for _ in sizes])
    x = rng.standard_normal((sizes.sum(), 256), np.float32)
    starts = np.cumsum(sizes) - sizes
    want = np.concatenate(
        [
            definition(x[start : start + size], tiles[expert], format_name=format_name, num_outputs=48)
            for expert, (start, size) in enumerate(zip(starts, sizes, strict=True))
            if size
        ]
    )
    got = tiled_grouped_matmul(
        jnp.asarray(x), jnp.asarray(tiles), jnp.asarray(sizes), format_name=format_name, num_outputs=48, targets=targets
    )
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())
