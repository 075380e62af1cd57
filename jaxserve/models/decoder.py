"""The decoder that most families share: attention and a feed-forward part, each behind a norm and beside a residual.

A family's file says which of the options it has, and where its parameters lie in files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.layer_groups import Paging, group_layout, layer_places, rows_layout
from jaxserve.layers.attention import attention
from jaxserve.layers.embed import embed, unembed
from jaxserve.layers.mla import MlaSizes, latent_attention
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.moe import ExpertActivation, ExpertLoad, Routing, moe
from jaxserve.layers.norm import RmsNorm, rms_norm
from jaxserve.layers.rope import Rope, rope_angles
from jaxserve.layers.stack import Body, run_layers
from pallas_kernels.kernels import Kernels
from pallas_kernels.ragged import RaggedLayout, positions_of_tokens
from sharding.spec import ArraySpec


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """Experts of a model. shared_size: width of the expert that all tokens meet, 0 without one."""

    routing: Routing
    num_experts: int
    expert_size: int
    shared_size: int = 0
    has_shared_gate: bool = False
    has_correction: bool = False
    has_biases: bool = False
    activation: ExpertActivation = "silu"


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and constants of one model.

    attention_biases: those of "q", "k", "v" and "o" that have one. qk_norm: of each head, or of all heads together.
    windows: of each layer, None where a token sees all before it; empty when no layer has one. dense_layers: those of
    a model with experts that have an MLP of ffn_size instead. With `mla` the cache holds latents, and num_kv_heads and
    head_size count for nothing. num_mtp: modules that predict tokens further ahead (DeepSeek-V3, arXiv 2412.19437,
    section 2.2), which are loaded. The multipliers are Granite's.
    """

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
    attention_biases: tuple[str, ...] = ()
    has_mlp_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    has_sinks: bool = False
    windows: tuple[int | None, ...] = ()
    mla: MlaSizes | None = None
    moe: MoeConfig | None = None
    dense_layers: tuple[int, ...] = ()
    num_mtp: int = 0
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_scale: float | None = None
    logits_divisor: float = 1.0

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def has_experts(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.dense_layers


def for_context(config: DecoderConfig, max_model_len: int) -> DecoderConfig:
    """The config with the rope that sequences of up to so many tokens want."""
    return replace(config, rope=config.rope.for_context(max_model_len))


def _matrix(rows: int, columns: int, *axes: str) -> ArraySpec:
    return ArraySpec(shape=(rows, columns), axes=axes)


def _vector(size: int, axis: str) -> ArraySpec:
    return ArraySpec(shape=(size,), axes=(axis,))


def param_specs(config: DecoderConfig) -> dict[str, Any]:
    """The weight tree as metadata; matrices are [out, in]."""
    D, V = config.hidden_size, config.vocab_size
    dense = {"mlp": _mlp_specs(D, config.ffn_size, has_bias=config.has_mlp_bias)}
    both = {
        "attention_norm": _vector(D, "model"),
        "attention": _attention_specs(config) if config.mla is None else _mla_specs(config, config.mla),
        "mlp_norm": _vector(D, "model"),
    }
    experts = {"moe": _moe_specs(D, config.moe)} if config.moe else {}
    specs: dict[str, Any] = {
        "embed": _matrix(V, D, "vocab", "model"),
        "layers": tuple(both | (experts if config.has_experts(n) else dense) for n in range(config.num_layers)),
        "norm": _vector(D, "model"),
    }
    if config.num_mtp:
        numbers = range(config.num_layers, config.num_layers + config.num_mtp)  # as files count them: behind the layers
        extra = {name: _vector(D, "model") for name in ("embed_norm", "hidden_norm", "head_norm")}
        module = {"projection": _matrix(D, 2 * D, "model", "model"), **extra, **both, **(experts or dense)}
        specs["mtp"] = {str(number): module for number in numbers}
    if not config.is_tied:
        specs["unembed"] = _matrix(V, D, "vocab", "model")
    return specs


def _attention_specs(config: DecoderConfig) -> dict[str, ArraySpec]:
    D, H = config.hidden_size, config.head_size
    NH, KH = config.num_heads * H, config.num_kv_heads * H
    specs = {
        "q": _matrix(NH, D, "heads", "model"),
        "k": _matrix(KH, D, "kv_heads", "model"),
        "v": _matrix(KH, D, "kv_heads", "model"),
        "o": _matrix(D, NH, "model", "heads"),
    }
    biases = {"q": (NH, "heads"), "k": (KH, "kv_heads"), "v": (KH, "kv_heads"), "o": (D, "model")}
    specs |= {f"{name}_bias": _vector(*biases[name]) for name in config.attention_biases}
    if config.qk_norm == "head":
        specs |= {name: _vector(H, "head") for name in ("q_norm", "k_norm")}
    if config.qk_norm == "projection":
        specs |= {"q_norm": _vector(NH, "heads"), "k_norm": _vector(KH, "kv_heads")}
    if config.has_sinks:
        specs["sinks"] = _vector(config.num_heads, "heads")
    return specs


def _mla_specs(config: DecoderConfig, mla: MlaSizes) -> dict[str, ArraySpec]:
    D, N, C = config.hidden_size, config.num_heads, mla.latent_size
    queries = N * (mla.nope_size + mla.rope_size)
    specs = {
        "kv_a": _matrix(C + mla.rope_size, D, "latent", "model"),
        "kv_a_norm": _vector(C, "latent"),
        "k_up": ArraySpec(shape=(N, C, mla.nope_size), axes=("heads", "latent", "head")),
        "v_up": ArraySpec(shape=(N, mla.value_size, C), axes=("heads", "head", "latent")),
        "o": _matrix(D, N * mla.value_size, "model", "heads"),
    }
    if mla.query_rank is None:
        return {"q": _matrix(queries, D, "heads", "model"), **specs}
    return {
        "q_a": _matrix(mla.query_rank, D, "latent", "model"),
        "q_a_norm": _vector(mla.query_rank, "latent"),
        "q_b": _matrix(queries, mla.query_rank, "heads", "latent"),
        **specs,
    }


def _mlp_specs(D: int, F: int, *, has_bias: bool = False) -> dict[str, ArraySpec]:
    specs = {
        "gate": _matrix(F, D, "ffn", "model"),
        "up": _matrix(F, D, "ffn", "model"),
        "down": _matrix(D, F, "model", "ffn"),
    }
    if has_bias:
        specs |= {"gate_bias": _vector(F, "ffn"), "up_bias": _vector(F, "ffn"), "down_bias": _vector(D, "model")}
    return specs


def _moe_specs(D: int, moe: MoeConfig) -> dict[str, Any]:
    E = moe.num_experts
    experts = {
        name: ArraySpec(shape=(E, *spec.shape), axes=("experts", *spec.axes))
        for name, spec in _mlp_specs(D, moe.expert_size, has_bias=moe.has_biases).items()
    }
    specs: dict[str, Any] = {"router": _matrix(E, D, "choices", "model"), "experts": experts}
    if moe.has_biases:
        specs["router_bias"] = _vector(E, "choices")
    if moe.has_correction:
        specs["correction"] = _vector(E, "choices")
    if moe.shared_size:
        specs["shared"] = _mlp_specs(D, moe.shared_size)
    if moe.has_shared_gate:
        specs["shared_gate"] = _vector(D, "model")
    return specs


def forward(
    params: dict[str, Any],
    config: DecoderConfig,
    kernels: Kernels,
    token_ids: Int32[Array, "T"],
    layout: Paging,
    cache: Any,
    *,
    dtype: str,
) -> tuple[Float[Array, "T D"], Any, Int32[Array, "Y E"] | None]:
    """Hidden states after the last norm, the cache with this step's keys and values (or latents), tokens by expert."""
    _, positions, exists = positions_of_tokens(rows_layout(layout), token_ids.shape[0])
    angles = rope_angles(config.rope, jnp.maximum(positions, 0))
    attend = _latent_part if config.mla else _attention_part
    places = layer_places(layout, config.num_layers)
    kinds = [(group, config.window(n), config.has_experts(n)) for n, (group, _) in enumerate(places)]
    bodies: Mapping[Any, Body] = {
        (group, window, has_experts): _layer(
            config,
            attend(config, kernels, group_layout(layout, group), angles, window),
            _feed_forward(config, kernels, exists, has_experts),
        )
        for group, window, has_experts in dict.fromkeys(kinds)
    }
    x = embed(kernels, token_ids, params["embed"], dtype)
    if config.embedding_multiplier != 1:
        x = x * jnp.asarray(config.embedding_multiplier, dtype)
    load = None
    if config.moe is not None:
        counts = jnp.zeros((config.num_layers, config.moe.num_experts), jnp.int32)
        load = ExpertLoad(counts=counts, layer=jnp.int32(0))
    x, cache, load = run_layers(
        params["layers"], (x, cache, load), [bodies[kind] for kind in kinds], [place for _, place in places]
    )
    return rms_norm(x, params["norm"], config.norm_eps), cache, None if load is None else load.counts


type Attend = Callable[[Array, dict, Any, Any, RmsNorm, Array | None], tuple[Array, Any]]
type FeedForward = Callable[[Array, dict, RmsNorm, Array | None], tuple[Array, Array | None]]
type Carry = tuple[Array, Any, ExpertLoad | None]


def _layer(config: DecoderConfig, attend: Attend, feed_forward: FeedForward) -> Body[Carry]:
    """One kind of layer. Sums with the residual are part of the products where nothing stands between."""
    multiplier = config.residual_multiplier

    def layer(carry: Carry, weights: dict, index: int | Array) -> Carry:
        x, cache, load = carry
        norm = RmsNorm(weight=weights["attention_norm"], eps=config.norm_eps)
        out, cache = attend(x, weights["attention"], cache, index, norm, x if multiplier == 1 else None)
        x = out if multiplier == 1 else x + multiplier * out
        norm = RmsNorm(weight=weights["mlp_norm"], eps=config.norm_eps)
        out, tokens = feed_forward(x, weights, norm, x if multiplier == 1 else None)
        x = out if multiplier == 1 else x + multiplier * out
        return x, cache, None if load is None else load.after(tokens)

    return layer


def _attention_part(config: DecoderConfig, kernels: Kernels, layout: RaggedLayout, angles: Any, window: Any) -> Attend:
    constants: dict[str, Any] = {
        "num_kv_heads": config.num_kv_heads,
        "head_size": config.head_size,
        "scale": config.attention_scale,
        "window": window,
        "qk_norm_eps": config.norm_eps,
        "norms_whole": config.qk_norm == "projection",
    }

    def attend(
        x: Array, weights: dict, cache: Any, index: Any, norm: RmsNorm, residual: Array | None
    ) -> tuple[Array, Any]:
        return attention(kernels, x, weights, cache, index, layout, angles, before=norm, residual=residual, **constants)

    return attend


def _latent_part(config: DecoderConfig, kernels: Kernels, layout: RaggedLayout, angles: Any, window: Any) -> Attend:
    sizes, scale = config.mla, config.attention_scale
    assert sizes is not None
    assert scale is not None
    assert window is None, "latent attention has no window"

    def attend(
        x: Array, weights: dict, cache: Any, index: Any, norm: RmsNorm, residual: Array | None
    ) -> tuple[Array, Any]:
        return latent_attention(
            kernels, x, weights, cache, index, layout, angles, sizes, scale=scale, norm=norm, residual=residual
        )

    return attend


def _feed_forward(config: DecoderConfig, kernels: Kernels, exists: Bool[Array, "T"], has_experts: bool) -> FeedForward:
    experts = config.moe

    def mlp(x: Array, weights: dict, norm: RmsNorm, residual: Array | None) -> tuple[Array, Array | None]:
        return gated_mlp(kernels, x, weights["mlp"], before=norm, residual=residual), None

    def mixture(x: Array, weights: dict, norm: RmsNorm, residual: Array | None) -> tuple[Array, Array | None]:
        assert experts is not None
        h = rms_norm(x, norm.weight, norm.eps)
        out, tokens = moe(kernels, h, weights["moe"], experts.routing, exists, activation=experts.activation)
        return (out if residual is None else residual + out), tokens

    return mixture if has_experts else mlp


def logits(
    params: dict[str, Any], config: DecoderConfig, kernels: Kernels, x: Float[Array, "R D"]
) -> Float32[Array, "R V"]:
    """Next-token logits of hidden states."""
    out = unembed(kernels, x, params.get("unembed", params["embed"]))
    return out if config.logits_divisor == 1 else out / config.logits_divisor
