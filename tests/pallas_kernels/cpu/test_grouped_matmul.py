"""The product with the weight of each row's expert: the backends against each other and the single product."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu.targets import Targets, register
from pallas_kernels.grouped_matmul import cpu, reference, xla
from pallas_kernels.grouped_matmul.cases import GROUP_SIZES
from pallas_kernels.quantized_matmul.around import GatedUnit, RmsNorm
from pallas_kernels.quantized_matmul.cases import random_parts
from pallas_kernels.quantized_matmul.cpu import tiled_matmul
from pallas_kernels.quantized_matmul.tiles import tile

O, I = 40, 256  # noqa: E741 - the shape letters
FORMATS = ["Q4_1", "BF16"]  # of the machine code, only the tiles differ between formats
BEFORE = {
    "nothing": None,
    "norm": RmsNorm(weight=jnp.linspace(0.5, 1.5, I), eps=1e-5),
    "silu": GatedUnit(activation="silu"),
}


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Plain float32 weights, which have no tiles."""

    array: Any

    def decode(self):
        return self.array


@dataclass(frozen=True, kw_only=True)
class Tiled:
    """Experts in tiles."""

    tiles: Any
    format_name: str
    num_outputs: int = O
    group_length: int | None = None


@pytest.fixture(scope="module")
def both_targets(targets, kernel_cache) -> Targets:
    """The single and the grouped product."""
    grouped = register(map(cpu.function_of, FORMATS), cache_dir=kernel_cache)
    return Targets(level=targets.level, names={**targets.names, **grouped.names})


def _tiled(format_name: str, num_experts: int) -> Tiled:
    rng = np.random.default_rng(num_experts)
    tiles = [tile(format_name, random_parts(rng, format_name, O, I)) for _ in range(num_experts)]
    return Tiled(tiles=jnp.asarray(np.stack(tiles)), format_name=format_name)


def _rows(sizes: tuple[int, ...], before: Any, more: int = 0) -> jax.Array:
    columns = 2 * I if isinstance(before, GatedUnit) else I
    return jnp.asarray(np.random.default_rng(0).standard_normal((sum(sizes) + more, columns), np.float32))


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_row_is_exactly_the_product_with_its_expert(both_targets, format_name, sizes, name):
    weight, before, x = _tiled(format_name, len(sizes)), BEFORE[name], _rows(sizes, BEFORE[name])
    got = cpu.grouped_matmul(x, weight, jnp.asarray(sizes, jnp.int32), before=before, targets=both_targets)
    call: Any = {"format_name": format_name, "num_outputs": O, "before": before, "targets": both_targets}
    ends = np.cumsum(sizes)
    shares = [
        np.asarray(tiled_matmul(x[end - size : end], weight.tiles[expert], **call))
        for expert, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    np.testing.assert_array_equal(got, np.concatenate(shares))


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_the_reference_and_xla_agree_with_numpy(sizes, name):
    rng, before = np.random.default_rng(1), BEFORE[name]
    experts = rng.standard_normal((len(sizes), O, I), np.float32)
    x = _rows(sizes, before, more=2)
    weight, counts = Experts(array=jnp.asarray(experts)), jnp.asarray(sizes, jnp.int32)
    rows = np.asarray(reference.apply_before(x, before), np.float64)
    of_row = np.repeat(np.arange(len(sizes)), sizes)
    want = np.zeros((len(x), O))  # zero after the last group
    for row, expert in enumerate(of_row):
        want[row] = experts[expert].astype(np.float64) @ rows[row]
    for backend in (reference, xla):
        got = backend.grouped_matmul(x, weight, counts, before=before)
        np.testing.assert_allclose(got, want, atol=2e-4)  # float32 sums of 256 terms of size 1


def test_experts_without_tiles_are_xlas(both_targets):
    weight = Experts(array=jnp.ones((2, O, I)))
    x, sizes = _rows((1, 3), None), jnp.asarray((1, 3), jnp.int32)
    np.testing.assert_array_equal(
        cpu.grouped_matmul(x, weight, sizes, targets=both_targets), xla.grouped_matmul(x, weight, sizes)
    )


@pytest.mark.parametrize("sizes", [(1, 2, 2), (9, -4, 1), (3, 2, 2)])
def test_refuses_groups_that_do_not_hold_the_rows(both_targets, sizes):
    x, counts = _rows((6,), None), jnp.asarray(sizes, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="together, or one has less than 0; x has 6"):
        jax.block_until_ready(cpu.grouped_matmul(x, _tiled("Q4_1", 3), counts, targets=both_targets))


def test_refuses_tiles_of_other_sizes(both_targets):
    weight = Tiled(tiles=jnp.zeros((2, 100), jnp.uint8), format_name="Q4_1")
    with pytest.raises(ValueError, match=r"Q4_1 tiles of \[40, 256\] have 7680 bytes, not 100"):
        cpu.grouped_matmul(_rows((1, 1), None), weight, jnp.asarray((1, 1), jnp.int32), targets=both_targets)
