"""Mixture of experts: a router chooses a few experts for each token, and each expert multiplies its own tokens only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.spread import joined, own_total, place, size, total
from pallas_kernels.kernels import Kernels
from pallas_kernels.pytree import pytree
from pallas_kernels.quantized_matmul.around import Activation, GatedUnit

ExpertActivation = Activation | Literal["clamped_swiglu"]

_CLAMP, _SIGMOID_SLOPE = 7.0, 1.702  # of gpt-oss


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses X of E experts.

    scores: softmax over all experts, or each expert's sigmoid. is_normalized: the chosen scores are divided by their
    sum, which for a softmax is the softmax over the chosen ones. scaling: multiplied to the weights in the end. With
    groups of experts only the best `num_kept_groups` are open: a group is as good as its best score, or as the sum of
    its two best ("top2").
    """

    num_chosen: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1
    group_score: Literal["max", "top2"] = "max"


def route(
    logits: Float32[Array, "T E"], routing: Routing, correction: Float32[Array, "E"] | None = None
) -> tuple[Int32[Array, "T X"], Float32[Array, "T X"]]:
    """Each token's experts, best first, and the weights of their outputs.

    correction: added to the scores for choosing, not for weighting (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    scores = jax.nn.softmax(logits, axis=-1) if routing.scores == "softmax" else jax.nn.sigmoid(logits)
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = jnp.where(_open_groups(choice, routing), choice, -jnp.inf)
    _, experts = lax.top_k(choice, routing.num_chosen)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if routing.is_normalized:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts.astype(jnp.int32), weights * routing.scaling


def _open_groups(choice: Float32[Array, "T E"], routing: Routing) -> Bool[Array, "T E"]:
    """Whether each expert lies in one of the token's best groups."""
    num_tokens, num_experts = choice.shape
    in_groups = choice.reshape(num_tokens, routing.num_groups, -1)
    best = lax.top_k(in_groups, 2 if routing.group_score == "top2" else 1)[0].sum(axis=-1)
    _, kept = lax.top_k(best, routing.num_kept_groups)
    is_open = (jnp.arange(routing.num_groups) == kept[..., None]).any(axis=1)
    return jnp.repeat(is_open, num_experts // routing.num_groups, axis=1)


def moe(
    kernels: Kernels,
    h: Float[Array, "T D"],
    weights: Mapping[str, Any],
    routing: Routing,
    exists: Bool[Array, "T"],
    *,
    activation: ExpertActivation = "silu",
) -> tuple[Float[Array, "T D"], Int32[Array, "E"]]:
    """The weighted outputs of each token's experts, and of the shared expert where there is one; tokens by expert.

    weights: router [E, D] (+ router_bias, correction [E]), slots [E, width] and copies [E] where experts do not lie in
    order (engine/experts.py), experts {gate, up [E, F, D], down [E, D, F], biases}, shared
    (an MLP, with shared_gate [D] if a sigmoid weighs it). The router computes in float32. exists: False for padding,
    which must not make an expert be read.
    """
    logits = jnp.einsum("td,ed->te", h.astype(jnp.float32), weights["router"], precision=lax.Precision.HIGHEST)
    logits = logits + weights.get("router_bias", 0.0)
    experts, shares = route(logits, routing, weights.get("correction"))
    load = jnp.zeros(logits.shape[1], jnp.int32).at[experts].add(exists[:, None].astype(jnp.int32))
    slots = _slots(experts, weights)
    slots = jnp.where(exists[:, None], slots, slots[:1])
    out = _experts(kernels, h, weights["experts"], slots, shares, activation)
    if "shared" not in weights:
        return out, load
    shared = gated_mlp(kernels, h, weights["shared"])
    if "shared_gate" in weights:
        gate = jnp.einsum("td,d->t", h.astype(jnp.float32), weights["shared_gate"], precision=lax.Precision.HIGHEST)
        shared = shared * jax.nn.sigmoid(gate)[:, None].astype(h.dtype)
    return out + shared, load


def _slots(experts: Int32[Array, "T X"], weights: Mapping[str, Any]) -> Int32[Array, "T X"]:
    """Where the weights of each token's experts are: tokens take turns among an expert's copies."""
    if "slots" not in weights:
        return experts
    turns = jnp.arange(experts.shape[0])[:, None] % weights["copies"][experts]
    return weights["slots"][experts, turns]


@pytree
@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Tokens by layer and expert [Y, E], of the layers so far. layer: the number of the next one."""

    counts: Int32[Array, "Y E"]
    layer: Int32[Array, ""]

    def after(self, tokens: Int32[Array, "E"] | None) -> "ExpertLoad":
        """With one more layer, which has no experts if tokens is None."""
        counts = self.counts if tokens is None else self.counts.at[self.layer].set(tokens)
        return ExpertLoad(counts=counts, layer=self.layer + 1)


def _experts(
    kernels: Kernels,
    h: Float[Array, "T D"],
    weights: Mapping[str, Any],
    experts: Int32[Array, "T X"],
    shares: Float32[Array, "T X"],
    activation: ExpertActivation,
) -> Float[Array, "T D"]:
    """Rows of tokens sorted by expert, both products, and the rows put back and summed in the order of choice.

    Spread over devices, each multiplies the rows of its own experts, with its own part of their width. Groups that
    share experts bring their tokens together, and each gets the sums of its own back.
    """
    h, experts, shares = (joined(kernels, array, "data", 0) for array in (h, experts, shares))
    num_experts = weights["down"].shape[0]
    chosen = experts.reshape(-1)
    is_dealt_out = "expert" in kernels.spread_over or "data" in kernels.spread_over
    if is_dealt_out:  # experts elsewhere get the last number of all, and rows that count for nothing
        here = chosen - _first_expert(kernels, num_experts)
        chosen = jnp.where((here >= 0) & (here < num_experts), here, num_experts)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.zeros(num_experts, jnp.int32).at[chosen].add(1, mode="drop")
    owners = chosen[order]
    rows = h[order // experts.shape[1]]
    gate_up = _gate_and_up(kernels, rows, weights, sizes, owners).astype(h.dtype)
    if activation == "clamped_swiglu":
        out = kernels.grouped_matmul(_clamped_swiglu(gate_up), weights["down"], sizes)
    else:
        out = kernels.grouped_matmul(gate_up, weights["down"], sizes, before=GatedUnit(activation=activation))
    if "down_bias" in weights:  # added by one of the devices that share an expert
        out = out + jnp.where(place(kernels, "tensor") == 0, weights["down_bias"][owners], 0)
    if is_dealt_out:
        out = jnp.where((owners < num_experts)[:, None], out, 0)
    out = out[jnp.argsort(order)].reshape(*experts.shape, -1)
    summed = out[:, 0] * shares[:, 0, None]
    for n in range(1, experts.shape[1]):
        summed = summed + out[:, n] * shares[:, n, None]
    return total(kernels, own_total(kernels, summed, "data"), "tensor", "expert").astype(h.dtype)


def _first_expert(kernels: Kernels, num_here: int) -> int | Int32[Array, ""]:
    """The number of the first of this device's experts."""
    return (place(kernels, "data") * size(kernels, "expert") + place(kernels, "expert")) * num_here


def _gate_and_up(
    kernels: Kernels,
    rows: Float[Array, "R D"],
    weights: Mapping[str, Any],
    sizes: Int32[Array, "E"],
    owners: Int32[Array, "R"],
) -> Float32[Array, "R G"]:
    """[gate | up], G = 2 F columns, of each row's expert; kept joined or apart (see layers/linear.py)."""
    names = ("gate+up",) if "gate+up" in weights else ("gate", "up")
    out = [kernels.grouped_matmul(rows, weights[name], sizes) for name in names]
    both = jnp.concatenate(out, axis=-1) if len(out) > 1 else out[0]
    if "gate_bias" not in weights:
        return both
    return both + jnp.concatenate([weights["gate_bias"], weights["up_bias"]], axis=-1)[owners]


def _clamped_swiglu(gate_up: Float[Array, "R G"]) -> Float[Array, "R F"]:
    """gpt-oss's gated unit: clamped, with a steeper sigmoid and 1 added to the linear half. Agrees with its
    reference implementation (gpt_oss/torch/model.py, swiglu)."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    gate, up = jnp.minimum(gate, _CLAMP), jnp.clip(up, -_CLAMP, _CLAMP)
    return gate * jax.nn.sigmoid(_SIGMOID_SLOPE * gate) * (up + 1)
