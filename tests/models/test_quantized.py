"""Quantized checkpoints against the reference's logits, with weights packed as in the file and written out."""

import json
import shutil

import numpy as np
import pytest
from fixture_files import golden_logits
from parity import FIXTURES, token_by_token_logits, whole_prompt_logits

from checkpoints.errors import CheckpointError
from jaxserve.engine.loading import Recipe, cpu_kernel_needs, load_model, tiled_formats
from jaxserve.engine.progress import Silent
from jaxserve.quant.quantized import Weight, num_bytes

FOLDER = FIXTURES / "quantized"
NAMES = sorted(path.name for path in FOLDER.iterdir())
TOLERANCE = 2e-3
PACKED = Recipe(layout="packed", dtype="float32")
TILES = Recipe(layout="tiled", dtype="float32")
# The formats that attention's and the MLP's matrices of the first layer are held in.
HELD = {
    "awq_w4_g128": "INT4",
    "awq_w4_g64_qwen2": "INT4",
    "ct_fp8_channel_dynamic": "F8_E4M3",
    "ct_fp8_tensor_static": "F8_E4M3",
    "ct_int4_g32": "INT4",
    "ct_int8_w8a8_smooth": "INT8",
    "ct_nvfp4_qwen3": "NVFP4",
    "fp8_block_deepseek_v3": "F8_E4M3",
    "fp8_block_partial_llama": "F8_E4M3",
    "gptq_w4_g128": "INT4",
    "gptq_w4_g32_desc_act_mixtral": "INT4",
    "gptq_w8_g32_qwen3": "INT8",
    "mxfp4_gpt_oss": "MXFP4",
}


@pytest.mark.parametrize("name", NAMES)
def test_prefill_of_packed_weights_gives_the_references_logits(name):
    want = np.load(FOLDER / name / "golden.npz")
    prompt = int(want["all_logits_prompt"])
    length = int(want["lengths"][prompt])
    got = whole_prompt_logits(FOLDER / name, want["input_ids"][prompt, :length], weights="packed")
    np.testing.assert_allclose(got, golden_logits(want["all_logits"])[:length], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_decode_of_written_out_weights_gives_the_references_logits(name):
    want = np.load(FOLDER / name / "golden.npz")
    shortest = int(np.argmin(want["lengths"]))
    got = token_by_token_logits(FOLDER / name, want["input_ids"][shortest, : want["lengths"][shortest]])
    np.testing.assert_allclose(got[-1], want["last_logits"][shortest], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["fp8_block_partial_llama", "gptq_w4_g32_desc_act_mixtral"])
def test_layers_of_several_formats_can_be_stacked(name):
    want = np.load(FOLDER / name / "golden.npz")
    shortest = int(np.argmin(want["lengths"]))
    ids = want["input_ids"][shortest, : want["lengths"][shortest]]
    got = whole_prompt_logits(FOLDER / name, ids, weights="packed", stacked=True)
    np.testing.assert_allclose(got[-1], want["last_logits"][shortest], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_matrices_stay_packed(name):
    loaded = load_model(FOLDER / name, PACKED, Silent())
    layer = loaded.params["layers"][0]
    part = layer["moe"]["experts"]["down"] if name in ("mxfp4_gpt_oss",) else layer["attention"]["o"]
    assert isinstance(part, Weight)
    assert part.format == HELD[name]
    assert num_bytes(part) < 0.34 * 4 * np.prod(part.shape)
    assert loaded.held_bytes <= 1.2 * sum(loaded.file_bytes.values())  # MLA multiplies with a half of kv_b in float32


@pytest.mark.parametrize("name", ["awq_w4_g128", "ct_int8_w8a8_smooth", "gptq_w8_g32_qwen3", "mxfp4_gpt_oss"])
def test_the_kernels_that_are_built_are_those_that_are_needed(name):
    needs = cpu_kernel_needs(FOLDER / name)[0]
    found = tiled_formats(load_model(FOLDER / name, TILES, Silent()))
    assert found <= needs.single | needs.experts
    assert (HELD[name] in found) == (name not in ("gptq_w8_g32_qwen3", "mxfp4_gpt_oss"))


def test_every_wrong_tensor_is_in_one_error(tmp_path):
    folder = shutil.copytree(FOLDER / "gptq_w4_g128", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"28 wrongly shaped.*q_proj\.qzeros is \[1, 16\], not \[2, 16\]"):
        load_model(folder, PACKED, Silent())


def test_without_its_configuration_a_quantized_file_is_refused(tmp_path):
    folder = shutil.copytree(FOLDER / "gptq_w4_g128", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"has no quantization_config, and the file has '.*\.qweight'"):
        load_model(folder, PACKED, Silent())
