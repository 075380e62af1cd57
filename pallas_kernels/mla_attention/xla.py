"""MLA from XLA operations alone: grouped-query attention with one kv head, whose values are its keys.

The C + R sums of values are made and the last R dropped; keys are gathered twice. For devices without a kernel of their
own, not for speed.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.mla_attention.reference import new_pages, write_latent
from pallas_kernels.paged_attention import xla
from pallas_kernels.ragged import RaggedLayout

__all__ = ["mla_attention", "new_pages", "write_latent"]


def mla_attention(
    q: Float[Array, "T N H"],
    pages: LatentPages,
    layer: int | Array,
    layout: RaggedLayout,
    *,
    scale: float,
    latent_size: int,
) -> Float32[Array, "T N C"]:
    """Same result as reference.mla_attention, to float32 rounding."""
    q = jnp.pad(q, ((0, 0), (0, 0), (0, pages.latent.shape[3] - q.shape[2])))
    one_head = pages.latent[:, :, :, None]
    out = xla.paged_attention(q, KVPages(k=one_head, v=one_head), layer, layout, scale=scale)
    return out[..., :latent_size]
