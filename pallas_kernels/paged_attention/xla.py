"""Paged attention from XLA operations alone, for devices without a kernel of their own.

The rows with one token are a dense batch; prefill rows go through it in tiles of TILE queries. Both walk the keys in
blocks of BLOCK positions with a running softmax (FlashAttention, arXiv 2205.14135), and only as far as the longest
sequence present, so the cost follows the tokens that are there and not the width of the page table. TILE and BLOCK are
constants: a row's result does not depend on its neighbours or on the bucket.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.reference import new_pages, pages_or_past_end, read_pages, rope_write_kv
from pallas_kernels.ragged import RaggedLayout

__all__ = ["new_pages", "paged_attention", "rope_write_kv"]

BLOCK = 128
TILE = 64
LOWEST = -1e30  # finite: exp(LOWEST - LOWEST) must not be NaN for rows that see nothing


class _Keys(NamedTuple):
    """Where keys and values are read from, and how logits are formed."""

    pages: KVPages
    layer: int | Array
    scale: float
    window: int | None
    soft_cap: float | None


class _Running(NamedTuple):
    """Softmax over the blocks seen so far: largest logit, sum of weights, weighted sum of values."""

    top: Float32[Array, "R K Q"]
    total: Float32[Array, "R K Q"]
    out: Float32[Array, "R K Q H"]


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
    """Same result as reference.paged_attention, to float32 rounding."""
    keys = _Keys(pages, layer, scale, window, soft_cap)
    singles = layout.num_single_rows
    parts = []
    if singles:
        parts.append(_single_rows(q[:singles], keys, layout, sinks))
    if q.shape[0] > singles:
        parts.append(_chunk_rows(q[singles:], keys, layout, sinks))
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _single_rows(q: Array, keys: _Keys, layout: RaggedLayout, sinks: Array | None) -> Float32[Array, "R N H"]:
    """One query per row, all rows at once."""
    singles = layout.num_single_rows
    lengths = layout.kv_lengths[:singles]
    out = _attend(_grouped(q[:, None], keys), (lengths - 1)[:, None], layout.page_table[:singles], keys, sinks)
    return _ungrouped(out, 1)[:, 0]


def _chunk_rows(q: Array, keys: _Keys, layout: RaggedLayout, sinks: Array | None) -> Float32[Array, "R N H"]:
    """Tile after tile of the prefill rows; a tile never spans two sequences.

    A tile's surplus queries land on the next tile's place, which is computed later and overwrites them.
    """
    singles = layout.num_single_rows
    starts = layout.query_starts[singles:] - singles
    lengths = starts[1:] - starts[:-1]
    tile_ends = jnp.cumsum((lengths + TILE - 1) // TILE)
    num_tokens = q.shape[0]
    padded = jnp.pad(q, ((0, TILE), (0, 0), (0, 0)))

    def tile(i: Array, out: Array) -> Array:
        row = jnp.searchsorted(tile_ends, i, side="right")
        offset = (i - (tile_ends[row] - (lengths[row] + TILE - 1) // TILE)) * TILE
        first = starts[row] + offset
        positions = layout.kv_lengths[singles + row] - lengths[row] + offset + jnp.arange(TILE)
        positions = jnp.minimum(positions, layout.kv_lengths[singles + row] - 1)
        queries = lax.dynamic_slice_in_dim(padded, first, TILE)[None]
        table = lax.dynamic_slice_in_dim(layout.page_table, singles + row, 1)
        result = _attend(_grouped(queries, keys), positions[None], table, keys, sinks)
        return lax.dynamic_update_slice_in_dim(out, _ungrouped(result, TILE)[0], first, 0)

    out = lax.fori_loop(0, tile_ends[-1], tile, jnp.zeros(padded.shape, jnp.float32))
    used = jnp.arange(num_tokens) < starts[-1]
    return jnp.where(used[:, None, None], out[:num_tokens], 0.0)


def _grouped(q: Array, keys: _Keys) -> Float32[Array, "R K Q H"]:
    """[R, q, N, H] -> [R, K, q * G, H]: the queries that share a kv head side by side."""
    rows, length, heads, size = q.shape
    kv_heads = keys.pages.k.shape[3]
    q = q.astype(jnp.float32).reshape(rows, length, kv_heads, heads // kv_heads, size)
    return q.transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, -1, size)


def _ungrouped(out: Array, length: int) -> Float32[Array, "R q N H"]:
    rows, kv_heads, _, size = out.shape
    out = out.reshape(rows, kv_heads, length, -1, size).transpose(0, 2, 1, 3, 4)
    return out.reshape(rows, length, -1, size)


def _attend(
    q: Float32[Array, "R K Q H"], positions: Int32[Array, "R q"], table: Array, keys: _Keys, sinks: Array | None
) -> Float32[Array, "R K Q H"]:
    """Running softmax over blocks of keys, up to the last position any query sees."""
    groups = q.shape[2] // positions.shape[1]
    seen_to = jnp.repeat(positions, groups, axis=1)[:, None, :]
    start = _start(q, sinks, positions.shape[1], groups)
    first = jnp.int32(0)
    if keys.window is not None:
        lowest = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max))
        first = jnp.maximum(0, lowest - keys.window + 1) // BLOCK
    last = (jnp.max(positions) + BLOCK) // BLOCK

    def block(i: Array, state: _Running) -> _Running:
        k, v = _read_block(keys, table, i)
        logits = keys.scale * jnp.einsum("rkqh,rskh->rkqs", q, k)
        if keys.soft_cap is not None:
            logits = keys.soft_cap * jnp.tanh(logits / keys.soft_cap)
        key_positions = i * BLOCK + jnp.arange(BLOCK)
        seen = key_positions <= seen_to[..., None]
        if keys.window is not None:
            seen &= key_positions > seen_to[..., None] - keys.window
        return _add_block(state, jnp.where(seen, logits, -jnp.inf), v)

    state = lax.fori_loop(first, last, block, start)
    return state.out / jnp.where(state.total == 0.0, 1.0, state.total)[..., None]


def _start(q: Array, sinks: Array | None, length: int, groups: int) -> _Running:
    """Nothing seen yet; a sink is a logit that is always there and carries no value."""
    shape = q.shape[:3]
    if sinks is None:
        return _Running(jnp.full(shape, LOWEST), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    per_head = sinks.astype(jnp.float32).reshape(1, q.shape[1], 1, groups)
    top = jnp.broadcast_to(per_head, (shape[0], shape[1], length, groups)).reshape(shape)
    return _Running(top, jnp.ones(shape), jnp.zeros(q.shape, jnp.float32))


def _read_block(keys: _Keys, table: Array, i: Array) -> tuple[Array, Array]:
    """Keys and values of positions i * BLOCK ..; what lies past the table or outside the cache reads as zeros."""
    num_pages, page_size, kv_heads, size = keys.pages.k.shape[1:]
    if page_size <= BLOCK:
        per_block = BLOCK // page_size
        columns = i * per_block + jnp.arange(per_block)
        pages = table.at[:, columns].get(mode="fill", fill_value=num_pages)
        at = (keys.layer, pages_or_past_end(pages, num_pages))
    else:
        column = i * BLOCK // page_size
        page = table.at[:, column].get(mode="fill", fill_value=num_pages)
        page = pages_or_past_end(page, num_pages)
        at = (keys.layer, page[:, None], (i * BLOCK % page_size + jnp.arange(BLOCK))[None])
    shape = (table.shape[0], BLOCK, kv_heads, size)
    k, v = read_pages(keys.pages, at)
    return k.reshape(shape), v.reshape(shape)


def _add_block(state: _Running, logits: Float32[Array, "R K Q S"], v: Float32[Array, "R S K H"]) -> _Running:
    """The weights are summed by the same product as the values, through columns of ones: see rms_norm."""
    top = jnp.maximum(state.top, jnp.max(logits, axis=-1))
    shrink = jnp.exp(state.top - top)
    weights = jnp.exp(logits - top[..., None])
    summed = jnp.einsum("rkqs,rskh->rkqh", weights, jnp.concatenate([v, jnp.ones_like(v[..., :16])], axis=-1))
    size = v.shape[-1]
    return _Running(
        top,
        state.total * shrink + summed[..., size],
        state.out * shrink[..., None] + summed[..., :size],
    )


def check_page_size(page_size: int) -> None:
    """Raises ValueError unless pages and key blocks divide one another."""
    if page_size < 1 or (BLOCK % page_size and page_size % BLOCK):
        raise ValueError(f"page size {page_size} neither divides {BLOCK} nor is a multiple of it")
