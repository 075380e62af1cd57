"""Paged attention as its definition: every token gathers its own sequence and attends to it. Slow and plain.

Agrees with softmax(scale * q k^T) v over the keys at positions <= the query's, per grouped-query head
(Ainslie et al. 2023, arXiv 2305.13245); soft cap as in Gemma 2 (arXiv 2408.00118, section 2); sinks as one extra
logit per query head that takes probability and carries no value (gpt-oss).
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8, Int32

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.rope import Angles, split_and_rotate
from pallas_kernels.ragged import RaggedLayout, positions_of_tokens

_SMALLEST_PEAK = 2.0**-100


def pages_or_past_end(pages: Int32[Array, "..."], num_pages: int) -> Int32[Array, "..."]:
    """The page numbers, those outside the cache replaced by num_pages.

    jax counts negative indices from the end; num_pages itself is what mode="drop" and mode="fill" leave out.
    """
    return jnp.where((pages >= 0) & (pages < num_pages), pages, num_pages)


def new_pages(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: str
) -> KVPages:
    """A cache of zeros, keys and values as [Y, P, L, K, H], scales of int8 as [Y, P, L, K].

    Raises ValueError for a type that is not kept here.
    """
    if dtype not in ("float32", "bfloat16", "float16", "int8"):
        raise ValueError(f"these kernels keep keys and values as float32, bfloat16, float16 or int8, not {dtype}")
    shape = (num_layers, num_pages, page_size, num_kv_heads, head_size)
    k, v = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
    if dtype != "int8":
        return KVPages(k=k, v=v)
    return KVPages(k=k, v=v, k_scale=jnp.zeros(shape[:-1], jnp.float32), v_scale=jnp.zeros(shape[:-1], jnp.float32))


def quantize_heads(x: Float[Array, "*shape H"]) -> tuple[Int8[Array, "*shape H"], Float32[Array, "*shape"]]:
    """Each head as whole multiples, -127 to 127, of its largest magnitude / 127; zeros where that is below 2^-100."""
    x = x.astype(jnp.float32)
    peak = jnp.max(jnp.abs(x), axis=-1)
    tiny = peak < _SMALLEST_PEAK
    steps = jnp.rint(x * jnp.where(tiny, 0.0, 127 / jnp.where(tiny, 1.0, peak))[..., None])
    return steps.astype(jnp.int8), jnp.where(tiny, 0.0, peak / 127)


def read_pages(pages: KVPages, at: Any) -> tuple[Float32[Array, "... K H"], Float32[Array, "... K H"]]:
    """Keys and values at an index of the cache, as numbers; what lies outside it reads as zeros."""

    def read(values: Array, scale: Array | None) -> Array:
        x = values.at[at].get(mode="fill", fill_value=0).astype(jnp.float32)
        return x if scale is None else x * scale.at[at].get(mode="fill", fill_value=0)[..., None]

    return read(pages.k, pages.k_scale), read(pages.v, pages.v_scale)


def rope_write_kv(
    qkv: Float[Array, "T C"],
    pages: KVPages,
    layer: int | Array,
    layout: RaggedLayout,
    *,
    num_kv_heads: int,
    head_size: int,
    angles: Angles | None = None,
    q_norm: Float[Array, "H"] | None = None,
    k_norm: Float[Array, "H"] | None = None,
    eps: float = 0.0,
) -> tuple[Float[Array, "T N H"], KVPages]:
    """Rotated queries, and the cache with each token's key and value at its position's page.

    qkv: columns [q | k | v] of N + 2K heads. See `split_and_rotate` for the rest.
    """
    q, k, v = split_and_rotate(
        qkv, num_kv_heads=num_kv_heads, head_size=head_size, angles=angles, q_norm=q_norm, k_norm=k_norm, eps=eps
    )
    return q, write_kv(pages, layer, k, v, layout)


def write_kv(
    pages: KVPages,
    layer: int | Array,
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    layout: RaggedLayout,
) -> KVPages:
    """The cache with each token's key and value stored at its position's page.

    Padding tokens and page numbers outside the cache are dropped, so no wrong number can reach another's page.
    """
    num_pages, page_size = pages.k.shape[1:3]
    rows, positions, exists = positions_of_tokens(layout, k.shape[0])
    max_pages = layout.page_table.shape[1]
    page = layout.page_table[rows, jnp.clip(positions // page_size, 0, max_pages - 1)]
    inside = exists & (positions < max_pages * page_size)
    page = pages_or_past_end(jnp.where(inside, page, num_pages), num_pages)
    at = (layer, page, positions % page_size)
    if pages.k_scale is not None:
        (k, k_scale), (v, v_scale) = quantize_heads(k), quantize_heads(v)
        pages = replace(
            pages,
            k_scale=pages.k_scale.at[at].set(k_scale, mode="drop"),
            v_scale=pages.v_scale.at[at].set(v_scale, mode="drop"),
        )
    return replace(
        pages,
        k=pages.k.at[at].set(k.astype(pages.k.dtype), mode="drop"),
        v=pages.v.at[at].set(v.astype(pages.v.dtype), mode="drop"),
    )


def paged_attention(
    q: Float[Array, "T N H"],
    pages: KVPages,
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
    num_kv_heads = pages.k.shape[3]
    rows, positions, exists = positions_of_tokens(layout, num_tokens)
    numbers = pages_or_past_end(layout.page_table[rows], pages.k.shape[1])
    shape = (num_tokens, -1, num_kv_heads, head_size)
    k, v = (x.reshape(shape) for x in read_pages(pages, (layer, numbers)))
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
