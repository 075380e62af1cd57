"""The paged key-value cache as a pytree, and what one page costs."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pytree import pytree


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
        """Bytes of one page over all layers, keys and values."""
        per_token = self.num_layers * self.num_kv_heads * self.head_size * jnp.dtype(self.dtype).itemsize
        return 2 * per_token * self.page_size


@pytree
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of all layers, each one array, so that a step donates two buffers and copies none."""

    k_pages: Float[Array, "Y P L K H"]
    v_pages: Float[Array, "Y P L K H"]


def empty_cache(spec: KVCacheSpec, num_pages: int) -> KVCache:
    """A cache of zeros."""
    shape = (spec.num_layers, num_pages, spec.page_size, spec.num_kv_heads, spec.head_size)
    return KVCache(k_pages=jnp.zeros(shape, spec.dtype), v_pages=jnp.zeros(shape, spec.dtype))
