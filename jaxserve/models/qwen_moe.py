"""Mixtures of experts of Qwen 2 and 3 (arXiv 2407.10671, 2505.09388): Qwen's attention before a mixture.

The second has an expert that all tokens meet, weighed by a sigmoid. Agrees with transformers' modeling_qwen2_moe and
modeling_qwen3_moe.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from checkpoints.load import WeightSource
from jaxserve.layers.moe import Routing
from jaxserve.models import decoder, qwen
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, gguf_value, reading

_SHARED = {f"moe__shared__{p}": f"mlp.shared_expert.{p}_proj.weight" for p in ("gate", "up", "down")}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type qwen2_moe or qwen3_moe. Raises CheckpointError, UnsupportedCheckpoint."""
    config = qwen.config_from_hf(hf)
    with reading("config.json", hf.get("model_type")):
        num_experts = hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]
        shared = hf.get("shared_expert_intermediate_size", 0) if hf.get("model_type") == "qwen2_moe" else 0
        moe = MoeConfig(
            routing=Routing(num_chosen=hf["num_experts_per_tok"], is_normalized=hf.get("norm_topk_prob", False)),
            num_experts=num_experts,
            expert_size=hf["moe_intermediate_size"],
            shared_size=shared,
            has_shared_gate=shared > 0,
        )
        step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or ()
        dense_layers = tuple(n for n in range(config.num_layers) if n in dense or (n + 1) % step)
        return dataclasses.replace(config, moe=moe, dense_layers=dense_layers)


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture qwen2moe or qwen3moe, whose layers all have experts."""
    config, meta = qwen.config_from_gguf(source), source.metadata
    is_third = meta["general.architecture"] == "qwen3moe"
    moe = MoeConfig(
        routing=Routing(num_chosen=gguf_value(source, "expert_used_count"), is_normalized=is_third),
        num_experts=gguf_value(source, "expert_count"),
        expert_size=gguf_value(source, "expert_feed_forward_length"),
        shared_size=0 if is_third else gguf_value(source, "expert_shared_feed_forward_length"),
        has_shared_gate=not is_third,
    )
    return dataclasses.replace(config, moe=moe)


def _hf_stored(parameter: str, config: DecoderConfig) -> Stored:
    """The shared expert's gate is a matrix of one row."""
    return Stored(shape=(1, config.hidden_size)) if parameter.endswith("shared_gate") else AS_IT_IS


MODEL = Model(
    hf_architectures=("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
    gguf_architectures=("qwen2moe", "qwen3moe"),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(
        names=hf_names(**_SHARED, moe__shared_gate="mlp.shared_expert_gate.weight"), stored=_hf_stored
    ),
    gguf_layout=FileLayout(names=gguf_names()),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
