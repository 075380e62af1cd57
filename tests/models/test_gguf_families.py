"""Families that have no GGUF among the reference files: their safetensors written as one must give the same logits."""

from typing import Any

import numpy as np
import pytest
from parity import FIXTURES, assert_parity, written_as_gguf

from jaxserve.models import glm4_moe, granitemoe, mixtral, olmoe, phi3, qwen_moe
from jaxserve.models.model import Model

COMMON: dict[str, Any] = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "context_length": 512,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
}
MIXTURES: dict[str, tuple[Model, dict[str, Any]]] = {
    "mixtral": (
        mixtral.MODEL,
        {
            "feed_forward_length": 48,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e6,
            "expert_count": 6,
            "expert_used_count": 2,
        },
    ),
    "qwen3_moe": (
        qwen_moe.MODEL,
        {"attention.key_length": 32, "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 40},
    ),
    "olmoe": (
        olmoe.MODEL,
        {
            "feed_forward_length": 32,
            "attention.head_count_kv": 4,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "expert_count": 8,
            "expert_used_count": 3,
        },
    ),
    "granitemoe": (
        granitemoe.MODEL,
        {
            "feed_forward_length": 32,
            "expert_count": 6,
            "expert_used_count": 2,
            "embedding_scale": 1.5,
            "residual_scale": 0.4,
            "attention.scale": 0.4,
            "logit_scale": 0.5,
        },
    ),
    "glm4_moe": (
        glm4_moe.MODEL,
        {
            "attention.key_length": 32,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": 16,
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.5,
            "leading_dense_block_count": 1,
        },
    ),
}


ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}  # not the first of the family


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_of_experts(name, tmp_path):
    model, metadata = MIXTURES[name]
    folder, to = FIXTURES / "models" / name, tmp_path / "model.gguf"
    path = written_as_gguf(folder, to, model, COMMON | metadata, architecture=ARCHITECTURES.get(name))
    assert_parity(folder, path)
    assert_parity(folder, path, weights="packed")


def test_phi3_with_its_rope_factors_as_tensors(tmp_path):
    folder = FIXTURES / "models" / "phi3_longrope"
    metadata = COMMON | {
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.scaling.original_context_length": 96,
    }
    factors = {
        "rope_factors_long.weight": np.asarray([1.0, 1.9, 2.8, 3.7, 4.6, 5.5, 6.4, 7.3], np.float32),
        "rope_factors_short.weight": np.asarray([1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35], np.float32),
    }
    assert_parity(folder, written_as_gguf(folder, tmp_path / "model.gguf", phi3.MODEL, metadata, extra=factors))
