"""What the paged key-value cache of a model looks like, and what one page costs."""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.kernels import Kernels
from pallas_kernels.kv_pages import KVPages

SCALE_BYTES = 4  # of a quantized cache: one float32 for each token, head and side


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """Geometry of a grouped-query cache; dtype by name."""

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


def empty_cache(spec: KVCacheSpec, num_pages: int, kernels: Kernels) -> KVPages:
    """A cache of zeros in the layout of these kernels."""
    return kernels.new_pages(
        num_layers=spec.num_layers,
        num_pages=num_pages,
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=spec.dtype,
    )
