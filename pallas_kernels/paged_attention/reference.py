"""Paged attention as its definition: every token gathers its own sequence and attends to it. Slow and plain.

Agrees with softmax(scale * q k^T) v over the keys at positions <= the query's, per grouped-query head
(Ainslie et al. 2023, arXiv 2305.13245); soft cap as in Gemma 2 (arXiv 2408.00118, section 2); sinks as one extra
logit per query head that takes probability and carries no value (gpt-oss).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.ragged import RaggedLayout, positions_of_tokens


def pages_or_past_end(pages: Int32[Array, "..."], num_pages: int) -> Int32[Array, "..."]:
    """The page numbers, those outside the cache replaced by num_pages.

    jax counts negative indices from the end; num_pages itself is what mode="drop" and mode="fill" leave out.
    """
    return jnp.where((pages >= 0) & (pages < num_pages), pages, num_pages)


def write_kv(
    k_pages: Float[Array, "Y P L K H"],
    v_pages: Float[Array, "Y P L K H"],
    layer: int | Array,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    layout: RaggedLayout,
) -> tuple[Float[Array, "Y P L K H"], Float[Array, "Y P L K H"]]:
    """The caches with each token's key and value stored at its position's page.

    Padding tokens and page numbers outside the cache are dropped, so no wrong number can reach another's page.
    """
    num_pages, page_size = k_pages.shape[1:3]
    rows, positions, exists = positions_of_tokens(layout, k.shape[0])
    max_pages = layout.page_table.shape[1]
    page = layout.page_table[rows, jnp.clip(positions // page_size, 0, max_pages - 1)]
    inside = exists & (positions < max_pages * page_size)
    page = pages_or_past_end(jnp.where(inside, page, num_pages), num_pages)
    at = (layer, page, positions % page_size)
    return (
        k_pages.at[at].set(k.astype(k_pages.dtype), mode="drop"),
        v_pages.at[at].set(v.astype(v_pages.dtype), mode="drop"),
    )


def paged_attention(
    q: Float[Array, "T N H"],
    k_pages: Float[Array, "Y P L K H"],
    v_pages: Float[Array, "Y P L K H"],
    layer: int | Array,
    layout: RaggedLayout,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float32[Array, "T N H"]:
    """Attention output per token in float32; zeros for padding tokens.

    window: a query sees its own and the window - 1 positions before it. Page numbers outside the cache read as zeros.
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k_pages.shape[3]
    rows, positions, exists = positions_of_tokens(layout, num_tokens)
    pages = pages_or_past_end(layout.page_table[rows], k_pages.shape[1])
    shape = (num_tokens, -1, num_kv_heads, head_size)
    k = k_pages.at[layer, pages].get(mode="fill", fill_value=0).astype(jnp.float32).reshape(shape)
    v = v_pages.at[layer, pages].get(mode="fill", fill_value=0).astype(jnp.float32).reshape(shape)
    grouped = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, -1, head_size)
    logits = scale * jnp.einsum("tkgh,tskh->tkgs", grouped, k)
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    keys = jnp.arange(k.shape[1])
    seen = (keys[None, :] <= positions[:, None]) & exists[:, None]
    if window is not None:
        seen &= keys[None, :] > positions[:, None] - window
    logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)
    top = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, -1, 1)
        top = jnp.maximum(top, sink)
    weights = jnp.exp(logits - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - top)
    out = jnp.einsum("tkgs,tskh->tkgh", weights, jnp.where(seen[:, :, None, None], v, 0.0))
    out = out / jnp.where(total == 0.0, 1.0, total)
    return out.reshape(num_tokens, num_heads, head_size)
