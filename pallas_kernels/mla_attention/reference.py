"""MLA as its definition: every token gathers its own sequence's latents and attends to them. Slow and plain.

softmax(scale * q [c | k_rope]^T) c over positions <= the query's: section 2.1 of arXiv 2405.04434 with the projections
of keys and values absorbed into those of queries and outputs, which are not part of this op.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.paged_attention.reference import pages_or_past_end
from pallas_kernels.ragged import RaggedLayout, positions_of_tokens

_DTYPES = ("float32", "bfloat16")


def new_pages(
    *, num_layers: int, num_pages: int, page_size: int, latent_size: int, rope_size: int, dtype: str
) -> LatentPages:
    """A cache of zeros. Raises ValueError for a type that is not kept here."""
    if dtype not in _DTYPES:
        raise ValueError(f"latents are kept as {' or '.join(_DTYPES)}, not {dtype}")
    return LatentPages(latent=jnp.zeros((num_layers, num_pages, page_size, latent_size + rope_size), dtype))


def write_latent(
    latent: Float[Array, "T H"], pages: LatentPages, layer: int | Array, layout: RaggedLayout
) -> LatentPages:
    """The cache with each token's latent and rotated part, H = C + R values, stored at its position's page.

    A cache with longer rows gets zeros behind them.
    Padding tokens and page numbers outside the cache are dropped, so no wrong number can reach another's page.
    """
    num_pages, page_size = pages.latent.shape[1:3]
    rows, positions, exists = positions_of_tokens(layout, latent.shape[0])
    max_pages = layout.page_table.shape[1]
    page = layout.page_table[rows, jnp.clip(positions // page_size, 0, max_pages - 1)]
    inside = exists & (positions < max_pages * page_size)
    page = pages_or_past_end(jnp.where(inside, page, num_pages), num_pages)
    at = (layer, page, positions % page_size)
    latent = jnp.pad(latent, ((0, 0), (0, pages.latent.shape[3] - latent.shape[1])))
    return LatentPages(latent=pages.latent.at[at].set(latent.astype(pages.latent.dtype), mode="drop"))


def mla_attention(
    q: Float[Array, "T N H"],
    pages: LatentPages,
    layer: int | Array,
    layout: RaggedLayout,
    *,
    scale: float,
    latent_size: int,
) -> Float32[Array, "T N C"]:
    """Attention output per token and head, in the latent space; zeros for padding tokens.

    q: per head C values that meet the latent, then R rotated ones. Page numbers outside the cache read as zeros.
    """
    num_tokens, _, size = q.shape
    rows, positions, exists = positions_of_tokens(layout, num_tokens)
    numbers = pages_or_past_end(layout.page_table[rows], pages.latent.shape[1])
    keys = pages.latent.at[layer, numbers].get(mode="fill", fill_value=0).astype(jnp.float32)
    keys = keys.reshape(num_tokens, -1, pages.latent.shape[3])[..., :size]
    seen = (jnp.arange(keys.shape[1])[None, :] <= positions[:, None]) & exists[:, None]
    logits = scale * jnp.einsum("tnh,tsh->tns", q.astype(jnp.float32), keys)
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    values = jnp.where(seen[..., None], keys[..., :latent_size], 0.0)
    return jnp.einsum("tns,tsc->tnc", weights, values) / jnp.where(total == 0.0, 1.0, total)
