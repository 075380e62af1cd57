"""The paged KV cache of one model: the argument that the attention kernels share, in the layout their backend chose."""

from dataclasses import dataclass
from typing import Any

from pallas_kernels.pytree import pytree

# A jax array; None where the cache is not quantized. Layouts differ by backend, so shapes are not stated here.
PageArray = Any


@pytree
@dataclass(frozen=True, kw_only=True)
class KVPages:
    """Keys and values of all Y layers in P pages of L tokens each, for K heads of size H.

    k, v: [Y, P, ...], whatever the backend's `new_pages` made of [Y, P, L, K, H]; float32, bfloat16 or int8.
    k_scale, v_scale: for int8 pages one float32 for each token and head, [Y, P, ...]; else None. A value is then
    int8 * scale, with scale = (largest magnitude of the head's H values) / 127.
    """

    k: PageArray
    v: PageArray
    k_scale: PageArray = None
    v_scale: PageArray = None
