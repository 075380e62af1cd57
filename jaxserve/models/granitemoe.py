"""Granite 3 MoE: a llama with experts, and factors on embeddings, attention, residual sums and logits.

Agrees with transformers' modeling_granitemoe.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.load import WeightSource
from jaxserve.layers.moe import Routing
from jaxserve.models import decoder, llama
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, gguf_value, reading


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type granitemoe. Raises CheckpointError, UnsupportedCheckpoint."""
    config = llama.config_from_hf(hf)
    with reading("config.json", "granitemoe"):
        moe = MoeConfig(
            routing=Routing(num_chosen=hf.get("num_experts_per_tok", 2)),
            num_experts=hf.get("num_local_experts", 8),
            expert_size=config.ffn_size,
        )
        return dataclasses.replace(
            config,
            moe=moe,
            embedding_multiplier=hf.get("embedding_multiplier", 1.0),
            residual_multiplier=hf.get("residual_multiplier", 1.0),
            attention_scale=hf.get("attention_multiplier", 1.0),
            logits_divisor=hf.get("logits_scaling", 1.0),
        )


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture granitemoe."""
    config = llama.dense_config_from_gguf(source)
    moe = MoeConfig(
        routing=Routing(num_chosen=gguf_value(source, "expert_used_count")),
        num_experts=gguf_value(source, "expert_count"),
        expert_size=config.ffn_size,
    )
    return dataclasses.replace(
        config,
        moe=moe,
        embedding_multiplier=gguf_value(source, "embedding_scale"),
        residual_multiplier=gguf_value(source, "residual_scale"),
        attention_scale=gguf_value(source, "attention.scale"),
        logits_divisor=gguf_value(source, "logit_scale"),
    )


def _hf_stored(parameter: str, config: DecoderConfig) -> Stored:
    """gate and up of an expert lie one below the other in one matrix."""
    halves = {"gate": 0, "up": 1}
    name = parameter.rsplit(".", 1)[-1]
    if name not in halves or config.moe is None:
        return AS_IT_IS
    size = config.moe.expert_size
    shape = (config.moe.num_experts, 2 * size, config.hidden_size)
    return Stored(shape=shape, rows=halves[name] * size + np.arange(size))


MODEL = Model(
    hf_architectures=("GraniteMoeForCausalLM",),
    gguf_architectures=("granitemoe",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(
        names=hf_names(
            moe__router="block_sparse_moe.router.layer.weight",
            moe__experts__gate="block_sparse_moe.input_linear.weight",
            moe__experts__up="block_sparse_moe.input_linear.weight",
            moe__experts__down="block_sparse_moe.output_linear.weight",
        ),
        stored=_hf_stored,
    ),
    gguf_layout=FileLayout(names=gguf_names(), stored=llama.gguf_stored),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
