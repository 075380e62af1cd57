"""The packed product on CPUs, for each format, against float64 and against itself."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.quant.formats import FORMATS
from pallas_kernels.cpu.levels import LEVELS, level_named
from pallas_kernels.cpu.targets import NotRegistered, Targets, register
from pallas_kernels.quantized_matmul.cpu import function_of, round_activations, self_test, tiled_matmul
from pallas_kernels.quantized_matmul.tiles import TILE_FORMATS, num_tile_bytes, tile, untile

O, I = 208, 96  # noqa: E741 - the shape letters; 13 groups of outputs, 3 blocks of inputs
ROWS = [1, 2, 3, 4, 5, 8, 13, 128]


def _weight(format_name: str, num_outputs: int = O, num_inputs: int = I):
    matrix = np.random.default_rng(7).standard_normal((num_outputs, num_inputs), np.float32)
    return FORMATS[format_name].encode(matrix)


def _tiles(format_name: str, weight) -> np.ndarray:
    return tile(format_name, {field.name: np.asarray(getattr(weight, field.name)) for field in fields(weight)})


def _activations(num_rows: int, num_inputs: int = I) -> np.ndarray:
    x = np.random.default_rng(num_rows).standard_normal((num_rows, num_inputs), np.float32)
    x[0, :32] = 0  # a block without a scale
    return x * np.float32(10) ** np.arange(num_rows, dtype=np.float32)[:, None].clip(0, 6)


def _check_product(targets: Targets, format_name: str, num_rows: int, shape: tuple[int, int] = (O, I)) -> None:
    weight, x = _weight(format_name, *shape), _activations(num_rows, shape[1])
    tiles = jnp.asarray(_tiles(format_name, weight))
    got = tiled_matmul(jnp.asarray(x), tiles, format_name=format_name, num_outputs=shape[0], targets=targets)
    decoded = np.asarray(weight.decode(), np.float64)
    rounded = round_activations(x)
    # float32: one rounding of each block's product and of each sum, relative to the magnitudes added up
    allowed = 1e-6 * (np.abs(rounded) @ np.abs(decoded).T) + 1e-30
    assert (np.abs(np.asarray(got) - rounded @ decoded.T) <= allowed).all()


@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_tiles_hold_the_values_exactly(format_name):
    weight = _weight(format_name)
    tiles = _tiles(format_name, weight)
    assert tiles.shape == (num_tile_bytes(format_name, O, I),)
    np.testing.assert_array_equal(untile(format_name, tiles, O, I), weight.decode())


@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_tiles_of_outputs_concatenate(format_name):
    whole = _tiles(format_name, _weight(format_name))
    half = len(whole) // 13 * 6
    np.testing.assert_array_equal(
        untile(format_name, whole[:half], 96, I), np.asarray(_weight(format_name).decode())[:96]
    )


def test_activations_are_rounded_to_half_a_step():
    x = _activations(13)
    step = np.repeat(np.abs(x.reshape(13, -1, 32)).max(axis=-1) / 127, 32, axis=1)
    error = np.abs(round_activations(x) - x)
    assert (error <= 0.5001 * step).all()
    assert (error > 0.4 * step).any()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_matches_float64(targets, format_name, num_rows):
    _check_product(targets, format_name, num_rows)


@pytest.mark.parametrize("shape", [(16, 32), (48, 32), (576, 576)])
def test_matches_float64_in_other_shapes(targets, shape):
    _check_product(targets, "Q4_1", 9, shape)


@pytest.mark.parametrize("format_name", TILE_FORMATS)
def test_a_row_does_not_depend_on_the_others(targets, format_name):
    tiles, x = jnp.asarray(_tiles(format_name, _weight(format_name))), _activations(13)

    def product(rows):
        return np.asarray(
            tiled_matmul(jnp.asarray(rows), tiles, format_name=format_name, num_outputs=O, targets=targets)
        )

    together = product(x)
    np.testing.assert_array_equal(together, np.concatenate([product(row[None]) for row in x]))
    np.testing.assert_array_equal(together, np.concatenate([product(x[:3]), product(x[3:8]), product(x[8:])]))
    many = np.concatenate([x] * 10)
    np.testing.assert_array_equal(product(many), np.concatenate([together] * 10))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_stays_in_its_row(targets, bad):
    tiles, x = jnp.asarray(_tiles("Q8_0", _weight("Q8_0"))), _activations(9)
    good = tiled_matmul(jnp.asarray(x), tiles, format_name="Q8_0", num_outputs=O, targets=targets)
    x[4, 40] = bad
    got = np.array(tiled_matmul(jnp.asarray(x), tiles, format_name="Q8_0", num_outputs=O, targets=targets))
    assert np.isnan(got[4]).all()
    np.testing.assert_array_equal(np.delete(got, 4, axis=0), np.delete(np.asarray(good), 4, axis=0))


def test_tiny_activations_count_as_zero(targets):
    tiles = jnp.asarray(_tiles("Q4_0", _weight("Q4_0")))
    x = jnp.full((2, I), 2.0**-110)
    got = tiled_matmul(x, tiles, format_name="Q4_0", num_outputs=O, targets=targets)
    np.testing.assert_array_equal(got, np.zeros((2, O)))


def test_no_rows_give_no_rows(targets):
    tiles = jnp.asarray(_tiles("Q4_0", _weight("Q4_0")))
    got = tiled_matmul(jnp.zeros((0, I)), tiles, format_name="Q4_0", num_outputs=O, targets=targets)
    assert got.shape == (0, O)


def test_under_jit(targets):
    tiles, x = jnp.asarray(_tiles("Q4_1", _weight("Q4_1"))), jnp.asarray(_activations(5))

    def product(x, tiles):
        return tiled_matmul(x, tiles, format_name="Q4_1", num_outputs=O, targets=targets)

    np.testing.assert_array_equal(jax.jit(product)(x, tiles), product(x, tiles))


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "num_bytes", "message"),
    [
        (I, 200, 12480, "16 outputs at a time; 200 is no multiple"),
        (80, O, 12480, "blocks of 32 inputs; 80 is no multiple"),
        (I, O, 12481, r"Q4_1 tiles of \[208, 96\] have 12480 bytes, not 12481"),
    ],
)
def test_refuses_other_sizes(targets, num_inputs, num_outputs, num_bytes, message):
    x, tiles = jnp.zeros((1, num_inputs)), jnp.zeros(num_bytes, jnp.uint8)
    with pytest.raises(ValueError, match=message):
        tiled_matmul(x, tiles, format_name="Q4_1", num_outputs=num_outputs, targets=targets)


def test_refuses_other_formats():
    with pytest.raises(ValueError, match="the CPU kernel has no Q6_K; it has Q4_0, Q4_1, Q5_0, Q5_1, Q8_0"):
        function_of("Q6_K")


def test_refuses_a_format_that_is_not_registered():
    tiles = jnp.asarray(_tiles("Q4_1", _weight("Q4_1")))
    with pytest.raises(NotRegistered, match=r"cpu_compiled:q4_1 is not registered \(registered: none\)"):
        tiled_matmul(
            jnp.zeros((1, I)),
            tiles,
            format_name="Q4_1",
            num_outputs=O,
            targets=Targets(level="generic", names={}),
        )


@pytest.mark.parametrize(
    ("rows", "out_shape", "num_tile_bytes", "num_workspace_bytes", "message"),
    [
        (2, (3, O), 12480, 240, "x has 2 rows, the result 3"),
        (2, (2, O), 12479, 240, "tiles of 12479 bytes, expected 12480"),
        (2, (2, O), 12480, 239, "workspace of 239 bytes, expected 240"),
        (2, (2, 200), 12480, 240, "16 must divide the outputs"),
    ],
)
def test_the_machine_code_checks_sizes_too(targets, rows, out_shape, num_tile_bytes, num_workspace_bytes, message):
    results = (
        jax.ShapeDtypeStruct(out_shape, jnp.float32),
        jax.ShapeDtypeStruct((num_workspace_bytes,), jnp.uint8),
    )
    call = jax.ffi.ffi_call(targets.name_of(function_of("Q4_1")), results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(call(jnp.zeros((rows, I)), jnp.zeros(num_tile_bytes, jnp.uint8)))


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
