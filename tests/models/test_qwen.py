"""What is particular to dense Qwen; test_parity.py compares it with an independent implementation."""

import json

import pytest
from parity import FIXTURES, assert_parity, written_as_gguf

from checkpoints.errors import UnsupportedCheckpoint
from jaxserve.models.qwen import MODEL, config_from_hf


def test_gguf_with_biases_on_three_of_four(tmp_path):
    folder = FIXTURES / "models" / "qwen2_bias"
    metadata = {
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "context_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    assert_parity(folder, written_as_gguf(folder, tmp_path / "model.gguf", MODEL, metadata))


def test_the_layers_from_max_window_layers_on_have_a_window():
    hf = json.loads((FIXTURES / "models" / "qwen2_bias" / "config.json").read_text())
    config = config_from_hf({**hf, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1})
    assert config.windows == (None, 32)
    assert config_from_hf(hf).windows == ()
    with pytest.raises(UnsupportedCheckpoint, match="layer_types has 1 entries for 2 layers"):
        config_from_hf({**hf, "use_sliding_window": True, "layer_types": ["full_attention"]})
