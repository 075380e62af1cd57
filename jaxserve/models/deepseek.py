"""DeepSeek-V2, V3 and R1 (arXiv 2405.04434, 2412.19437): latent attention before a mixture with shared experts.

Agrees with transformers' modeling_deepseek_v2 and modeling_deepseek_v3. Files have rotated pairs side by side; here
they stand in halves.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.load import WeightSource
from jaxserve.layers.mla import MlaSizes
from jaxserve.layers.moe import Routing
from jaxserve.models import decoder, llama
from jaxserve.models.config_fields import first_layers
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.glm4_moe import MTP_COPIES, sigmoid_moe
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, check_values, gguf_value, reading

_SOFTMAX, _SIGMOID = 1, 2  # of GGUF's expert_gating_func


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type deepseek_v2 or deepseek_v3. Raises CheckpointError, UnsupportedCheckpoint."""
    config = llama.config_from_hf(hf)
    with reading("config.json", hf.get("model_type")):
        check_values(hf, {"attention_bias": (False,), "moe_layer_freq": (1,), "rope_interleave": (True,)})
        sizes = MlaSizes(
            latent_size=hf["kv_lora_rank"],
            rope_size=hf["qk_rope_head_dim"],
            nope_size=hf["qk_nope_head_dim"],
            value_size=hf["v_head_dim"],
            query_rank=hf.get("q_lora_rank"),
        )
        scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        return dataclasses.replace(
            config,
            rope=llama.hf_rope(hf, sizes.rope_size),
            attention_scale=_scale(
                sizes, float(scaling.get("mscale_all_dim") or 0.0), float(scaling.get("factor") or 1.0)
            ),
            mla=sizes,
            moe=_moe(hf),
            dense_layers=first_layers(hf.get("first_k_dense_replace", 0)),
            num_mtp=hf.get("num_nextn_predict_layers") or 0,
        )


def _scale(sizes: MlaSizes, mscale_all_dim: float, factor: float) -> float:
    """1 / sqrt(head size), times yarn's factor on the logits."""
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1 if factor > 1 else 1.0
    return (sizes.nope_size + sizes.rope_size) ** -0.5 * mscale**2


def _moe(hf: Mapping[str, Any]) -> MoeConfig | None:
    """V3's mixture, or V2's: softmax, and in the large model the best groups by their best expert."""
    if not hf.get("n_routed_experts"):
        return None
    is_third = hf.get("model_type") == "deepseek_v3"
    check_values(hf, {"scoring_func": ("sigmoid" if is_third else "softmax",)})
    moe = sigmoid_moe(hf)
    if is_third:
        check_values(hf, {"topk_method": ("noaux_tc",)})
        return moe
    check_values(hf, {"topk_method": ("greedy", "group_limited_greedy")})
    is_grouped = hf.get("topk_method") == "group_limited_greedy"
    routing = dataclasses.replace(
        moe.routing,
        scores="softmax",
        is_normalized=hf.get("norm_topk_prob", False),
        num_groups=moe.routing.num_groups if is_grouped else 1,
        group_score="max",
    )
    return dataclasses.replace(moe, routing=routing, has_correction=False)


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture deepseek2, as written since heads' matrices are kept apart (attn_k_b, attn_v_b)."""
    config, meta = llama.dense_config_from_gguf(source), source.metadata
    rope_size = gguf_value(source, "rope.dimension_count")
    sizes = MlaSizes(
        latent_size=gguf_value(source, "attention.kv_lora_rank"),
        rope_size=rope_size,
        nope_size=gguf_value(source, "attention.key_length_mla") - rope_size,
        value_size=gguf_value(source, "attention.value_length_mla"),
        query_rank=meta.get("deepseek2.attention.q_lora_rank") or None,
    )
    mscale = 10 * meta.get("deepseek2.rope.scaling.yarn_log_multiplier", 0.0)  # kept as a tenth
    return dataclasses.replace(
        config,
        rope=llama.gguf_rope(source, rope_size, {"mscale": mscale, "mscale_all_dim": mscale} if mscale else None),
        attention_scale=_scale(sizes, mscale, meta.get("deepseek2.rope.scaling.factor", 1.0)),
        mla=sizes,
        moe=_gguf_moe(source),
        dense_layers=first_layers(meta.get("deepseek2.leading_dense_block_count", 0)),
    )


def _gguf_moe(source: WeightSource) -> MoeConfig:
    meta, expert_size = source.metadata, gguf_value(source, "expert_feed_forward_length")
    has_correction = any(name.endswith("exp_probs_b.bias") for name in source.names())
    gating = meta.get("deepseek2.expert_gating_func", _SIGMOID if has_correction else _SOFTMAX)
    with reading(str(source.path)):
        check_values({"expert_gating_func": gating}, {"expert_gating_func": (_SOFTMAX, _SIGMOID)})
    routing = Routing(
        num_chosen=gguf_value(source, "expert_used_count"),
        scores="sigmoid" if gating == _SIGMOID else "softmax",
        is_normalized=meta.get("deepseek2.expert_weights_norm", False),
        scaling=meta.get("deepseek2.expert_weights_scale", 1.0),
        num_groups=meta.get("deepseek2.expert_group_count", 1),
        num_kept_groups=meta.get("deepseek2.expert_group_used_count", 1),
        group_score="top2" if has_correction else "max",
    )
    return MoeConfig(
        routing=routing,
        num_experts=gguf_value(source, "expert_count"),
        expert_size=expert_size,
        shared_size=expert_size * meta.get("deepseek2.expert_shared_count", 0),
        has_correction=has_correction,
    )


def _rows(parameter: str, config: DecoderConfig) -> np.ndarray | None:
    """For parameters with rotated rows: the file's rows, those with their pairs in halves."""
    mla, name = config.mla, parameter.rsplit(".", 1)[-1]
    assert mla is not None
    turned = llama.in_halves(1, mla.rope_size)
    if name == "kv_a":
        return np.concatenate([np.arange(mla.latent_size), mla.latent_size + turned])
    if name not in ("q", "q_b"):
        return None
    head = np.concatenate([np.arange(mla.nope_size), mla.nope_size + turned])
    return (np.arange(config.num_heads)[:, None] * len(head) + head).reshape(-1)


def _gguf_stored(parameter: str, config: DecoderConfig) -> Stored:
    rows = _rows(parameter, config)
    return AS_IT_IS if rows is None else Stored(rows=rows)


def _hf_stored(parameter: str, config: DecoderConfig) -> Stored:
    """Beside the order of rows: each head's k_up (transposed) and v_up lie one below the other in one matrix."""
    mla, name = config.mla, parameter.rsplit(".", 1)[-1]
    assert mla is not None
    if name not in ("k_up", "v_up"):
        return _gguf_stored(parameter, config)
    each = mla.nope_size + mla.value_size
    shape = (config.num_heads * each, mla.latent_size)
    first, size = (0, mla.nope_size) if name == "k_up" else (mla.nope_size, mla.value_size)
    rows = np.arange(config.num_heads)[:, None] * each + first + np.arange(size)
    return Stored(shape=shape, rows=rows.reshape(-1), is_transposed=name == "k_up")


_HF_ATTENTION = {
    "q_a": "q_a_proj", "q_b": "q_b_proj", "q_a_norm": "q_a_layernorm", "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "k_up": "kv_b_proj", "v_up": "kv_b_proj",
}  # fmt: skip
_GGUF_ATTENTION = {
    "q_a": "attn_q_a", "q_b": "attn_q_b", "q_a_norm": "attn_q_a_norm", "kv_a": "attn_kv_a_mqa",
    "kv_a_norm": "attn_kv_a_norm", "k_up": "attn_k_b", "v_up": "attn_v_b",
}  # fmt: skip

MODEL = Model(
    hf_architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"),
    gguf_architectures=("deepseek2",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(
        names=hf_names(**{f"attention__{ours}": f"self_attn.{name}.weight" for ours, name in _HF_ATTENTION.items()}),
        ignored=(*MTP_COPIES, "model.layers.{layer}.self_attn.rotary_emb.inv_freq"),
        stored=_hf_stored,
    ),
    gguf_layout=FileLayout(
        names=gguf_names(**{f"attention__{ours}": f"{name}.weight" for ours, name in _GGUF_ATTENTION.items()}),
        stored=_gguf_stored,
    ),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
