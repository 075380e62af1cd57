"""Grouped-query attention over the paged cache."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.linear import linear, side_by_side
from jaxserve.layers.norm import rms_norm
from pallas_kernels.kernels import Kernels
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.rope import Angles
from pallas_kernels.quantized_matmul.around import Before
from pallas_kernels.ragged import RaggedLayout


def attention(
    kernels: Kernels,
    x: Float[Array, "T D"],
    weights: dict,
    cache: KVPages,
    layer: int | Array,
    layout: RaggedLayout,
    angles: Angles,
    *,
    num_kv_heads: int,
    head_size: int,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    qk_norm_eps: float = 0.0,
    before: Before = None,
    residual: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], KVPages]:
    """o(attention of q, k, v of before(x)) (+ residual), and the cache with this step's keys and values.

    Biases, sinks and norms of queries and keys where `weights` has them; a norm is each head's, or one of the whole
    projection. scale: 1 / sqrt(H) where None. window: a token sees itself and the window - 1 tokens before it.
    """
    qkv = side_by_side(kernels, x, weights, ("q", "k", "v"), before=before)
    norms: dict[str, Any] = {"q_norm": weights.get("q_norm"), "k_norm": weights.get("k_norm"), "eps": qk_norm_eps}
    if norms["q_norm"] is not None and len(norms["q_norm"]) != head_size:
        q, k, v = jnp.split(qkv, (qkv.shape[1] - 2 * num_kv_heads * head_size, -num_kv_heads * head_size), axis=1)
        q, k = rms_norm(q, norms["q_norm"], qk_norm_eps), rms_norm(k, norms["k_norm"], qk_norm_eps)
        qkv, norms = jnp.concatenate([q, k, v], axis=1), {}
    q, cache = kernels.rope_write_kv(
        qkv, cache, layer, layout, num_kv_heads=num_kv_heads, head_size=head_size, angles=angles, **norms
    )
    scale = head_size**-0.5 if scale is None else scale
    out = kernels.paged_attention(
        q, cache, layer, layout, scale=scale, window=window, soft_cap=soft_cap, sinks=weights.get("sinks")
    )
    out = out.astype(x.dtype).reshape(x.shape[0], -1)
    return linear(kernels, out, weights["o"], weights.get("o_bias"), residual=residual), cache
