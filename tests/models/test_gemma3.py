"""Gemma 3 checkpoints against logits of an independent implementation (transformers, float32, one prompt at a time)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import (
    FIXTURES,
    TOLERANCE,
    assert_parity,
    whole_prompt_logits,
    written_as_gguf,
)
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.load import open_weights
from jaxserve.models.gemma3 import MODEL, config_from_hf
from pallas_kernels.kernels import REFERENCE

FOLDER = FIXTURES / "models" / "gemma3_text"
THE_CAPITAL_OF_FRANCE_IS = [2, 818, 5279, 529, 7001, 563]


def hf_config(**changes: Any) -> dict[str, Any]:
    """The fixture's config.json with fields replaced, or taken out where None is given."""
    config = {**json.loads((FOLDER / "config.json").read_text()), **changes}
    return {name: value for name, value in config.items() if value is not None}


@pytest.mark.parametrize("change", [{"kernels": REFERENCE}, {"stacked": True}, {"weights": "packed"}], ids=str)
def test_other_ways_to_run_give_the_same_logits(change):
    assert_parity(FOLDER, **change)


GGUF_METADATA: dict[str, Any] = {
    "block_count": 3,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": 3,
    "rope.freq_base": 1e6,
    "rope.scaling.type": "linear",
    "rope.scaling.factor": 8.0,
}


def test_the_same_model_as_a_gguf(tmp_path):
    """Its norms hold 1 + w, and its queries are scaled by the head size; the fixture scales by 24."""
    factors = {"q_norm": (32 / 24) ** 0.5}
    assert_parity(FOLDER, written_as_gguf(FOLDER, tmp_path / "model.gguf", MODEL, GGUF_METADATA, factors))


def test_a_gguf_without_a_needed_key_is_refused_in_one_line(tmp_path):
    metadata = {key: value for key, value in GGUF_METADATA.items() if key != "attention.sliding_window"}
    path = written_as_gguf(FOLDER, tmp_path / "model.gguf", MODEL, metadata)
    with pytest.raises(CheckpointError, match=rf"^{path}: metadata gemma3.attention.sliding_window is missing$"):
        whole_prompt_logits(path, np.arange(4))


def test_the_text_half_of_an_image_and_text_checkpoint(tmp_path):
    with open_weights(FOLDER) as source:
        tensors = {f"language_model.{name}": np.asarray(source.read(name).data) for name in source.names()}
    left_out = np.zeros((2, 2), np.float32)
    tensors["multi_modal_projector.mm_input_projection_weight"] = left_out
    tensors["vision_tower.vision_model.encoder.layers.0.self_attn.out_proj.weight"] = left_out
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": hf_config(), "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_parity(FOLDER, tmp_path)


def test_every_form_of_the_configuration_is_the_same_model():
    want = config_from_hf(hf_config())
    ropes = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    }
    newer = hf_config(rope_parameters=ropes, rope_theta=None, rope_local_base_freq=None, rope_scaling=None)
    assert config_from_hf(newer) == want
    assert config_from_hf(hf_config(layer_types=None)) == want  # sliding_window_pattern says it
    assert config_from_hf({"text_config": hf_config(), "vision_config": {}}) == want
    assert want.layer_kinds == ("sliding_attention", "sliding_attention", "full_attention")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"hidden_activation": "silu"}, UnsupportedCheckpoint, "hidden_activation 'silu'; this version computes"),
        ({"use_bidirectional_attention": True}, UnsupportedCheckpoint, "use_bidirectional_attention True"),
        ({"attention_bias": True}, UnsupportedCheckpoint, "attention_bias True"),
        ({"rope_scaling": {"rope_type": "other"}}, UnsupportedCheckpoint, "rope type 'other'"),
        ({"layer_types": ["full_attention"]}, UnsupportedCheckpoint, "layer_types has 1 entries for 3 layers"),
        ({"hidden_size": None}, CheckpointError, "field 'hidden_size' is missing"),
        ({"num_hidden_layers": "3"}, CheckpointError, "a value no gemma3 has"),
    ],
)
def test_what_is_not_computed_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        config_from_hf(hf_config(**change))


@pytest.mark.slow
def test_a_real_file_of_four_block_formats(gemma3_path: Path):
    """Q4_K, Q6_K, Q5_0 and Q8_0 against float64 numpy on weights that the `gguf` package dequantized."""
    from numpy_gemma3 import Checkpoint, last_logits

    want = last_logits(Checkpoint(str(gemma3_path)), THE_CAPITAL_OF_FRANCE_IS)
    got = whole_prompt_logits(gemma3_path, np.asarray(THE_CAPITAL_OF_FRANCE_IS))[-1]
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)
