"""Qwen 2, 2.5 and 3 (arXiv 2407.10671, 2505.09388): a llama with biases on q, k and v, or with norms on q and k.

In GGUF files the rotated halves of q and k are not interleaved. Agrees with transformers' modeling_qwen2 and
modeling_qwen3. Their mixtures of experts are in qwen_moe.py.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.load import WeightSource
from jaxserve.models import decoder, llama
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import FileLayout, Model, reading


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of a model_type qwen2... or qwen3.... Raises CheckpointError, UnsupportedCheckpoint."""
    is_second = str(hf.get("model_type")).startswith("qwen2")
    config = llama.config_from_hf(hf if is_second else {"head_dim": 128, **hf})  # Qwen3Config's default
    with reading("config.json", hf.get("model_type")):
        config = dataclasses.replace(config, windows=_windows(hf, config.num_layers))
    if is_second:
        return dataclasses.replace(config, attention_biases=("q", "k", "v") if hf.get("qkv_bias", True) else ())
    return dataclasses.replace(config, qk_norm="head")


def _windows(hf: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: those from max_window_layers on have one, where it is in use at all."""
    if not hf.get("use_sliding_window"):
        return ()
    first = hf.get("max_window_layers", 28)
    kinds = hf.get("layer_types") or [
        "sliding_attention" if n >= first else "full_attention" for n in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    return tuple(hf.get("sliding_window", 4096) if kind == "sliding_attention" else None for kind in kinds)


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture qwen2 or qwen3, or of their mixtures."""
    config = llama.dense_config_from_gguf(source)
    is_third = source.metadata["general.architecture"].startswith("qwen3")
    return dataclasses.replace(config, qk_norm="head" if is_third else None)


MODEL = Model(
    hf_architectures=("Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    gguf_architectures=("qwen2", "qwen3"),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(names=hf_names()),
    gguf_layout=FileLayout(names=gguf_names()),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
