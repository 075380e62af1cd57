"""Paged attention and cache writes on CPUs, by kernels that read and write the pages in place.

Layout of the cache: k [Y, P, K, L/16, H, 16], keys transposed in groups of 16 positions, so that one vector holds a
coordinate of 16 keys; v [Y, P, K, L, H]; scales of int8 pages [Y, P, K, L].
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from pallas_kernels.cpu.targets import Targets
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.paged_attention.reference import quantize_heads
from pallas_kernels.paged_attention.rope import Angles
from pallas_kernels.ragged import RaggedLayout

_GROUP = 16  # positions whose keys lie together
_LARGEST_HEAD = 256
_NO_WINDOW = 2**40
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}


def functions_of(dtype: str) -> tuple[str, str]:
    """What to pass to `register` for pages of a dtype: attention, then rotation and write."""
    _jax_dtype(dtype)
    folder = "pallas_kernels.paged_attention"
    return f"{folder}.cpu_compiled:attend_{dtype}", f"{folder}.cpu_write_compiled:rope_write_{dtype}"


def all_functions() -> tuple[str, ...]:
    """Every target of this op."""
    return tuple(function for dtype in _DTYPES for function in functions_of(dtype))


def check_page_size(page_size: int) -> None:
    """Raises ValueError unless pages hold whole groups of keys."""
    if page_size < 1 or page_size % _GROUP:
        raise ValueError(f"page size {page_size} is no multiple of {_GROUP}, as the CPU kernels need")


def check_geometry(page_size: int, head_size: int) -> None:
    """Raises ValueError for sizes the kernels do not take."""
    check_page_size(page_size)
    _check_head_size(head_size)


def new_pages(
    *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_size: int, dtype: str
) -> KVPages:
    """A cache of zeros. Raises ValueError for sizes the kernels do not take."""
    check_geometry(page_size, head_size)
    where = (num_layers, num_pages, num_kv_heads)
    k = jnp.zeros((*where, page_size // _GROUP, head_size, _GROUP), _jax_dtype(dtype))
    v = jnp.zeros((*where, page_size, head_size), _jax_dtype(dtype))
    if dtype != "int8":
        return KVPages(k=k, v=v)
    return KVPages(
        k=k,
        v=v,
        k_scale=jnp.zeros((*where, page_size), jnp.float32),
        v_scale=jnp.zeros((*where, page_size), jnp.float32),
    )


def decode_pages(pages: KVPages) -> tuple[Float32[Array, "Y P L K H"], Float32[Array, "Y P L K H"]]:
    """Keys and values as numbers, for tests."""
    k = jnp.moveaxis(pages.k.astype(jnp.float32), -1, -2)
    k, v = k.reshape(pages.v.shape), pages.v.astype(jnp.float32)
    if pages.k_scale is not None:
        k, v = k * pages.k_scale[..., None], v * pages.v_scale[..., None]
    return k.swapaxes(2, 3), v.swapaxes(2, 3)


def encode_pages(k: Float32[Array, "Y P L K H"], v: Float32[Array, "Y P L K H"], dtype: str) -> KVPages:
    """A cache that holds these numbers, rounded as a write rounds them; for tests."""
    k, v = k.swapaxes(2, 3), v.swapaxes(2, 3)
    k_scale = v_scale = None
    if dtype == "int8":
        (k, k_scale), (v, v_scale) = quantize_heads(k), quantize_heads(v)
    grouped = k.reshape(*k.shape[:3], -1, _GROUP, k.shape[-1]).swapaxes(-1, -2)
    return KVPages(k=grouped.astype(_jax_dtype(dtype)), v=v.astype(_jax_dtype(dtype)), k_scale=k_scale, v_scale=v_scale)


def rope_write_kv(
    qkv: Float32[Array, "T C"],
    pages: KVPages,
    layer: int | Array,
    layout: RaggedLayout,
    *,
    num_kv_heads: int,
    head_size: int,
    angles: Angles | None = None,
    q_norm: Float32[Array, "H"] | None = None,
    k_norm: Float32[Array, "H"] | None = None,
    eps: float = 0.0,
    targets: Targets,
) -> tuple[Float32[Array, "T N H"], KVPages]:
    """The rotated queries, and the cache with each token's rotated key and its value at its position's page.

    qkv: N query heads, K key heads and K value heads side by side. q_norm, k_norm: weights of an RMS norm of each head
    before the rotation. angles: (cos, sin) of the first h pairs (i, i + h) of a head; the rest is not rotated. Tokens
    that do not exist and page numbers outside the cache are dropped. Under jit with donated pages nothing is copied.
    Raises ValueError for shapes the kernel does not take, NotRegistered.
    """
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_size - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_size:
        raise ValueError(f"{qkv.shape[1]} columns are no N + 2 * {num_kv_heads} heads of {head_size}")
    _check_pages(pages, num_kv_heads, head_size)
    cos, sin = angles if angles is not None else (jnp.zeros((num_tokens, 0)),) * 2
    if cos.shape != sin.shape or cos.shape[0] != num_tokens or 2 * cos.shape[1] > head_size:
        raise ValueError(f"angles {cos.shape}, {sin.shape} for {num_tokens} tokens of head size {head_size}")
    norms = [jnp.zeros(0) if norm is None else norm for norm in (q_norm, k_norm)]
    cache = _arrays(pages)
    results = (
        jax.ShapeDtypeStruct((num_tokens, num_heads, head_size), jnp.float32),
        *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in cache),
        jax.ShapeDtypeStruct((8 * num_tokens,), jnp.uint8),  # a workspace
    )
    call = jax.ffi.ffi_call(
        targets.name_of(functions_of(_dtype_of(pages))[1]),
        results,
        input_output_aliases={1 + i: 1 + i for i in range(len(cache))},
    )
    q, *written, _ = call(qkv, *cache, *_layout_operands(layout), _scalar(layer), cos, sin, *norms, eps=np.float32(eps))
    return q, replace(pages, **dict(zip(("k", "v", "k_scale", "v_scale"), written, strict=False)))


def paged_attention(
    q: Float32[Array, "T N H"],
    pages: KVPages,
    layer: int | Array,
    layout: RaggedLayout,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Float32[Array, "N"] | None = None,
    targets: Targets,
) -> Float32[Array, "T N H"]:
    """As reference.paged_attention. A token's result depends on its sequence alone, not on how it came into the cache.

    Raises ValueError for shapes the kernel does not take, NotRegistered.
    """
    num_kv_heads = pages.v.shape[2]
    if num_kv_heads == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {num_kv_heads} kv heads")
    _check_pages(pages, num_kv_heads, q.shape[2])
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} tokens sees nothing; it must be at least 1")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft cap {soft_cap} must be positive")
    sinks = jnp.full(q.shape[1], -jnp.inf) if sinks is None else sinks
    call = jax.ffi.ffi_call(
        targets.name_of(functions_of(_dtype_of(pages))[0]), jax.ShapeDtypeStruct(q.shape, jnp.float32)
    )
    return call(
        q,
        *_arrays(pages),
        *_layout_operands(layout),
        _scalar(layer),
        sinks,
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(window or _NO_WINDOW),
    )


def _arrays(pages: KVPages) -> tuple[Any, ...]:
    """The arrays a kernel takes, in order."""
    return (pages.k, pages.v) if pages.k_scale is None else (pages.k, pages.v, pages.k_scale, pages.v_scale)


def _layout_operands(layout: RaggedLayout) -> tuple[Array, Array, Array]:
    return layout.kv_lengths, layout.query_starts, layout.page_table


def _scalar(layer: int | Array) -> Array:
    return jnp.asarray(layer, jnp.int32)


def _jax_dtype(dtype: str) -> Any:
    if dtype not in _DTYPES:
        raise ValueError(f"no CPU kernel for pages of {dtype}; choose {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _dtype_of(pages: KVPages) -> str:
    return str(pages.k.dtype)


def _check_head_size(head_size: int) -> None:
    if not 1 <= head_size <= _LARGEST_HEAD or head_size % _GROUP:
        raise ValueError(f"head size {head_size}: the CPU kernels take multiples of {_GROUP} up to {_LARGEST_HEAD}")


def _check_pages(pages: KVPages, num_kv_heads: int, head_size: int) -> None:
    """That pages are laid out by `new_pages` for these heads."""
    _check_head_size(head_size)
    page_size = pages.v.shape[3] if pages.v.ndim == 5 else 0
    expected = (*pages.v.shape[:2], num_kv_heads, page_size // _GROUP, head_size, _GROUP)
    if pages.k.shape != expected or pages.v.shape[2:] != (num_kv_heads, page_size, head_size):
        raise ValueError(
            f"pages k {pages.k.shape}, v {pages.v.shape} do not fit {num_kv_heads} kv heads of {head_size} "
            "in the layout of the CPU kernels; make them with new_pages"
        )
    if (pages.k_scale is not None) != (_dtype_of(pages) == "int8"):
        raise ValueError(f"{_dtype_of(pages)} pages with{'out' * (pages.k_scale is None)} scales")


def self_test(targets: Targets, dtype: str) -> float:
    """The largest error of both kernels against the definition in float64, relative to the largest result; about 1e-6.

    A sequence is written chunk by chunk, then read from the pages that hold it. Raises NotRegistered.
    """
    num_tokens, num_heads, num_kv_heads, head_size, page_size = 90, 6, 2, 48, 32
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((num_tokens, (num_heads + 2 * num_kv_heads) * head_size), np.float32)
    turns = rng.uniform(0, 6, (num_tokens, 16)).astype(np.float32)
    pages = new_pages(
        num_layers=2, num_pages=5, page_size=page_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
    )
    results, errors = [], []
    for first, end in ((0, 70), (70, 89), (89, 90)):
        layout = RaggedLayout(
            kv_lengths=jnp.asarray([end], jnp.int32),
            query_starts=jnp.asarray([0, end - first], jnp.int32),
            page_table=jnp.asarray([[3, 0, 4]], jnp.int32),
            num_single_rows=0,
        )
        here = slice(first, end)
        angles = (jnp.cos(turns[here]), jnp.sin(turns[here]))
        q, pages = rope_write_kv(
            jnp.asarray(qkv[here]), pages, 1, layout, num_kv_heads=num_kv_heads, head_size=head_size, angles=angles,
            targets=targets,
        )  # fmt: skip
        out = paged_attention(q, pages, 1, layout, scale=0.2, targets=targets)
        results.append((np.asarray(q, np.float64), np.asarray(out, np.float64)))
    q, out = (np.concatenate(parts) for parts in zip(*results, strict=True))
    heads = qkv.reshape(num_tokens, -1, head_size).astype(np.float64)
    rotated = _rotated(heads[:, : num_heads + num_kv_heads], turns)
    errors.append(np.abs(q - rotated[:, :num_heads]).max() / np.abs(q).max())
    k, v = (np.asarray(a, np.float64)[1, [3, 0, 4]].reshape(-1, num_kv_heads, head_size) for a in decode_pages(pages))
    steps = {"float32": 1e-6, "bfloat16": 2.0**-8, "int8": 0.51 / 127}
    for got, want in ((k, rotated[:, num_heads:]), (v, heads[:, num_heads + num_kv_heads :])):
        allowed = steps[dtype] * np.abs(want).max(axis=-1, keepdims=True)
        if (np.abs(got[:num_tokens] - want) > allowed).any():
            return float("inf")
    want = _attended(q, k[:num_tokens], v[:num_tokens], scale=0.2)
    errors.append(np.abs(out - want).max() / np.abs(want).max())
    return float(max(errors))


def _rotated(x: np.ndarray, turns: np.ndarray) -> np.ndarray:
    cos, sin = (f(turns.astype(np.float64))[:, None] for f in (np.cos, np.sin))
    size = turns.shape[1]
    first, second = x[..., :size], x[..., size : 2 * size]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., 2 * size :]], axis=-1)


def _attended(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, scale: float) -> np.ndarray:
    """Causal attention of one whole sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    logits = scale * np.einsum("tnh,snh->nts", q, k)
    logits = np.where(np.tri(len(q), dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("nts,snh->tnh", weights / weights.sum(axis=-1, keepdims=True), v)
