"""What the paged key-value cache of a model looks like, and what one page costs."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.kernels import Kernels
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.mla_attention.latent_pages import LatentPages

LATENT_DTYPES = ("float32", "bfloat16")
LANES = {"tpu": 128}  # a row of latents is a multiple of so many values there: XLA copies other caches in every step
SCALE_BYTES = 4  # of a quantized cache: one float32 for each token, head and side


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Geometry of a grouped-query cache; dtype by name. num_layers: those that a page is of."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    page_size: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys, values and their scales."""
        head_bytes = self.head_size * jnp.dtype(self.dtype).itemsize + (SCALE_BYTES if self.dtype == "int8" else 0)
        return 2 * self.num_layers * self.num_kv_heads * head_bytes * self.page_size


@dataclass(frozen=True, kw_only=True)
class LatentCacheSpec:
    """Geometry of a cache of latents, which all heads share, with a rotated key beside each; dtype by name.

    padding: values at the end of each row that hold nothing.
    """

    num_layers: int
    latent_size: int
    rope_size: int
    page_size: int
    dtype: str
    padding: int = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        row = self.latent_size + self.rope_size + self.padding
        return self.num_layers * row * jnp.dtype(self.dtype).itemsize * self.page_size


Cache = KVPages | LatentPages
CacheSpec = KVCacheSpec | LatentCacheSpec


def cache_spec(
    config: Any, page_size: int, dtype: str, layers_per_page: int | None = None, *, platform: str = "cpu"
) -> CacheSpec:
    """What the cache of a model looks like, by its config, on devices of a jax platform. ValueError for a type that is
    not kept for it.

    layers_per_page: where the layers are in groups (layer_groups.py), those of one group; else a page is of all layers.
    """
    mla = getattr(config, "mla", None)
    if mla is None:
        return KVCacheSpec(
            num_layers=layers_per_page or config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            page_size=page_size,
            dtype=dtype,
        )
    if dtype not in LATENT_DTYPES:
        raise ValueError(f"latents (this model's cache) are kept as {' or '.join(LATENT_DTYPES)}, not {dtype}")
    return LatentCacheSpec(
        num_layers=config.num_layers,
        latent_size=mla.latent_size,
        rope_size=mla.rope_size,
        page_size=page_size,
        dtype=dtype,
        padding=-(mla.latent_size + mla.rope_size) % LANES.get(platform, 1),
    )


def cache_window(config: Any) -> int | None:
    """The tokens before which no layer of the model sees any, itself counted; None where a layer sees all of them."""
    windows = getattr(config, "windows", ())
    return max(windows) if windows and None not in windows else None


def empty_cache(spec: CacheSpec, num_pages: int, kernels: Kernels) -> Cache:
    """A cache of zeros in the layout of these kernels."""
    if isinstance(spec, LatentCacheSpec):
        return kernels.new_latent_pages(
            num_layers=spec.num_layers,
            num_pages=num_pages,
            page_size=spec.page_size,
            latent_size=spec.latent_size,
            rope_size=spec.rope_size + spec.padding,
            dtype=spec.dtype,
        )
    return kernels.new_pages(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
    )
