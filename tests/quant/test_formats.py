"""Every format of the dict, by the same tests: round trip, golden values, llama.cpp's rounding, matmul."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.errors import UnsupportedCheckpoint
from checkpoints.load import open_weights
from checkpoints.tensors import BLOCK_SIZES, HostTensor
from jaxserve.quant.formats import FORMATS, format_named, weight_from_tensor
from jaxserve.quant.quantized import decode, embedding_rows, matmul, num_bytes, take_rows

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
NAMES = sorted(FORMATS)
BLOCK_NAMES = [name for name in NAMES if FORMATS[name].block_length > 1]
# Largest error of a round trip, in units of the largest value of a block: half a step, and float16 rounding of the
# scale; Q4_0 and Q5_0 cut the side opposite to their extreme by up to a whole step.
ROUND_TRIP_ERROR = {
    "F32": 0,
    "F16": 2**-11,
    "BF16": 2**-8,
    "Q4_0": 1 / 8 + 0.005,
    "Q4_1": 1 / 15 + 0.005,
    "Q5_0": 1 / 16 + 0.005,
    "Q5_1": 1 / 31 + 0.005,
    "Q8_0": 0.5 / 127 + 0.001,
    # Sub-blocks: a step is up to two extremes over the highest quant, and scales of 4 or 6 bits are off by half a unit
    # of the super-block's largest.
    "Q2_K": 0.55,
    "Q3_K": 0.4,
    "Q4_K": 0.12,
    "Q5_K": 0.08,
    "Q6_K": 0.06,
    "IQ4_NL": 0.12,  # the last level of the side opposite to the extreme is 113 of 127
    "IQ4_XS": 0.2,
    "MXFP4": 0.26,  # the largest is 6 times a power of two; a block's extreme may be up to 8
}
# Bytes a row of 512 takes more than in the file: packed 6-bit scales are kept as bytes.
EXTRA_BYTES = {"Q3_K": 2 * 4, "Q4_K": 2 * 4, "Q5_K": 2 * 4, "IQ4_XS": 2 * 2}
LENGTH = 512
NOT_ENCODED_BY_THE_PACKAGE = {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


def random_matrix(num_outputs: int = 8, num_inputs: int = 512, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(num_outputs, num_inputs)).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name: str) -> None:
    matrix = random_matrix()
    weight = FORMATS[name].encode(matrix)
    assert weight.format == name
    assert weight.shape == matrix.shape
    error = np.abs(np.asarray(decode(weight)) - matrix).reshape(8, -1, 32).max(axis=-1)
    assert (error <= ROUND_TRIP_ERROR[name] * np.abs(matrix).reshape(8, -1, 32).max(axis=-1)).all()


@pytest.mark.parametrize("file_name", ["gguf_tensors", "gguf_llama_legacy", "gguf_llama_kquants"])
@pytest.mark.parametrize("name", NAMES)
def test_decode_equals_the_goldens(name: str, file_name: str) -> None:
    golden = np.load(FIXTURES / file_name / "golden.npz")
    checked = 0
    with open_weights(FIXTURES / file_name / "model.gguf") as source:
        for key in golden.files:
            if not key.startswith("deq:") or source.info(key[4:]).format != name:
                continue
            weight = weight_from_tensor(source.read(key[4:]))
            values = np.asarray(jax.jit(decode)(weight))
            np.testing.assert_array_equal(values[: len(golden[key])], golden[key])
            checked += 1
    assert checked or name == "F32" or file_name != "gguf_tensors"  # that file has a golden of every other format


@pytest.mark.parametrize("name", sorted(set(NAMES) - NOT_ENCODED_BY_THE_PACKAGE))
@pytest.mark.parametrize("kind", ["normal", "zeros", "ties", "tiny"])
def test_encode_agrees_with_the_reference_bit_for_bit(name: str, kind: str) -> None:
    matrix = {
        "normal": random_matrix(seed=3),
        "zeros": np.zeros((8, LENGTH), np.float32),
        "ties": np.tile(np.arange(-48, 48, dtype=np.float32) / 2, (8, 6))[:, :LENGTH],
        "tiny": random_matrix(seed=4) * np.float32(1e-6),
    }[kind]
    expected = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[name])
    expected_weight = FORMATS[name].from_gguf_bytes(expected.view(np.uint8), matrix.shape)
    for ours, theirs in zip(
        jax.tree.leaves(FORMATS[name].encode(matrix)), jax.tree.leaves(expected_weight), strict=True
    ):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_spec_has_the_shapes_of_a_weight(name: str) -> None:
    weight = FORMATS[name].encode(random_matrix())
    spec = FORMATS[name].spec(8, LENGTH)
    assert jax.tree.structure(spec) == jax.tree.structure(weight)
    for expected, array in zip(jax.tree.leaves(spec), jax.tree.leaves(weight), strict=True):
        assert (expected.shape, expected.dtype) == (array.shape, array.dtype)
    block = BLOCK_SIZES[name]
    assert num_bytes(weight) == num_bytes(spec) == 8 * (block.row_bytes(LENGTH) + EXTRA_BYTES.get(name, 0))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matmul_is_x_times_the_decoded_matrix(name: str, dtype: jnp.dtype) -> None:
    weight = jax.tree.map(jnp.asarray, FORMATS[name].encode(random_matrix()))
    x = jnp.asarray(random_matrix(5, seed=1), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(decode(weight), np.float64).T
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        result = jax.jit(matmul)(x, weight)
    assert result.dtype == jnp.float32
    # float32 sums of 96 products of size about 1: a few units in the last place of values up to 40
    np.testing.assert_allclose(np.asarray(result), exact, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_decoded_matrix(name: str) -> None:
    weight = FORMATS[name].encode(random_matrix())
    ids = np.array([3, 0, 7, 3])
    expected = np.asarray(decode(weight))[ids]
    np.testing.assert_array_equal(np.asarray(jax.jit(embedding_rows)(weight, jnp.asarray(ids))), expected)
    on_host = take_rows(weight, ids)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(on_host))
    np.testing.assert_array_equal(np.asarray(decode(on_host)), expected)


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_weights_stay_packed_when_stacked_for_experts(name: str) -> None:
    first, second = (FORMATS[name].encode(random_matrix(seed=seed)) for seed in (5, 6))
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), first, second)
    assert stacked.shape == (2, 8, LENGTH)
    np.testing.assert_array_equal(np.asarray(decode(stacked)[1]), np.asarray(decode(second)))


@pytest.mark.parametrize("name", BLOCK_NAMES)
def test_any_bytes_decode_as_the_reference_decodes_them(name: str) -> None:
    """Random bytes: every bit pattern of the quants, and scales that are negative, infinite or no number."""
    raw = np.random.default_rng(7).integers(0, 256, (256, 2 * BLOCK_SIZES[name].num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    weight = FORMATS[name].from_gguf_bytes(raw, (256, 2 * BLOCK_SIZES[name].num_elements))
    values = np.asarray(decode(weight))
    if name == "MXFP4":  # XLA on CPU takes subnormal numbers for 0, and the scales of exponents 0 and 1 are such
        is_subnormal = np.repeat(raw[:, :: BLOCK_SIZES[name].num_bytes] < 2, 32, axis=-1)
        expected = np.where(is_subnormal | (np.abs(expected) < np.finfo(np.float32).tiny), 0, expected)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", sorted(NOT_ENCODED_BY_THE_PACKAGE))
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e3])
def test_encode_of_extremes_stays_within_them(name: str, scale: float) -> None:
    """Scales that round to zero or that are large leave finite values no larger than the matrix needs."""
    matrix = random_matrix(seed=9) * np.float32(scale)
    values = np.asarray(decode(FORMATS[name].encode(matrix)))
    assert np.isfinite(values).all()
    assert np.abs(values).max() <= 1.2 * np.abs(matrix).max()


@pytest.mark.parametrize("name", sorted(set(BLOCK_SIZES) - set(FORMATS)))
def test_formats_not_computed_with_are_refused_by_name(name: str) -> None:
    tensor = HostTensor(name="blk.0.ffn_up.weight", data=np.zeros((1, 8), np.uint8), format=name, shape=(1, 256))
    with pytest.raises(UnsupportedCheckpoint, match=rf"'blk.0.ffn_up.weight' is stored as {name};.*Q4_1"):
        weight_from_tensor(tensor)


def test_format_named_says_who_wants_it() -> None:
    assert format_named("Q4_1", wanted_by="--weights") is FORMATS["Q4_1"]
    with pytest.raises(UnsupportedCheckpoint, match="--weights is stored as IQ2_XS"):
        format_named("IQ2_XS", wanted_by="--weights")
