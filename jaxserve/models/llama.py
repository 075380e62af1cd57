"""Llama 2 and 3, and models of the same shape (SmolLM2, TinyLlama, Mistral without a sliding window)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from checkpoints.errors import CheckpointError, UnsupportedCheckpoint
from checkpoints.load import WeightSource
from checkpoints.names import NameMap
from jaxserve.layers.attention import attention
from jaxserve.layers.embed import embed, unembed
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.rope import Rope, make_rope, rope_angles
from jaxserve.layers.stack import run_layers
from jaxserve.models.model import FileLayout, Model
from pallas_kernels.kernels import Kernels
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.ragged import RaggedLayout, positions_of_tokens
from sharding.spec import ArraySpec


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of one model."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: Rope
    is_tied: bool
    has_attention_bias: bool = False
    has_mlp_bias: bool = False


def config_from_hf(hf: Mapping[str, Any]) -> LlamaConfig:
    """From a config.json of model_type llama. Raises CheckpointError for a missing field or an unsupported value."""
    if hf.get("hidden_act", "silu") != "silu":
        raise UnsupportedCheckpoint(f"config.json: hidden_act {hf['hidden_act']!r}; this version computes silu only")
    try:
        heads = hf["num_attention_heads"]
        head_size = hf.get("head_dim") or hf["hidden_size"] // heads
        scaling = hf.get("rope_parameters") or hf.get("rope_scaling")
        theta = (scaling or {}).get("rope_theta") or hf.get("rope_theta") or 10000.0
        return LlamaConfig(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            ffn_size=hf["intermediate_size"],
            num_heads=heads,
            num_kv_heads=hf.get("num_key_value_heads") or heads,
            head_size=head_size,
            vocab_size=hf["vocab_size"],
            max_position=hf["max_position_embeddings"],
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            rope=make_rope(head_size, theta, scaling, hf["max_position_embeddings"]),
            is_tied=hf.get("tie_word_embeddings", False),
            has_attention_bias=hf.get("attention_bias", False),
            has_mlp_bias=hf.get("mlp_bias", False),
        )
    except KeyError as error:
        raise CheckpointError(f"config.json: field {error} is missing") from error
    except ValueError as error:
        raise UnsupportedCheckpoint(f"config.json: {error}") from error
    except (TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"config.json: a field has a value no llama has ({error})") from error


def config_from_gguf(source: WeightSource) -> LlamaConfig:
    """From a GGUF of architecture llama; a rope_freqs.weight tensor holds llama3's frequency factors."""
    meta, names = source.metadata, source.names()

    def need(key: str) -> Any:
        if f"llama.{key}" not in meta:
            raise CheckpointError(f"{source.path}: metadata llama.{key} is missing")
        return meta[f"llama.{key}"]

    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_size = meta.get("llama.attention.key_length") or hidden // heads
    if meta.get("llama.rope.dimension_count", head_size) != head_size or meta.get("llama.expert_count"):
        raise UnsupportedCheckpoint(f"{source.path}: partial rope or experts under architecture llama")
    return LlamaConfig(
        num_layers=need("block_count"),
        hidden_size=hidden,
        ffn_size=need("feed_forward_length"),
        num_heads=heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv") or heads,
        head_size=head_size,
        vocab_size=source.info("token_embd.weight").shape[0],
        max_position=need("context_length"),
        norm_eps=need("attention.layer_norm_rms_epsilon"),
        rope=_gguf_rope(source, head_size),
        is_tied="output.weight" not in names,
        has_attention_bias="blk.0.attn_q.bias" in names,
    )


def _gguf_rope(source: WeightSource, head_size: int) -> Rope:
    meta = source.metadata
    scaling: dict[str, Any] = {
        "type": meta.get("llama.rope.scaling.type", "default").replace("none", "default"),
        "factor": meta.get("llama.rope.scaling.factor", 1.0),
        "original_max_position_embeddings": meta.get("llama.rope.scaling.original_context_length"),
    }
    theta = meta.get("llama.rope.freq_base", 10000.0)
    try:
        rope = make_rope(head_size, theta, scaling, meta["llama.context_length"])
    except ValueError as error:
        raise UnsupportedCheckpoint(f"{source.path}: {error}") from error
    if "rope_freqs.weight" not in source.names():
        return rope
    factors = source.read("rope_freqs.weight").data.astype(np.float64).reshape(-1)
    return Rope(inverse_frequencies=tuple(np.asarray(rope.inverse_frequencies) / factors))


def param_specs(config: LlamaConfig) -> dict[str, Any]:
    """The weight tree as metadata; matrices are [out, in]."""
    D, F, V = config.hidden_size, config.ffn_size, config.vocab_size
    NH, KH = config.num_heads * config.head_size, config.num_kv_heads * config.head_size

    def matrix(rows: int, columns: int, *axes: str) -> ArraySpec:
        return ArraySpec(shape=(rows, columns), axes=axes)

    def vector(size: int, axis: str) -> ArraySpec:
        return ArraySpec(shape=(size,), axes=(axis,))

    attention_specs = {
        "q": matrix(NH, D, "heads", "model"),
        "k": matrix(KH, D, "kv_heads", "model"),
        "v": matrix(KH, D, "kv_heads", "model"),
        "o": matrix(D, NH, "model", "heads"),
    }
    if config.has_attention_bias:
        sizes = {
            "q_bias": (NH, "heads"),
            "k_bias": (KH, "kv_heads"),
            "v_bias": (KH, "kv_heads"),
            "o_bias": (D, "model"),
        }
        attention_specs |= {name: vector(*size) for name, size in sizes.items()}
    mlp_specs = {
        "gate": matrix(F, D, "ffn", "model"),
        "up": matrix(F, D, "ffn", "model"),
        "down": matrix(D, F, "model", "ffn"),
    }
    if config.has_mlp_bias:
        mlp_specs |= {"gate_bias": vector(F, "ffn"), "up_bias": vector(F, "ffn"), "down_bias": vector(D, "model")}
    layer = {
        "attention_norm": vector(D, "model"),
        "attention": attention_specs,
        "mlp_norm": vector(D, "model"),
        "mlp": mlp_specs,
    }
    specs: dict[str, Any] = {
        "embed": matrix(V, D, "vocab", "model"),
        "layers": (layer,) * config.num_layers,
        "norm": vector(D, "model"),
    }
    if not config.is_tied:
        specs["unembed"] = matrix(V, D, "vocab", "model")
    return specs


def forward(
    params: dict[str, Any],
    config: LlamaConfig,
    kernels: Kernels,
    token_ids: Int32[Array, "T"],
    layout: RaggedLayout,
    cache: KVPages,
    *,
    dtype: str,
) -> tuple[Float[Array, "T D"], KVPages]:
    """Hidden states after the last norm, and the cache with this step's keys and values."""
    _, positions, _ = positions_of_tokens(layout, token_ids.shape[0])
    angles = rope_angles(config.rope, jnp.maximum(positions, 0))

    def layer(carry: tuple[Array, KVPages], weights: dict, index: int | Array) -> tuple[Array, KVPages]:
        x, cache = carry
        norm = RmsNorm(weight=weights["attention_norm"], eps=config.norm_eps)
        heads = {"num_kv_heads": config.num_kv_heads, "head_size": config.head_size}
        x, cache = attention(
            kernels, x, weights["attention"], cache, index, layout, angles, before=norm, residual=x, **heads
        )
        norm = RmsNorm(weight=weights["mlp_norm"], eps=config.norm_eps)
        return gated_mlp(kernels, x, weights["mlp"], before=norm, residual=x), cache

    x, cache = run_layers(params["layers"], (embed(token_ids, params["embed"], dtype), cache), layer)
    return rms_norm(x, params["norm"], config.norm_eps), cache


def logits(params: dict[str, Any], kernels: Kernels, x: Float[Array, "R D"]) -> Float32[Array, "R V"]:
    """Next-token logits of hidden states."""
    return unembed(kernels, x, params.get("unembed", params["embed"]))


def _unpermuted(parameter: str, config: LlamaConfig) -> np.ndarray | None:
    """GGUF's llama interleaves the two rotated halves of q and k; this puts the rows back into halves."""
    name = parameter.rsplit(".", 1)[-1]
    heads = {"q": config.num_heads, "q_bias": config.num_heads, "k": config.num_kv_heads, "k_bias": config.num_kv_heads}
    if name not in heads:
        return None
    rows = np.arange(heads[name] * config.head_size).reshape(heads[name], config.head_size // 2, 2)
    return rows.transpose(0, 2, 1).reshape(-1)


HF_NAMES = NameMap(
    rules={
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "unembed": "lm_head.weight",
        "layers.{layer}.attention_norm": "model.layers.{layer}.input_layernorm.weight",
        "layers.{layer}.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        **{f"layers.{{layer}}.attention.{p}": f"model.layers.{{layer}}.self_attn.{p}_proj.weight" for p in "qkvo"},
        **{f"layers.{{layer}}.attention.{p}_bias": f"model.layers.{{layer}}.self_attn.{p}_proj.bias" for p in "qkvo"},
        **{
            f"layers.{{layer}}.mlp.{p}{ours}": f"model.layers.{{layer}}.mlp.{p}_proj.{theirs}"
            for p in ("gate", "up", "down")
            for ours, theirs in (("", "weight"), ("_bias", "bias"))
        },
    }
)
_GGUF_MATRICES = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
GGUF_NAMES = NameMap(
    rules={
        "embed": "token_embd.weight",
        "norm": "output_norm.weight",
        "unembed": "output.weight",
        "layers.{layer}.attention_norm": "blk.{layer}.attn_norm.weight",
        "layers.{layer}.mlp_norm": "blk.{layer}.ffn_norm.weight",
        **{f"layers.{{layer}}.attention.{p}": f"blk.{{layer}}.{t}.weight" for p, t in _GGUF_MATRICES.items()},
        **{f"layers.{{layer}}.attention.{p}_bias": f"blk.{{layer}}.{t}.bias" for p, t in _GGUF_MATRICES.items()},
        **{f"layers.{{layer}}.mlp.{p}": f"blk.{{layer}}.ffn_{p}.weight" for p in ("gate", "up", "down")},
    }
)

MODEL = Model(
    hf_architectures=("LlamaForCausalLM",),
    gguf_architectures=("llama",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=param_specs,
    hf_layout=FileLayout(names=HF_NAMES, ignored=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",)),
    gguf_layout=FileLayout(names=GGUF_NAMES, ignored=("rope_freqs.weight",), row_order=_unpermuted),
    forward=forward,
    unembed=logits,
)
