"""MLA and writes of latents on CPUs, by kernels that read and write the pages in place.

Layout of the cache: [Y, P, L, C + R], a row per token, which serves as key and, its first C values, as value: a row is
read from memory once for all heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from pallas_kernels.cpu.targets import Targets
from pallas_kernels.mla_attention import reference
from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.paged_attention.cpu import check_page_size
from pallas_kernels.ragged import RaggedLayout

_LANES = 16
_LARGEST_KEY = 1024
_DTYPES = ("float32", "bfloat16")


def functions_of(dtype: str) -> tuple[str, str]:
    """What to pass to `register` for pages of a dtype: attention, then the write."""
    if dtype not in _DTYPES:
        raise ValueError(f"no CPU kernel for latents of {dtype}; choose {', '.join(_DTYPES)}")
    folder = "pallas_kernels.mla_attention"
    return f"{folder}.cpu_compiled:attend_{dtype}", f"{folder}.cpu_write_compiled:write_{dtype}"


def all_functions() -> tuple[str, ...]:
    """Every target of this op."""
    return tuple(function for dtype in _DTYPES for function in functions_of(dtype))


def check_geometry(page_size: int, latent_size: int, rope_size: int) -> None:
    """Raises ValueError for sizes the kernels do not take."""
    check_page_size(page_size)
    sizes = latent_size, rope_size
    if latent_size < 1 or rope_size < 0 or any(size % _LANES for size in sizes) or sum(sizes) > _LARGEST_KEY:
        raise ValueError(
            f"latents of {latent_size} + {rope_size} values: the CPU kernels take multiples of {_LANES}, "
            f"up to {_LARGEST_KEY} together"
        )


def new_pages(
    *, num_layers: int, num_pages: int, page_size: int, latent_size: int, rope_size: int, dtype: str
) -> LatentPages:
    """A cache of zeros. Raises ValueError for sizes and types the kernels do not take."""
    check_geometry(page_size, latent_size, rope_size)
    functions_of(dtype)
    return reference.new_pages(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        latent_size=latent_size,
        rope_size=rope_size,
        dtype=dtype,
    )


def write_latent(
    latent: Float32[Array, "T H"], pages: LatentPages, layer: int | Array, layout: RaggedLayout, *, targets: Targets
) -> LatentPages:
    """The cache with each token's latent and rotated part, H = C + R values, stored at its position's page.

    Tokens that do not exist and page numbers outside the cache are dropped. Under jit with donated pages nothing is
    copied. Raises ValueError for shapes the kernel does not take, NotRegistered.
    """
    num_tokens, size = latent.shape
    _check_pages(pages, size)
    cache = pages.latent
    results = (
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        jax.ShapeDtypeStruct((8 * num_tokens,), jnp.uint8),  # a workspace
    )
    name = targets.name_of(functions_of(str(cache.dtype))[1])
    written, _ = jax.ffi.ffi_call(name, results, input_output_aliases={1: 0})(
        latent, cache, *_layout_operands(layout), jnp.asarray(layer, jnp.int32)
    )
    return LatentPages(latent=written)


def mla_attention(
    q: Float32[Array, "T N H"],
    pages: LatentPages,
    layer: int | Array,
    layout: RaggedLayout,
    *,
    scale: float,
    latent_size: int,
    targets: Targets,
) -> Float32[Array, "T N C"]:
    """As reference.mla_attention. A token's result depends on its sequence alone, not on how it came into the cache.

    Raises ValueError for shapes the kernel does not take, NotRegistered.
    """
    num_tokens, num_heads, size = q.shape
    _check_pages(pages, size)
    check_geometry(pages.latent.shape[2], latent_size, size - latent_size)
    if num_heads == 0:
        raise ValueError("no query heads")
    call = jax.ffi.ffi_call(
        targets.name_of(functions_of(str(pages.latent.dtype))[0]),
        jax.ShapeDtypeStruct((num_tokens, num_heads, latent_size), jnp.float32),
    )
    return call(q, pages.latent, *_layout_operands(layout), jnp.asarray(layer, jnp.int32), scale=np.float32(scale))


def _layout_operands(layout: RaggedLayout) -> tuple[Array, Array, Array]:
    return layout.kv_lengths, layout.query_starts, layout.page_table


def _check_pages(pages: LatentPages, size: int) -> None:
    """That a cache holds keys of this size."""
    shape: Any = pages.latent.shape
    if len(shape) != 4 or shape[3] != size:
        raise ValueError(f"pages {shape} do not hold keys of {size} values; make them with new_pages")
    check_geometry(shape[2], size, 0)


def self_test(targets: Targets, dtype: str) -> float:
    """The largest error of both kernels against the definition in float64, relative to the largest result; about 1e-6.

    A sequence is written chunk by chunk, then read from the pages that hold it. Raises NotRegistered.
    """
    num_tokens, num_heads, latent_size, rope_size, page_size = 90, 6, 80, 16, 32
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((num_tokens, latent_size + rope_size), np.float32)
    q = rng.standard_normal((num_tokens, num_heads, latent_size + rope_size), np.float32)
    pages = new_pages(
        num_layers=2, num_pages=5, page_size=page_size, latent_size=latent_size, rope_size=rope_size, dtype=dtype
    )
    results = []
    for first, end in ((0, 70), (70, 89), (89, 90)):
        layout = RaggedLayout(
            kv_lengths=jnp.asarray([end], jnp.int32),
            query_starts=jnp.asarray([0, end - first], jnp.int32),
            page_table=jnp.asarray([[3, 0, 4]], jnp.int32),
            num_single_rows=0,
        )
        pages = write_latent(jnp.asarray(latent[first:end]), pages, 1, layout, targets=targets)
        here = jnp.asarray(q[first:end])
        out = mla_attention(here, pages, 1, layout, scale=0.2, latent_size=latent_size, targets=targets)
        results.append(np.asarray(out, np.float64))
    keys = np.asarray(pages.latent.astype(jnp.float32), np.float64)[1, [3, 0, 4]].reshape(-1, latent.shape[1])
    step = 1e-6 if dtype == "float32" else 2.0**-8
    if (np.abs(keys[:num_tokens] - latent) > step * np.abs(latent)).any() or keys[num_tokens:].any():
        return float("inf")
    want = _attended(q.astype(np.float64), keys[:num_tokens], scale=0.2, latent_size=latent_size)
    return float(np.abs(np.concatenate(results) - want).max() / np.abs(want).max())


def _attended(q: np.ndarray, keys: np.ndarray, *, scale: float, latent_size: int) -> np.ndarray:
    """Causal attention of one whole sequence."""
    logits = scale * np.einsum("tnh,sh->nts", q, keys)
    logits = np.where(np.tri(len(q), dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("nts,sc->tnc", weights / weights.sum(axis=-1, keepdims=True), keys[:, :latent_size])
