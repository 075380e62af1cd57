"""Grouped-query attention over the paged cache."""

from jaxtyping import Array, Float

from jaxserve.layers.linear import linear, side_by_side
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
    before: Before = None,
    residual: Float[Array, "T D"] | None = None,
) -> tuple[Float[Array, "T D"], KVPages]:
    """o(attention of q, k, v of before(x)) (+ residual), and the cache with this step's keys and values.

    Biases where `weights` has them.
    """
    qkv = side_by_side(kernels, x, weights, ("q", "k", "v"), before=before)
    q, cache = kernels.rope_write_kv(
        qkv, cache, layer, layout, num_kv_heads=num_kv_heads, head_size=head_size, angles=angles
    )
    out = kernels.paged_attention(q, cache, layer, layout, scale=head_size**-0.5)
    out = out.astype(x.dtype).reshape(x.shape[0], -1)
    return linear(kernels, out, weights["o"], weights.get("o_bias"), residual=residual), cache
