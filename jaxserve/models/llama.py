"""Llama 2 and 3, and models of the same shape (SmolLM2, TinyLlama, Mistral); Mixtral in GGUF, which has its name."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from checkpoints.errors import UnsupportedCheckpoint
from checkpoints.load import WeightSource
from jaxserve.layers.moe import Routing
from jaxserve.layers.rope import GrowingTheta, Rope, make_rope
from jaxserve.models import decoder
from jaxserve.models.decoder import DecoderConfig, MoeConfig
from jaxserve.models.file_names import gguf_names, hf_names
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, check_values, gguf_value, reading

_WITH_WINDOW = ("mistral", "mixtral", "phi3")  # types in which a sliding_window means one


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """From a config.json of model_type llama or mistral, or one with the same fields.

    Raises CheckpointError for a missing field, UnsupportedCheckpoint for a value this version does not compute.
    """
    with reading("config.json", hf.get("model_type")):
        check_values(hf, {"hidden_act": ("silu",)})
        heads, num_layers = hf["num_attention_heads"], hf["num_hidden_layers"]
        head_size = hf.get("head_dim") or hf["hidden_size"] // heads
        rope, max_position = hf_rope(hf, head_size), hf["max_position_embeddings"]
        if isinstance(rope.beyond, GrowingTheta):
            max_position = int(max_position * rope.beyond.factor)
        window = hf.get("sliding_window") if hf.get("model_type") in _WITH_WINDOW else None
        return DecoderConfig(
            num_layers=num_layers,
            hidden_size=hf["hidden_size"],
            ffn_size=hf["intermediate_size"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_size=head_size,
            vocab_size=hf["vocab_size"],
            max_position=max_position,
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=rope,
            is_tied=hf.get("tie_word_embeddings", False),
            attention_biases=tuple("qkvo") if hf.get("attention_bias", False) else (),
            has_mlp_bias=hf.get("mlp_bias", False),
            windows=() if window is None else (window,) * num_layers,
        )


def hf_rope(hf: Mapping[str, Any], head_size: int) -> Rope:
    """The rope a config.json states, in older fields or the newer mapping, of part of each head where it says so."""
    scaling = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if "original_max_position_embeddings" in hf:  # Phi's place for it
        scaling = {"original_max_position_embeddings": hf["original_max_position_embeddings"], **scaling}
    theta = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    part = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    return make_rope(int(head_size * part), theta, scaling, hf["max_position_embeddings"])


def config_from_gguf(source: WeightSource) -> DecoderConfig:
    """From a GGUF of architecture llama, or one with the same keys under its own name.

    A rope_freqs.weight tensor holds llama3's frequency factors. Raises CheckpointError, UnsupportedCheckpoint.
    """
    config = dense_config_from_gguf(source)
    if 2 * len(config.rope.inverse_frequencies) != config.head_size:
        raise UnsupportedCheckpoint(f"{source.path}: rope of a part of each head under architecture llama")
    num_experts = source.metadata.get("llama.expert_count")
    if not num_experts:
        return config
    routing = Routing(num_chosen=gguf_value(source, "expert_used_count"))
    moe = MoeConfig(routing=routing, num_experts=num_experts, expert_size=config.ffn_size)
    return dataclasses.replace(config, moe=moe)


def dense_config_from_gguf(source: WeightSource) -> DecoderConfig:
    """What the keys that all architectures share say; experts, if any, are left to the caller."""
    meta, names, architecture = source.metadata, source.names(), source.metadata["general.architecture"]

    need = partial(gguf_value, source)
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_size = meta.get(f"{architecture}.attention.key_length") or hidden // heads
    return DecoderConfig(
        num_layers=need("block_count"),
        hidden_size=hidden,
        ffn_size=meta.get(f"{architecture}.feed_forward_length", 0),
        num_heads=heads,
        num_kv_heads=meta.get(f"{architecture}.attention.head_count_kv") or heads,
        head_size=head_size,
        vocab_size=source.info("token_embd.weight").shape[0],
        max_position=need("context_length"),
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope=gguf_rope(source, head_size),
        is_tied="output.weight" not in names,
        attention_biases=tuple(
            ours
            for ours, theirs in zip("qkvo", ("attn_q", "attn_k", "attn_v", "attn_output"), strict=True)
            if f"blk.0.{theirs}.bias" in names
        ),
    )


def gguf_rope(source: WeightSource, head_size: int, constants: Mapping[str, Any] | None = None) -> Rope:
    """The rope a GGUF states. constants: parameters that such files leave out, as HF names them."""
    meta, rope_key = source.metadata, f"{source.metadata['general.architecture']}.rope"
    scaling: dict[str, Any] = {
        "type": meta.get(f"{rope_key}.scaling.type", "default").replace("none", "default"),
        "factor": meta.get(f"{rope_key}.scaling.factor", 1.0),
        "original_max_position_embeddings": meta.get(f"{rope_key}.scaling.original_context_length"),
        **(constants or {}),
    }
    theta, rotated = meta.get(f"{rope_key}.freq_base", 10000.0), meta.get(f"{rope_key}.dimension_count", head_size)
    try:
        rope = make_rope(rotated, theta, scaling, gguf_value(source, "context_length"))
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{source.path}: {error}") from error
    if "rope_freqs.weight" not in source.names():
        return rope
    factors = source.read("rope_freqs.weight").data.astype(np.float64).reshape(-1)
    return Rope(inverse_frequencies=tuple(np.asarray(rope.inverse_frequencies) / factors))


def in_halves(num_heads: int, head_size: int) -> np.ndarray:
    """For each row of heads whose rotated pairs lie in two halves, the row of heads that have them side by side."""
    rows = np.arange(num_heads * head_size).reshape(num_heads, head_size // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


def gguf_stored(parameter: str, config: DecoderConfig) -> Stored:
    """GGUF's llama interleaves the two rotated halves of q and k."""
    name = parameter.rsplit(".", 1)[-1]
    heads = {"q": config.num_heads, "q_bias": config.num_heads, "k": config.num_kv_heads, "k_bias": config.num_kv_heads}
    return Stored(rows=in_halves(heads[name], config.head_size)) if name in heads else AS_IT_IS


MODEL = Model(
    hf_architectures=("LlamaForCausalLM", "MistralForCausalLM"),
    gguf_architectures=("llama",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=decoder.param_specs,
    hf_layout=FileLayout(names=hf_names(), ignored=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)),
    gguf_layout=FileLayout(names=gguf_names(), ignored=("rope_freqs.weight",), stored=gguf_stored),
    forward=decoder.forward,
    unembed=decoder.logits,
    for_context=decoder.for_context,
)
