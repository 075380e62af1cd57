"""Normalization layers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "T D"]:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)
