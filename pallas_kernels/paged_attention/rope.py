"""From the columns [q | k | v] of one product to rotated queries, keys and values: the shared definition."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.quantized_matmul.around import rms_norm

Angles = tuple[Float32[Array, "T h"], Float32[Array, "T h"]]


def rotate(x: Float[Array, "T N H"], angles: Angles) -> Float[Array, "T N H"]:
    """x with pairs (i, i + h) of each head rotated, i < h; values from 2h on pass (Su et al. 2021, arXiv 2104.09864).

    angles: cos and sin. The half-split layout of HF; h is H / 2 unless the rotation is partial.
    """
    cos, sin = (a[:, None, :] for a in angles)
    size = cos.shape[-1]
    y = x.astype(jnp.float32)
    first, second = y[..., :size], y[..., size : 2 * size]
    parts = [first * cos - second * sin, second * cos + first * sin, y[..., 2 * size :]]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def split_and_rotate(
    qkv: Float[Array, "T C"],
    *,
    num_kv_heads: int,
    head_size: int,
    angles: Angles | None = None,
    q_norm: Float[Array, "H"] | None = None,
    k_norm: Float[Array, "H"] | None = None,
    eps: float = 0.0,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Queries, keys and values of columns [q | k | v]; q and k normed per head where asked, then rotated."""
    heads = qkv.reshape(qkv.shape[0], -1, head_size)
    q, k, v = heads[:, : -2 * num_kv_heads], heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    return q, k, v
