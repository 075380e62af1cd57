"""The packed product on CPUs, for each format, against float64 and against itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.quant.formats import FORMATS
from pallas_kernels.cpu.levels import LEVELS, level_named
from pallas_kernels.cpu.targets import NotRegistered, Targets, register
from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.around import Before, GatedUnit, RmsNorm, apply_before
from pallas_kernels.quantized_matmul.cases import random_parts
from pallas_kernels.quantized_matmul.cpu import (
    activations,
    definition,
    function_of,
    quantized_matmul,
    round_activations,
    self_test,
    tiled_matmul,
    undecided_steps,
)
from pallas_kernels.quantized_matmul.tiles import TILE_FORMATS, num_tile_bytes, tile, tile_format, untile

O, I = 208, 256  # noqa: E741 - the shape letters; 13 groups of outputs, 8 blocks of inputs
ROWS = [1, 2, 3, 4, 5, 6, 7, 9, 16, 21, 31, 64, 130]
FILE_FORMATS = [name for name in TILE_FORMATS if name in FORMATS]
UNEVEN_FORMATS = ["INT8", "INT4", "F32", "F16", "BF16"]  # their inputs may be no multiple of 32
BEFORE = {
    "nothing": lambda num_inputs: None,
    "norm": lambda num_inputs: RmsNorm(
        weight=jnp.asarray(np.random.default_rng(3).uniform(0.5, 1.5, num_inputs).astype(np.float32)), eps=1e-5
    ),
    "silu": lambda num_inputs: GatedUnit(activation="silu"),
    "gelu_tanh": lambda num_inputs: GatedUnit(activation="gelu_tanh"),
}


def _tiles(format_name: str, shape: tuple[int, int] = (O, I), group_length: int | None = None) -> np.ndarray:
    return tile(format_name, random_parts(np.random.default_rng(7), format_name, *shape, group_length), group_length)


def _activations(num_rows: int, num_columns: int = I) -> np.ndarray:
    x = np.random.default_rng(num_rows).standard_normal((num_rows, num_columns), np.float32)
    x[0, :32] = 0  # a block without a scale
    return x * np.float32(10) ** np.arange(num_rows, dtype=np.float32)[:, None].clip(0, 6)


def _call(targets: Targets, x: np.ndarray, tiles: Any, residual: np.ndarray | None = None, **call: Any) -> np.ndarray:
    added = None if residual is None else jnp.asarray(residual)
    return np.array(tiled_matmul(jnp.asarray(x), jnp.asarray(tiles), residual=added, targets=targets, **call))


def _check_product(
    targets: Targets,
    format_name: str,
    num_rows: int,
    shape: tuple[int, int] = (O, I),
    *,
    group_length: int | None = None,
    before: Before = None,
    has_residual: bool = False,
) -> None:
    num_outputs, num_inputs = shape
    tiles = _tiles(format_name, shape, group_length)
    x = _activations(num_rows, num_inputs * (2 if isinstance(before, GatedUnit) else 1))
    residual = np.random.default_rng(1).standard_normal((num_rows, num_outputs), np.float32) if has_residual else None
    call: Any = {"format_name": format_name, "num_outputs": num_outputs, "group_length": group_length, "before": before}
    got = _call(targets, x, tiles, residual, **call)
    want = definition(x, tiles, residual=residual, **call)
    values = activations(x, before)
    magnitudes = np.abs(values).astype(np.float64) @ np.abs(_weight_bound(format_name, tiles, shape, group_length)).T
    # float32: one rounding of each block's product and of each sum, relative to the magnitudes added up
    allowed = 1e-6 * (magnitudes + np.abs(want)) + 1e-30
    if before is not None and tile_format(format_name).is_quantized:
        allowed += undecided_steps(values) @ np.abs(untile(format_name, tiles, *shape, group_length)).T
    assert (np.abs(got - want) <= allowed).all()


def _weight_bound(format_name: str, tiles: np.ndarray, shape: tuple[int, int], group_length: int | None) -> np.ndarray:
    """At least the magnitudes of what is added up: where there are minima, quants and minima are summed apart."""
    values = np.abs(untile(format_name, tiles, *shape, group_length))
    return values + values.max() if tile_format(format_name).has_minimum else values


@pytest.mark.parametrize("format_name", FILE_FORMATS)
def test_tiles_hold_the_values_of_the_files_formats_exactly(format_name):
    weight = FORMATS[format_name].encode(np.random.default_rng(7).standard_normal((40, I), np.float32))
    tiles = tile(format_name, {name: np.asarray(value) for name, value in vars(weight).items()})
    assert tiles.shape == (num_tile_bytes(format_name, 40, I),)
    np.testing.assert_array_equal(untile(format_name, tiles, 40, I), weight.decode())


def _k_quant_values(format_name: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    """One value after the other, as the comments of ggml-quants.c describe the bits."""
    values = np.zeros((len(parts["d"]), 512), np.float32)
    for o, i in np.ndindex(values.shape):
        block, s, at = i // 256, i % 256, i // 32
        if format_name == "Q6_K":
            half, j = divmod(s, 128)
            low = int(parts["low"][o, block * 128 + half * 64 + j % 64]) >> (4 * (j // 64)) & 15
            high = int(parts["high"][o, block * 64 + half * 32 + j % 32]) >> (2 * (j // 32)) & 3
            scale = np.float32(parts["d"][o, block]) * np.float32(parts["scales"][o, i // 16])
            values[o, i] = scale * np.float32((low | high << 4) - 32)
            continue
        q = int(parts["quants"][o, block * 128 + s // 64 * 32 + s % 32]) >> (4 * (s // 32 % 2)) & 15
        if format_name == "Q5_K":
            q |= (int(parts["high_bits"][o, block * 32 + s % 32]) >> (s // 32) & 1) << 4
        scale = np.float32(parts["d"][o, block]) * np.float32(parts["scales"][o, at])
        values[o, i] = scale * np.float32(q) - np.float32(parts["dmin"][o, block]) * np.float32(parts["mins"][o, at])
    return values


@pytest.mark.parametrize("format_name", ["Q4_K", "Q5_K", "Q6_K"])
def test_tiles_hold_the_values_of_k_quants_exactly(format_name):
    parts = random_parts(np.random.default_rng(0), format_name, 5, 512)
    got = untile(format_name, tile(format_name, parts), 5, 512)
    np.testing.assert_array_equal(got, _k_quant_values(format_name, parts))


@pytest.mark.parametrize("group_length", [32, 64, 128, None])
def test_tiles_hold_the_values_of_groups_exactly(group_length):
    parts = random_parts(np.random.default_rng(0), "INT4", 20, 200, group_length)
    scale, zero = (
        np.repeat(parts[n].astype(np.float32), group_length or 200, axis=1)[:, :200] for n in ("scale", "zero")
    )
    got = untile("INT4", tile("INT4", parts, group_length), 20, 200, group_length)
    np.testing.assert_array_equal(got, (parts["quants"].astype(np.float32) - zero) * scale)


def test_tiles_hold_the_values_of_whole_rows_exactly():
    parts = random_parts(np.random.default_rng(0), "INT8", 20, 50)
    got = untile("INT8", tile("INT8", parts), 20, 50)
    np.testing.assert_array_equal(got, parts["quants"].astype(np.float32) * parts["scale"][:, None])


@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_tiles_of_outputs_concatenate(format_name):
    whole = _tiles(format_name)
    half = len(whole) // 13 * 6
    np.testing.assert_array_equal(untile(format_name, whole[:half], 96, I), untile(format_name, whole, O, I)[:96])


def test_activations_are_rounded_to_half_a_step():
    x = _activations(13)
    step = np.repeat(np.abs(x.reshape(13, -1, 32)).max(axis=-1) / 127, 32, axis=1)
    error = np.abs(round_activations(x) - x)
    assert (error <= 0.5001 * step).all()
    assert (error > 0.4 * step).any()


@pytest.mark.parametrize("name", BEFORE)
def test_the_definition_agrees_with_what_other_backends_run(name):
    x, before = _activations(5, 128), BEFORE[name](64 if name in ("silu", "gelu_tanh") else 128)
    want = np.asarray(apply_before(jnp.asarray(x), before))
    # jax computes in float32; a gated unit's relative error there grows with exp's argument
    np.testing.assert_allclose(activations(x, before), want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_matches_float64(targets, format_name, num_rows):
    _check_product(targets, format_name, num_rows)


@pytest.mark.parametrize("name", ["norm", "silu", "gelu_tanh"])
@pytest.mark.parametrize("num_rows", [1, 37])
@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_matches_float64_with_what_is_taken_over(targets, format_name, num_rows, name):
    _check_product(targets, format_name, num_rows, before=BEFORE[name](I), has_residual=name != "silu")


@pytest.mark.parametrize("shape", [(16, 32), (48, 32), (576, 576), (1, 32), (17, 64), (200, 96)])
@pytest.mark.parametrize("format_name", ["Q4_1", "Q8_0"])
def test_matches_float64_in_other_shapes(targets, format_name, shape):
    _check_product(targets, format_name, 9, shape, has_residual=True)


@pytest.mark.parametrize("shape", [(1, 1), (15, 33), (17, 50), (40, 190)])
@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("format_name", UNEVEN_FORMATS)
def test_matches_float64_where_blocks_are_not_whole(targets, format_name, name, shape):
    for num_rows in (1, 19):
        _check_product(targets, format_name, num_rows, shape, before=BEFORE[name](shape[1]), has_residual=True)


@pytest.mark.parametrize("group_length", [32, 64, 128, 4096])
def test_matches_float64_in_groups(targets, group_length):
    for shape in ((48, 256), (20, 200)):
        _check_product(targets, "INT4", 5, shape, group_length=group_length)


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_a_row_does_not_depend_on_the_others(targets, format_name, name):
    tiles, before = jnp.asarray(_tiles(format_name)), BEFORE[name](I)
    x = _activations(29, I * (2 if isinstance(before, GatedUnit) else 1))

    def product(rows):
        return _call(targets, rows, tiles, format_name=format_name, num_outputs=O, before=before)

    together = product(x)
    np.testing.assert_array_equal(together, np.concatenate([product(row[None]) for row in x]))
    np.testing.assert_array_equal(together, np.concatenate([product(x[:3]), product(x[3:10]), product(x[10:])]))
    np.testing.assert_array_equal(product(np.concatenate([x] * 10)), np.concatenate([together] * 10))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("format_name", ["Q8_0", "Q6_K", "INT8", "BF16"])
def test_a_value_that_is_no_number_stays_in_its_row(targets, format_name, name, bad):
    tiles, before = jnp.asarray(_tiles(format_name)), BEFORE[name](I)
    x = _activations(9, I * (2 if isinstance(before, GatedUnit) else 1))
    call: Any = {"format_name": format_name, "num_outputs": O, "before": before}
    good = _call(targets, x, tiles, **call)
    x[4, 40] = bad
    got = _call(targets, x, tiles, **call)
    assert not np.isfinite(got[4]).any() or (isinstance(before, GatedUnit) and bad == -np.inf)
    np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(good, 4, axis=0))


def test_tiny_activations_count_as_zero(targets):
    got = _call(targets, np.full((2, I), 2.0**-110, np.float32), _tiles("Q4_0"), format_name="Q4_0", num_outputs=O)
    np.testing.assert_array_equal(got, np.zeros((2, O)))


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gates_far_from_zero(targets, name):
    """The whole range of float32, where exp overflows and where it is zero."""
    gate = np.concatenate([[0.0], *([v, -v] for v in np.logspace(-30, 37, 127))]).astype(np.float32)
    x = np.concatenate([np.diag(gate), np.eye(len(gate), dtype=np.float32)], axis=1)
    eye = tile("F32", {"array": np.eye(len(gate), dtype=np.float32)})
    before = BEFORE[name](len(gate))
    got = _call(targets, x, eye, format_name="F32", num_outputs=len(gate), before=before)
    want = activations(x, before)
    np.testing.assert_allclose(np.diag(got), np.diag(want), rtol=1e-6, atol=1e-35)


def test_no_rows_give_no_rows(targets):
    got = _call(targets, np.zeros((0, I), np.float32), _tiles("Q4_0"), format_name="Q4_0", num_outputs=O)
    assert got.shape == (0, O)


def test_under_jit(targets):
    tiles, x, before = jnp.asarray(_tiles("Q4_1")), jnp.asarray(_activations(5)), BEFORE["norm"](I)

    def product(x, tiles, before):
        return tiled_matmul(x, tiles, format_name="Q4_1", num_outputs=O, before=before, targets=targets)

    np.testing.assert_array_equal(jax.jit(product)(x, tiles, before), product(x, tiles, before))


def test_a_weight_without_tiles_is_xlas(targets):
    weight = FORMATS["F32"].encode(np.random.default_rng(7).standard_normal((20, 50), np.float32))
    x, before, residual = jnp.asarray(_activations(3, 50)), BEFORE["norm"](50), jnp.ones((3, 20))
    got = quantized_matmul(x, weight, before=before, residual=residual, targets=targets)
    np.testing.assert_array_equal(got, xla.quantized_matmul(x, weight, before=before, residual=residual))


@pytest.mark.parametrize(
    ("format_name", "num_inputs", "group_length", "num_bytes", "message"),
    [
        ("Q4_1", 80, None, 1, "Q4_1 has blocks of 32 inputs; 80 is no multiple"),
        ("Q4_K", 288, None, 1, "Q4_K has blocks of 256 inputs; 288 is no multiple"),
        ("Q4_1", 96, None, 12481, r"Q4_1 tiles of \[208, 96\] have 12480 bytes, not 12481"),
        ("Q4_1", 96, 32, 12480, "Q4_1 has no groups of a length to choose; group_length is 32"),
        ("INT4", 96, 48, 1, "multiple of 32 inputs, or the whole row .None.; not 48"),
        ("INT8", 0, None, 1, r"this one is \[208, 0\]"),
    ],
)
def test_refuses_other_sizes(targets, format_name, num_inputs, group_length, num_bytes, message):
    x, tiles = np.zeros((1, num_inputs), np.float32), np.zeros(num_bytes, np.uint8)
    with pytest.raises(ValueError, match=message):
        _call(targets, x, tiles, format_name=format_name, num_outputs=O, group_length=group_length)


def test_tile_refuses_arrays_that_do_not_belong_together():
    parts = random_parts(np.random.default_rng(0), "INT4", 16, 128, 64)
    with pytest.raises(ValueError, match=r"scale \[16, 2\], zero \[16, 2\] are no INT4 weight in groups of 32"):
        tile("INT4", parts, 32)


def test_refuses_other_formats():
    with pytest.raises(ValueError, match="the CPU kernel has no Q9_9; it has Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K"):
        function_of("Q9_9")


def test_refuses_a_format_that_is_not_registered():
    with pytest.raises(NotRegistered, match=r"cpu_compiled:q4_1 is not registered \(registered: none\)"):
        _call(
            Targets(level="generic", names={}), np.zeros((1, I), np.float32), _tiles("Q4_1"),
            format_name="Q4_1", num_outputs=O,
        )  # fmt: skip


# What the machine code checks itself: x, tile bytes, norm, residual, result, workspace bytes, before; what it says.
@pytest.mark.parametrize(
    ("x", "num_bytes", "norm", "residual", "out", "workspace", "before", "message"),
    [
        ((2, 96), 12480, 0, (0, 0), (3, O), 480, 0, "x has 2 rows, the result 3"),
        ((2, 96), 12479, 0, (0, 0), (2, O), 480, 0, "tiles of 12479 bytes, expected 12480"),
        ((2, 96), 12480, 0, (0, 0), (2, O), 479, 0, "workspace of 479 bytes, expected 480"),
        ((2, 96), 12480, 0, (0, 0), (2, 200), 480, 0, None),
        ((2, 96), 12480, 0, (0, 0), (2, 192), 480, 0, "tiles of 12480 bytes, expected 11520"),
        ((2, 96), 12480, 95, (0, 0), (2, O), 480, 1, "norm's weight of 95 values, expected 96"),
        ((2, 96), 12480, 96, (0, 0), (2, O), 480, 0, "norm's weight of 96 values, expected 0"),
        ((2, 96), 12480, 0, (2, 207), (2, O), 480, 0, r"residual of \[2, 207\], not the result's shape"),
        ((2, 193), 12480, 0, (0, 0), (2, O), 480, 2, "x has 193 columns, an odd number"),
        ((2, 96), 12480, 0, (0, 0), (2, O), 480, 4, "attribute before is 4, expected 0 to 3"),
    ],
)
def test_the_machine_code_checks_sizes_too(targets, x, num_bytes, norm, residual, out, workspace, before, message):
    results = (jax.ShapeDtypeStruct(out, jnp.float32), jax.ShapeDtypeStruct((workspace,), jnp.uint8))
    call = jax.ffi.ffi_call(targets.name_of(function_of("Q4_1")), results)

    def run():
        operands = (jnp.zeros(x), jnp.zeros(num_bytes, jnp.uint8), jnp.zeros(norm), jnp.zeros(residual))
        attributes = {"before": np.int64(before), "eps": np.float32(0), "span_blocks": np.int64(0)}
        return jax.block_until_ready(call(*operands, **attributes))

    if message is None:  # outputs that fill the last group partly
        assert run()[0].shape == out
        return
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        run()


def test_self_test_is_small(targets):
    assert self_test(targets) < 1e-6


def test_self_test_covers_what_is_registered(targets):
    one = Targets(level=targets.level, names={function_of("Q5_0"): targets.name_of(function_of("Q5_0"))})
    assert 0 < self_test(one) < 1e-6
    with pytest.raises(NotRegistered, match="q4_0 is not registered"):
        self_test(one, ["Q4_0"])


def test_self_test_sees_a_wrong_kernel(targets, monkeypatch):
    """As seen from a definition whose weights are a thousandth larger."""
    monkeypatch.setattr(
        "pallas_kernels.quantized_matmul.cpu.untile", lambda *a, **k: untile(*a, **k) + np.float32(0.001)
    )
    assert self_test(targets, ["Q4_1"]) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in LEVELS[1:]])
def test_lesser_cpus(kernel_cache, level):
    """The other lowerings of each operation."""
    try:
        level_named(level)
    except ValueError as error:
        pytest.skip(str(error))
    targets = register(map(function_of, TILE_FORMATS), cache_dir=kernel_cache, level=level)
    assert self_test(targets) < 1e-6
    for format_name in TILE_FORMATS:
        _check_product(targets, format_name, 13)
        _check_product(targets, format_name, 1, before=BEFORE["norm"](I), has_residual=True)
        if format_name in UNEVEN_FORMATS:
            _check_product(targets, format_name, 7, (17, 50), before=BEFORE["silu"](50), has_residual=True)
