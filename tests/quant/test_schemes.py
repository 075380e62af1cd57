"""Quantized checkpoints: every fixture's matrices against their golden values, and every tensor accounted for."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints.load import open_weights
from jaxserve.quant.quantized import num_bytes, take_rows, with_leading_axes
from jaxserve.quant.schemes.registry import scheme_of
from jaxserve.quant.schemes.scheme import Scheme, check_unread
from jaxserve.quant.tiled import can_tile, tiled

FIXTURES = Path(__file__).parents[1] / "fixtures" / "quantized"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
TILED = {"awq_w4_g128", "awq_w4_g64_qwen2", "ct_int4_g32", "ct_int8_w8a8_smooth", "gptq_w4_g128"}
# Bits a value: the quants, and for each group a scale of 16 bits and, in GPTQ and AWQ, a zero of a byte.
BITS = {"ct_int4_g32": 4.5, "awq_w4_g128": 4.1875, "gptq_w4_g128": 4.1875, "mxfp4_gpt_oss": 4.25}


def opened(name: str):
    folder = FIXTURES / name
    source = open_weights(folder)
    scheme = scheme_of(json.loads((folder / "config.json").read_text()), source.names())
    assert isinstance(scheme, Scheme)
    return source, scheme


def logical_shapes(source) -> dict[str, tuple[int, ...]]:
    """Each matrix's unquantized name and shape, from the tensors of the file alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in source.names():
        shape, (module, _, leaf) = source.info(tensor).shape, tensor.rpartition(".")
        if leaf == "weight":
            shapes[tensor] = shape
        elif leaf == "scales":
            rows = source.info(f"{module}.qweight").shape[0]
            has_g_idx = f"{module}.g_idx" in source.names()
            shapes[f"{module}.weight"] = (shape[1], source.info(f"{module}.g_idx").shape[0] if has_g_idx else rows)
        elif leaf == "weight_shape":
            shapes[f"{module}.weight"] = tuple(source.read(tensor).data.tolist())
        elif leaf == "weight_global_scale":
            packed = source.info(f"{module}.weight_packed").shape
            shapes[f"{module}.weight"] = (packed[0], packed[1] * 2)
        elif leaf.endswith("_blocks"):
            shapes[tensor.removesuffix("_blocks")] = (*shape[:2], shape[2] * 32)
    return shapes


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request):
    source, scheme = opened(request.param)
    with source:
        yield request.param, source, scheme, logical_shapes(source)


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "golden.npz") as file:
        tensors = {key.removeprefix("deq:"): file[key] for key in file if key.startswith("deq:")}
    return {key: value.swapaxes(1, 2) if value.ndim == 3 else value for key, value in tensors.items()}


def test_matrices_are_the_golden_ones_bit_by_bit(checkpoint):
    name, source, scheme, shapes = checkpoint
    for tensor, want in golden(name).items():
        weight = scheme.read(source, tensor, shapes[tensor])
        assert weight.shape == shapes[tensor]
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(weight))
        for decode in (type(weight).decode, jax.jit(type(weight).decode)):
            assert np.array_equal(np.asarray(decode(weight))[: len(want)], want), tensor


def test_every_tensor_is_claimed_and_plain_ones_are_left_alone(checkpoint):
    _, source, scheme, shapes = checkpoint
    claimed: set[str] = set()
    for name, shape in shapes.items():
        tensors = scheme.tensors(name, shape)
        if tensors is None:
            assert source.info(name).format in ("F16", "BF16")
            claimed.add(name)
            continue
        assert {tensor: source.info(tensor).shape for tensor in tensors} == tensors
        unread = scheme.optional(name, shape) & source.names()
        check_unread(source, {tensor for tensor in unread if not tensor.endswith("bias")})
        claimed |= set(tensors) | unread
    left = {tensor for tensor in source.names() - claimed if not tensor.endswith("bias")}
    assert left == {tensor for tensor in left if len(source.info(tensor).shape) == 1}  # norms, sinks
    assert not any("proj." in tensor for tensor in left)


def test_what_is_not_quantized_has_no_tensors(checkpoint):
    _, _, scheme, shapes = checkpoint
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.gate.weight"):
        assert scheme.tensors(name, shapes.get(name, (256, 128))) is None


def test_rows_can_be_taken(checkpoint):
    name, source, scheme, shapes = checkpoint
    rows = np.array([5, 0, 31, 2])
    for tensor in golden(name):
        weight = scheme.read(source, tensor, shapes[tensor])
        if len(weight.shape) == 3:
            weight = jax.tree.map(lambda array: array[0], weight)
        taken = take_rows(weight, rows)
        assert taken.shape == (4, weight.shape[1])
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(taken))
        assert np.array_equal(np.asarray(taken.decode()), np.asarray(weight.decode())[rows])


def test_weights_of_one_shape_can_be_stacked(checkpoint):
    _, source, scheme, shapes = checkpoint
    shape_of_two = [name for name, shape in shapes.items() if scheme.tensors(name, shape) is not None]
    shape = shapes[shape_of_two[0]]
    weights = [scheme.read(source, name, shape) for name in shape_of_two if shapes[name] == shape][:3]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *weights)
    assert stacked.shape == (len(weights), *shape)
    assert np.array_equal(np.asarray(stacked.decode()), np.stack([np.asarray(weight.decode()) for weight in weights]))
    taken = take_rows(stacked, np.array([2, 0]))
    assert np.array_equal(np.asarray(taken.decode()), np.asarray(stacked.decode())[..., [2, 0], :])


def test_outputs_can_be_put_in_blocks(checkpoint):
    _, source, scheme, shapes = checkpoint
    name = next(name for name, shape in shapes.items() if scheme.tensors(name, shape) is not None)
    weight = scheme.read(source, name, shapes[name])
    *leading, num_outputs, num_inputs = shapes[name]
    wanted = (*leading, 2, num_outputs // 2, num_inputs)
    in_blocks = with_leading_axes(weight, wanted)
    assert in_blocks.shape == wanted
    assert np.array_equal(np.asarray(in_blocks.decode()), np.asarray(weight.decode()).reshape(wanted))


def test_the_kernel_reads_the_same_numbers_where_it_has_the_format(checkpoint):
    name, source, scheme, shapes = checkpoint
    for tensor in golden(name):
        weight = scheme.read(source, tensor, shapes[tensor])
        assert can_tile(weight) == (name in TILED)
        if name in TILED:
            assert np.array_equal(np.asarray(tiled(weight).decode()), np.asarray(weight.decode()))


def test_nothing_is_expanded(checkpoint):
    name, source, scheme, shapes = checkpoint
    for tensor in golden(name):
        weight = scheme.read(source, tensor, shapes[tensor])
        bits = 8 * num_bytes(weight) / np.prod(weight.shape)
        assert bits <= BITS.get(name, 9.6)


def test_notes_name_what_is_not_rounded():
    notes = {name: opened(name)[1].notes for name in NAMES}
    assert {name for name, lines in notes.items() if lines} == {
        "ct_fp8_channel_dynamic", "ct_fp8_tensor_static", "ct_int8_w8a8_smooth",
        "fp8_block_deepseek_v3", "fp8_block_partial_llama",
    }  # fmt: skip
    assert notes["ct_int8_w8a8_smooth"] == (
        "input_activations are not rounded to int of 8 bits (group_0 of the checkpoint's configuration)",
    )
