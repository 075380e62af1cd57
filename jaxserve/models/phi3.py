"""Phi-3, Phi-3.5 and Phi-4 (arXiv 2404.14219): a llama with joined projections and longrope.

Agrees with transformers' modeling_phi3.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.load import WeightSource
from jaxserve.layers.rope import Rope, make_rope
from jaxserve.models import decoder, llama
from jaxserve.models.decoder import DecoderConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, gguf_value, reading


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type phi3. Raises CheckpointError, UnsupportedCheckpoint."""
    return llama.config_from_hf(hf)


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture phi3, whose longrope factors are tensors."""
    config, meta = llama.dense_config_from_gguf(source), source.metadata
    window = meta.get("phi3.attention.sliding_window")
    if window:
        config = dataclasses.replace(config, windows=(window,) * config.num_layers)
    if "rope_factors_long.weight" not in source.names():
        return config
    with reading(str(source.path), "phi3"):
        return dataclasses.replace(config, rope=_longrope(source, config))


def _longrope(source: WeightSource, config: DecoderConfig) -> Rope:
    meta = source.metadata
    long, short = (
        source.read(f"rope_factors_{name}.weight").data.astype(np.float64).reshape(-1) for name in ("long", "short")
    )
    scaling: dict[str, Any] = {
        "type": "longrope",
        "long_factor": long.tolist(),
        "short_factor": short.tolist(),
        "original_max_position_embeddings": gguf_value(source, "rope.scaling.original_context_length"),
        "attention_factor": meta.get("phi3.rope.scaling.attn_factor"),
    }
    rotated = meta.get("phi3.rope.dimension_count", config.head_size)
    return make_rope(rotated, meta.get("phi3.rope.freq_base", 10000.0), scaling, config.max_position)


def _stored(parameter: str, config: DecoderConfig) -> Stored:
    """q, k and v lie one below the other in one matrix, gate and up in another."""
    name, H = parameter.rsplit(".", 1)[-1], config.head_size
    queries, keys = config.num_heads * H, config.num_kv_heads * H
    joined = {"q": (0, queries), "k": (queries, keys), "v": (queries + keys, keys)}
    rows = queries + 2 * keys
    if name in ("gate", "up"):
        joined = {"gate": (0, config.ffn_size), "up": (config.ffn_size, config.ffn_size)}
        rows = 2 * config.ffn_size
    if name not in joined:
        return AS_IT_IS
    first, size = joined[name]
    return Stored(shape=(rows, config.hidden_size), rows=first + np.arange(size))


MODEL = Model(
    hf_architectures=("Phi3ForCausalLM",),
    gguf_architectures=("phi3",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(
        names=hf_names(
            **{f"attention__{p}": "self_attn.qkv_proj.weight" for p in "qkv"},
            **{f"mlp__{p}": "mlp.gate_up_proj.weight" for p in ("gate", "up")},
        ),
        stored=_stored,
    ),
    gguf_layout=FileLayout(
        names=gguf_names(
            **{f"attention__{p}": "attn_qkv.weight" for p in "qkv"},
            **{f"mlp__{p}": "ffn_up.weight" for p in ("gate", "up")},
        ),
        ignored=("rope_factors_long.weight", "rope_factors_short.weight"),
        stored=_stored,
    ),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
