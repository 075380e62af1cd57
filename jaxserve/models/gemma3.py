"""Gemma 3 (Gemma Team 2025, arXiv 2503.19786), its text half.

Five layers with a sliding window and a rope of their own stand before each layer that sees everything; a norm stands
before and after attention and MLP, and one on every query and key. Agrees with transformers' modeling_gemma3.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from checkpoints.errors import UnsupportedCheckpoint
from checkpoints.load import WeightSource
from checkpoints.names import NameMap
from jaxserve.layer_groups import Paging, group_layout, layer_places
from jaxserve.layers.attention import attention
from jaxserve.layers.embed import embed, unembed
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.rope import Rope, make_rope, rope_angles
from jaxserve.layers.stack import Body, run_layers
from jaxserve.models.model import AS_IT_IS, FileLayout, Model, Stored, check_values, gguf_value, reading
from pallas_kernels.kernels import Kernels
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.ragged import RaggedLayout, positions_of_tokens
from sharding.spec import ArraySpec

LayerKind = Literal["sliding_attention", "full_attention"]

_PATTERN = 6  # every sixth layer sees everything, where a file does not say
_LOCAL_THETA = 10_000.0
_LAYERS_OF_27B = 62  # the one size whose queries are not scaled by the head size; a GGUF does not say

# Values of a config.json that both generations share, the default first.
COMPUTED: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "use_bidirectional_attention": (False, None),
}


@dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """Sizes and constants of one model of either generation. A soft cap of None caps nothing."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position: int
    norm_eps: float
    query_scale: float
    window: int
    layer_kinds: tuple[LayerKind, ...]
    local_rope: Rope
    global_rope: Rope
    is_tied: bool
    has_qk_norm: bool = True
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, None where a token sees all before it."""
        return tuple(self.window if kind == "sliding_attention" else None for kind in self.layer_kinds)


def config_from_hf(hf: Mapping[str, Any]) -> GemmaConfig:
    """From a config.json of model_type gemma3_text, or gemma3 with a text_config inside.

    Defaults are those of transformers' Gemma3TextConfig, because published files leave out what equals them. Raises
    CheckpointError for a missing field, UnsupportedCheckpoint for a value this version does not compute.
    """
    text = hf.get("text_config", hf)
    with reading("config.json", "gemma3"):
        check_values(text, COMPUTED)
        head_size, max_position = text.get("head_dim", 256), text.get("max_position_embeddings", 131_072)
        local, everywhere = _hf_ropes(text)
        return GemmaConfig(
            num_layers=text["num_hidden_layers"],
            hidden_size=text["hidden_size"],
            ffn_size=text["intermediate_size"],
            num_heads=text.get("num_attention_heads", 8),
            num_kv_heads=text.get("num_key_value_heads", 4),
            head_size=head_size,
            vocab_size=text.get("vocab_size", 262_208),
            max_position=max_position,
            norm_eps=text.get("rms_norm_eps", 1e-6),
            query_scale=text.get("query_pre_attn_scalar", 256) ** -0.5,
            window=text.get("sliding_window", 4096),
            layer_kinds=layer_kinds_of(text["num_hidden_layers"], text),
            local_rope=make_rope(head_size, local["rope_theta"], local, max_position),
            global_rope=make_rope(head_size, everywhere["rope_theta"], everywhere, max_position),
            is_tied=text.get("tie_word_embeddings", True),
            attention_soft_cap=text.get("attn_logit_softcapping"),
            final_soft_cap=text.get("final_logit_softcapping"),
        )


def _hf_ropes(text: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of the windowed layers' rope and of the others': one mapping for each kind, or the older fields."""
    both = text.get("rope_parameters") or {}
    local = {"rope_theta": text.get("rope_local_base_freq", _LOCAL_THETA), **(both.get("sliding_attention") or {})}
    older = both.get("full_attention") or text.get("rope_scaling") or {}
    return local, {"rope_theta": text.get("rope_theta", 1_000_000.0), **older}


def layer_kinds_of(num_layers: int, text: Mapping[str, Any], pattern: int = _PATTERN) -> tuple[LayerKind, ...]:
    """The kind of each layer, from the list in a config.json or from its pattern. ValueError where these are wrong."""
    kinds = text.get("layer_types")
    if kinds is None:
        return repeated_kinds(num_layers, text.get("sliding_window_pattern", pattern))
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {num_layers} layers, unknown: {sorted(unknown)}")
    return tuple(kinds)


def repeated_kinds(num_layers: int, pattern: int) -> tuple[LayerKind, ...]:
    """Every `pattern`-th layer sees everything."""
    return tuple("sliding_attention" if (n + 1) % pattern else "full_attention" for n in range(num_layers))


def config_from_gguf(source: WeightSource) -> GemmaConfig:
    """From a GGUF of architecture gemma3; constants that such files leave out are the architecture's."""
    meta = source.metadata

    need = partial(gguf_value, source)
    num_layers, heads, hidden = need("block_count"), need("attention.head_count"), need("embedding_length")
    head_size = meta.get("gemma3.attention.key_length", 256)
    scaling = {
        "type": meta.get("gemma3.rope.scaling.type", "default").replace("none", "default"),
        "factor": meta.get("gemma3.rope.scaling.factor", 1.0),
    }
    local_theta = meta.get("gemma3.rope.freq_base_swa", _LOCAL_THETA)
    theta = meta.get("gemma3.rope.freq_base", 1_000_000.0)
    pattern = meta.get("gemma3.attention.sliding_window_pattern", _PATTERN)
    if not isinstance(pattern, int) or pattern < 1:
        raise UnsupportedCheckpoint(f"{source.path}: gemma3.attention.sliding_window_pattern is no number of layers")
    with reading(str(source.path), "gemma3"):
        return GemmaConfig(
            num_layers=num_layers,
            hidden_size=hidden,
            ffn_size=need("feed_forward_length"),
            num_heads=heads,
            num_kv_heads=meta.get("gemma3.attention.head_count_kv") or heads,
            head_size=head_size,
            vocab_size=source.info("token_embd.weight").shape[0],
            max_position=need("context_length"),
            norm_eps=need("attention.layer_norm_rms_epsilon"),
            query_scale=(hidden // heads if num_layers == _LAYERS_OF_27B else head_size) ** -0.5,
            window=need("attention.sliding_window"),
            layer_kinds=repeated_kinds(num_layers, pattern),
            local_rope=make_rope(head_size, local_theta, None, 0),
            global_rope=make_rope(head_size, theta, scaling, need("context_length")),
            is_tied="output.weight" not in source.names(),
            final_soft_cap=meta.get("gemma3.final_logit_softcapping"),
        )


def param_specs(config: GemmaConfig) -> dict[str, Any]:
    """The weight tree as metadata; matrices are [out, in]."""
    D, F, V, H = config.hidden_size, config.ffn_size, config.vocab_size, config.head_size
    NH, KH = config.num_heads * H, config.num_kv_heads * H

    def matrix(rows: int, columns: int, *axes: str) -> ArraySpec:
        return ArraySpec(shape=(rows, columns), axes=axes)

    def vector(size: int, axis: str) -> ArraySpec:
        return ArraySpec(shape=(size,), axes=(axis,))

    norms = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    layer = {
        **{name: vector(D, "model") for name in norms},
        "attention": {
            "q": matrix(NH, D, "heads", "model"),
            "k": matrix(KH, D, "kv_heads", "model"),
            "v": matrix(KH, D, "kv_heads", "model"),
            "o": matrix(D, NH, "model", "heads"),
            **{name: vector(H, "head") for name in ("q_norm", "k_norm") if config.has_qk_norm},
        },
        "mlp": {
            "gate": matrix(F, D, "ffn", "model"),
            "up": matrix(F, D, "ffn", "model"),
            "down": matrix(D, F, "model", "ffn"),
        },
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
    config: GemmaConfig,
    kernels: Kernels,
    token_ids: Int32[Array, "T"],
    layout: Paging,
    cache: KVPages,
    *,
    dtype: str,
) -> tuple[Float[Array, "T D"], KVPages, None]:
    """Hidden states after the last norm, and the cache with this step's keys and values; no experts."""
    places = layer_places(layout, config.num_layers)
    kinds: list[tuple[LayerKind, int]] = [(config.layer_kinds[n], group) for n, (group, _) in enumerate(places)]
    bodies = {
        (kind, group): _layer(kind, config, kernels, group_layout(layout, group), token_ids.shape[0])
        for kind, group in dict.fromkeys(kinds)
    }
    x = embed(kernels, token_ids, params["embed"], dtype)
    x = x * jnp.asarray(math.sqrt(config.hidden_size), dtype)  # rounded to the activations' dtype, as in training
    x, cache = run_layers(
        params["layers"], (x, cache), [bodies[kind] for kind in kinds], [place for _, place in places]
    )
    return rms_norm(x, params["norm"], config.norm_eps), cache, None


def _layer(
    kind: LayerKind, config: GemmaConfig, kernels: Kernels, layout: RaggedLayout, num_tokens: int
) -> Body[tuple[Array, KVPages]]:
    """The layers of one kind as a function of carry, weights and index."""
    is_sliding = kind == "sliding_attention"
    _, positions, _ = positions_of_tokens(layout, num_tokens)
    angles = rope_angles(config.local_rope if is_sliding else config.global_rope, jnp.maximum(positions, 0))
    constants: dict[str, Any] = {
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "scale": config.query_scale,
        "window": config.window if is_sliding else None,
        "soft_cap": config.attention_soft_cap,
        "qk_norm_eps": config.norm_eps,
    }

    def layer(carry: tuple[Array, KVPages], weights: dict, index: int | Array) -> tuple[Array, KVPages]:
        x, cache = carry
        norm = RmsNorm(weight=weights["attention_norm"], eps=config.norm_eps)
        out, cache = attention(kernels, x, weights["attention"], cache, index, layout, angles, before=norm, **constants)
        x = x + rms_norm(out, weights["attention_post_norm"], config.norm_eps)
        norm = RmsNorm(weight=weights["mlp_norm"], eps=config.norm_eps)
        out = gated_mlp(kernels, x, weights["mlp"], before=norm, activation="gelu_tanh")
        return x + rms_norm(out, weights["mlp_post_norm"], config.norm_eps), cache

    return layer


def logits(
    params: dict[str, Any], config: GemmaConfig, kernels: Kernels, x: Float[Array, "R D"]
) -> Float32[Array, "R V"]:
    """Next-token logits of hidden states."""
    out = unembed(kernels, x, params.get("unembed", params["embed"]))
    return out if config.final_soft_cap is None else config.final_soft_cap * jnp.tanh(out / config.final_soft_cap)


def _one_for_norms(parameter: str, config: GemmaConfig) -> Stored:
    """HF files hold w of the norms' factor 1 + w; GGUF files hold the factor."""
    return Stored(added=1.0) if parameter.endswith("norm") else AS_IT_IS


def _hf_names(prefix: str) -> NameMap:
    layer = f"{prefix}model.layers.{{layer}}"
    return NameMap(
        rules={
            "embed": f"{prefix}model.embed_tokens.weight",
            "norm": f"{prefix}model.norm.weight",
            "unembed": f"{prefix}lm_head.weight",
            "layers.{layer}.attention_norm": f"{layer}.input_layernorm.weight",
            "layers.{layer}.attention_post_norm": f"{layer}.post_attention_layernorm.weight",
            "layers.{layer}.mlp_norm": f"{layer}.pre_feedforward_layernorm.weight",
            "layers.{layer}.mlp_post_norm": f"{layer}.post_feedforward_layernorm.weight",
            **{f"layers.{{layer}}.attention.{p}": f"{layer}.self_attn.{p}_proj.weight" for p in "qkvo"},
            **{f"layers.{{layer}}.attention.{p}_norm": f"{layer}.self_attn.{p}_norm.weight" for p in "qk"},
            **{f"layers.{{layer}}.mlp.{p}": f"{layer}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
        }
    )


_GGUF_ATTENTION = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"
}  # fmt: skip
HF_LAYOUT = FileLayout(names=_hf_names(""), stored=_one_for_norms)
GGUF_NAMES = NameMap(
    rules={
        "embed": "token_embd.weight",
        "norm": "output_norm.weight",
        "unembed": "output.weight",
        "layers.{layer}.attention_norm": "blk.{layer}.attn_norm.weight",
        "layers.{layer}.attention_post_norm": "blk.{layer}.post_attention_norm.weight",
        "layers.{layer}.mlp_norm": "blk.{layer}.ffn_norm.weight",
        "layers.{layer}.mlp_post_norm": "blk.{layer}.post_ffw_norm.weight",
        **{f"layers.{{layer}}.attention.{p}": f"blk.{{layer}}.{t}.weight" for p, t in _GGUF_ATTENTION.items()},
        **{f"layers.{{layer}}.mlp.{p}": f"blk.{{layer}}.ffn_{p}.weight" for p in ("gate", "up", "down")},
    }
)

# The half of an image-and-text checkpoint that this version leaves out: it answers text only.
_VISION_LAYER = "vision_tower.vision_model.encoder.layers.{layer}"
_VISION_TENSORS = (
    "multi_modal_projector.mm_input_projection_weight",
    "multi_modal_projector.mm_soft_emb_norm.weight",
    "vision_tower.vision_model.embeddings.position_embedding.weight",
    *(
        f"{module}.{kind}"
        for kind in ("weight", "bias")
        for module in (
            "vision_tower.vision_model.embeddings.patch_embedding",
            "vision_tower.vision_model.post_layernorm",
            *(f"{_VISION_LAYER}.layer_norm{n}" for n in "12"),
            *(f"{_VISION_LAYER}.mlp.fc{n}" for n in "12"),
            *(f"{_VISION_LAYER}.self_attn.{p}_proj" for p in ("q", "k", "v", "out")),
        )
    ),
)

MODEL = Model(
    hf_architectures=("Gemma3ForCausalLM",),
    gguf_architectures=("gemma3",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    param_specs=param_specs,
    hf_layout=HF_LAYOUT,
    gguf_layout=FileLayout(names=GGUF_NAMES),
    forward=forward,
    unembed=logits,
)
WITH_VISION = dataclasses.replace(
    MODEL,
    hf_architectures=("Gemma3ForConditionalGeneration",),
    gguf_architectures=(),
    hf_layout=FileLayout(names=_hf_names("language_model."), ignored=_VISION_TENSORS, stored=_one_for_norms),
)
