"""OLMoE (arXiv 2409.02060): a llama whose queries and keys are normed over all heads together, with experts.

Agrees with transformers' modeling_olmoe.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.load import WeightSource
from jaxserve.layers.moe import Routing
from jaxserve.models import decoder, llama
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import FileLayout, Model, check_values, gguf_value, reading


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type olmoe. Raises CheckpointError, UnsupportedCheckpoint."""
    config = llama.config_from_hf(hf)
    with reading("config.json", "olmoe"):
        check_values(hf, {"clip_qkv": (None,)})
        moe = MoeConfig(
            routing=Routing(num_chosen=hf.get("num_experts_per_tok", 8), is_normalized=hf.get("norm_topk_prob", False)),
            num_experts=hf.get("num_experts", 64),
            expert_size=config.ffn_size,
        )
        return dataclasses.replace(config, qk_norm="projection", moe=moe)


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture olmoe."""
    config = llama.dense_config_from_gguf(source)
    moe = MoeConfig(
        routing=Routing(num_chosen=gguf_value(source, "expert_used_count"), is_normalized=False),
        num_experts=gguf_value(source, "expert_count"),
        expert_size=config.ffn_size,
    )
    return dataclasses.replace(config, qk_norm="projection", moe=moe)


MODEL = Model(
    hf_architectures=("OlmoeForCausalLM",),
    gguf_architectures=("olmoe",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(names=hf_names()),
    gguf_layout=FileLayout(names=gguf_names()),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
