"""Qwen 2, 2.5 and 3, dense (arXiv 2407.10671, 2505.09388): a llama with biases on q, k and v, or with norms on q and k.

In GGUF files the rotated halves of q and k are not interleaved. Agrees with transformers' modeling_qwen2 and
modeling_qwen3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.errors import UnsupportedCheckpoint
from checkpoints.load import WeightSource
from jaxserve.models import llama
from jaxserve.models.llama import LlamaConfig
from jaxserve.models.model import FileLayout, Model


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """From a config.json of model_type qwen2 or qwen3. Raises CheckpointError, UnsupportedCheckpoint."""
    if hf.get("use_sliding_window"):
        raise UnsupportedCheckpoint("config.json: use_sliding_window is true; this version computes Qwen without it")
    if hf.get("model_type") == "qwen2":
        return dataclasses.replace(llama.config_from_hf(hf), attention_biases=("q", "k", "v"))
    config = llama.config_from_hf({"head_dim": 128, **hf})  # Qwen3Config's default
    return dataclasses.replace(config, has_qk_norm=True)


def config_from_gguf(source: WeightSource) -> LlamaConfig:
    """From a GGUF of architecture qwen2 or qwen3."""
    config = llama.config_from_gguf(source)
    return dataclasses.replace(config, has_qk_norm=source.metadata["general.architecture"] == "qwen3")


MODEL = Model(
    hf_architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    gguf_architectures=("qwen2", "qwen3"),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=llama.param_specs,
    hf_layout=FileLayout(names=llama.HF_NAMES),
    gguf_layout=FileLayout(names=llama.GGUF_NAMES),
    forward=llama.forward,
    unembed=llama.logits,
)
