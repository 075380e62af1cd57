"""gpt-oss (arXiv 2508.10925): every other layer with a window, a sink for each head, experts with biases and clamps.

Agrees with transformers' modeling_gpt_oss.
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
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, check_values, gguf_value, reading

# Of the architecture, not in a GGUF.
_ROPE_CONSTANTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type gpt_oss. Raises CheckpointError, UnsupportedCheckpoint."""
    config = llama.config_from_hf({"head_dim": 64, "attention_bias": True, **hf})
    with reading("config.json", "gpt_oss"):
        check_values(hf, {"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)})
        num_layers, window = config.num_layers, hf.get("sliding_window", 128)
        kinds = hf.get("layer_types") or ["sliding_attention", "full_attention"] * (num_layers // 2)
        if len(kinds) != num_layers:
            raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
        chosen = hf["num_experts_per_tok"] if "num_experts_per_tok" in hf else hf["experts_per_token"]
        moe = _moe(chosen, hf["num_local_experts"], config.ffn_size)
        return dataclasses.replace(config, windows=windows, has_sinks=True, moe=moe)


def _moe(num_chosen: int, num_experts: int, expert_size: int) -> MoeConfig:
    return MoeConfig(
        routing=Routing(num_chosen=num_chosen),
        num_experts=num_experts,
        expert_size=expert_size,
        has_biases=True,
        activation="clamped_swiglu",
    )


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture gpt-oss."""
    config = llama.dense_config_from_gguf(source)
    window = gguf_value(source, "attention.sliding_window")
    return dataclasses.replace(
        config,
        rope=llama.gguf_rope(source, config.head_size, _ROPE_CONSTANTS),
        windows=tuple(None if n % 2 else window for n in range(config.num_layers)),
        has_sinks=True,
        moe=_moe(
            gguf_value(source, "expert_used_count"),
            gguf_value(source, "expert_count"),
            gguf_value(source, "expert_feed_forward_length"),
        ),
    )


def _hf_stored(parameter: str, config: DecoderConfig) -> Stored:
    """Experts' matrices are [E, I, O], packed ones [E, O, I]; gate and up in turns in one of them."""
    name = parameter.rsplit(".", 1)[-1]
    if ".experts." not in parameter or config.moe is None or name == "down_bias":
        return AS_IT_IS
    if name == "down":
        return Stored(is_transposed=True, is_packed_so=False)
    num_experts, size = config.moe.num_experts, config.moe.expert_size
    turns = 2 * np.arange(size) + name.startswith("up")
    if name.endswith("bias"):
        return Stored(shape=(num_experts, 2 * size), rows=turns)
    shape = (num_experts, config.hidden_size, 2 * size)
    return Stored(shape=shape, columns=turns, is_transposed=True, is_packed_so=False)


MODEL = Model(
    hf_architectures=("GptOssForCausalLM",),
    gguf_architectures=("gpt-oss",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(
        names=hf_names(
            attention__sinks="self_attn.sinks",
            moe__router="mlp.router.weight",
            moe__router_bias="mlp.router.bias",
            moe__experts__down="mlp.experts.down_proj",
            moe__experts__down_bias="mlp.experts.down_proj_bias",
            **{f"moe__experts__{p}": "mlp.experts.gate_up_proj" for p in ("gate", "up")},
            **{f"moe__experts__{p}_bias": "mlp.experts.gate_up_proj_bias" for p in ("gate", "up")},
        ),
        stored=_hf_stored,
    ),
    gguf_layout=FileLayout(names=gguf_names(mlp_norm="post_attention_norm.weight")),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
