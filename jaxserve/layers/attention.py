"""Grouped-query attention over the paged cache."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.linear import gathered, side_by_side
from jaxserve.layers.spread import total
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
    norms_whole: bool = False,
    before: Before = None,
    residual: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], KVPages]:
    """o(attention of q, k, v of before(x)) (+ residual), and the cache with this step's keys and values.

    Biases, sinks and norms of queries and keys where `weights` has them; norms are each head's, or of all heads
    together (norms_whole). scale: 1 / sqrt(H) where None. window: a token sees itself and the window - 1 before it.
    """
    qkv = side_by_side(kernels, x, weights, ("q", "k", "v"), before=before)
    norms: dict[str, Any] = {"q_norm": weights.get("q_norm"), "k_norm": weights.get("k_norm"), "eps": qk_norm_eps}
    if norms_whole:
        qkv, norms = _normed_whole(kernels, qkv, norms, num_kv_heads * head_size), {}
    q, cache = kernels.rope_write_kv(
        qkv, cache, layer, layout, num_kv_heads=num_kv_heads, head_size=head_size, angles=angles, **norms
    )
    scale = head_size**-0.5 if scale is None else scale
    out = kernels.paged_attention(
        q, cache, layer, layout, scale=scale, window=window, soft_cap=soft_cap, sinks=weights.get("sinks")
    )
    out = out.astype(x.dtype).reshape(x.shape[0], -1)
    return gathered(kernels, out, weights["o"], weights.get("o_bias"), residual=residual), cache


def _normed_whole(kernels: Kernels, qkv: Float[Array, "T C"], norms: dict, size: int) -> Float[Array, "T C"]:
    """[q | k | v] with q and k normed over all heads together, those on other devices included."""
    parts = jnp.split(qkv, (qkv.shape[1] - 2 * size, qkv.shape[1] - size), axis=1)
    for n, name in enumerate(("q_norm", "k_norm")):
        x = parts[n].astype(jnp.float32)
        ones = jnp.ones((8, x.shape[1]), jnp.float32)  # see rms_norm
        squares = jnp.einsum("ti,oi->to", jnp.square(x), ones, precision=lax.Precision.HIGHEST)[:, :1]
        count = total(kernels, jnp.float32(x.shape[1]), "tensor")
        x = x * lax.rsqrt(total(kernels, squares, "tensor") / count + norms["eps"])
        parts[n] = (x * norms[name]).astype(qkv.dtype)
    return jnp.concatenate(parts, axis=1)
