"""Grouped-query attention over the paged cache."""

from jaxtyping import Array, Float, Float32

from jaxserve.kv_cache import KVCache
from jaxserve.layers.linear import linear
from jaxserve.layers.rope import rotate
from pallas_kernels.kernels import Kernels
from pallas_kernels.ragged import RaggedLayout


def attention(
    kernels: Kernels,
    x: Float[Array, "T D"],
    weights: dict,
    cache: KVCache,
    layer: int | Array,
    layout: RaggedLayout,
    angles: tuple[Float32[Array, "T h"], Float32[Array, "T h"]],
    *,
    head_size: int,
) -> tuple[Float[Array, "T D"], KVCache]:
    """Attention output, and the cache with this step's keys and values. Biases where `weights` has them."""
    q, k, v = (
        linear(kernels, x, weights[name], weights.get(f"{name}_bias")).reshape(x.shape[0], -1, head_size)
        for name in ("q", "k", "v")
    )
    q, k = rotate(q, angles), rotate(k, angles)
    k_pages, v_pages = kernels.write_kv(cache.k_pages, cache.v_pages, layer, k, v, layout)
    out = kernels.paged_attention(q, k_pages, v_pages, layer, layout, scale=head_size**-0.5)
    out = out.astype(x.dtype).reshape(x.shape[0], -1)
    return linear(kernels, out, weights["o"], weights.get("o_bias")), KVCache(k_pages=k_pages, v_pages=v_pages)
