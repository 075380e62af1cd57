"""GLM-4.5 (arXiv 2508.06471): DeepSeek-V3's mixture behind grouped-query attention with half of each head rotated.

Agrees with transformers' modeling_glm4_moe.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.load import WeightSource
from jaxserve.layers.moe import Routing
from jaxserve.models import decoder, llama
from jaxserve.models.config_fields import first_layers
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import FileLayout, Model, gguf_value, reading

# A module that predicts further ahead repeats the model's own table and output matrix.
MTP_COPIES = ("model.layers.{layer}.embed_tokens.weight", "model.layers.{layer}.shared_head.head.weight")


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type glm4_moe. Raises CheckpointError, UnsupportedCheckpoint."""
    config = llama.config_from_hf({"partial_rotary_factor": 0.5, **hf})  # Glm4MoeConfig's default
    with reading("config.json", "glm4_moe"):
        return dataclasses.replace(
            config,
            attention_biases=("q", "k", "v") if hf.get("attention_bias", False) else (),
            qk_norm="head" if hf.get("use_qk_norm", False) else None,
            moe=sigmoid_moe(hf),
            dense_layers=first_layers(hf.get("first_k_dense_replace", 1)),
            num_mtp=hf.get("num_nextn_predict_layers", 0),
        )


def sigmoid_moe(hf: Mapping[str, Any]) -> MoeConfig:
    """DeepSeek-V3's mixture: sigmoids, a correction for choosing, groups of experts, an expert that all meet."""
    routing = Routing(
        num_chosen=hf["num_experts_per_tok"],
        scores="sigmoid",
        is_normalized=hf.get("norm_topk_prob", True),
        scaling=hf.get("routed_scaling_factor", 1.0),
        num_groups=hf.get("n_group") or 1,
        num_kept_groups=hf.get("topk_group") or 1,
        group_score="top2",
    )
    return MoeConfig(
        routing=routing,
        num_experts=hf["n_routed_experts"],
        expert_size=hf["moe_intermediate_size"],
        shared_size=hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
        has_correction=True,
    )


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture glm4moe. Modules that predict further ahead are left out of such files' use."""
    config, meta = llama.dense_config_from_gguf(source), source.metadata
    num_mtp = meta.get("glm4moe.nextn_predict_layers", 0)
    routing = Routing(
        num_chosen=gguf_value(source, "expert_used_count"),
        scores="sigmoid",
        is_normalized=meta.get("glm4moe.expert_weights_norm", True),
        scaling=meta.get("glm4moe.expert_weights_scale", 1.0),
    )
    expert_size = gguf_value(source, "expert_feed_forward_length")
    moe = MoeConfig(
        routing=routing,
        num_experts=gguf_value(source, "expert_count"),
        expert_size=expert_size,
        shared_size=expert_size * meta.get("glm4moe.expert_shared_count", 0),
        has_correction=True,
    )
    return dataclasses.replace(
        config,
        num_layers=config.num_layers - num_mtp,
        qk_norm="head" if "blk.0.attn_q_norm.weight" in source.names() else None,
        moe=moe,
        dense_layers=first_layers(meta.get("glm4moe.leading_dense_block_count", 1)),
        num_mtp=num_mtp,
    )


MODEL = Model(
    hf_architectures=("Glm4MoeForCausalLM",),
    gguf_architectures=("glm4moe",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(names=hf_names(), ignored=MTP_COPIES),
    gguf_layout=FileLayout(
        names=gguf_names(mlp_norm="post_attention_norm.weight"),
        ignored=("blk.{layer}.nextn.embed_tokens.weight", "blk.{layer}.nextn.shared_head_head.weight"),
    ),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
