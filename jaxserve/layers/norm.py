"""Normalization layers."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "T D"], weight: Float[Array, "D"], eps: float) -> Float[Array, "T D"]:
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32 (Zhang & Sennrich 2019, arXiv 1910.07467).

    The squares are summed by a product with ones: XLA:CPU's own reductions sum in an order that depends on the number
    of rows, and a token's result must not depend on its batch.
    """
    y = x.astype(jnp.float32)
    ones = jnp.ones((8, y.shape[-1]), jnp.float32)
    total = jnp.einsum("td,od->to", jnp.square(y), ones, precision=lax.Precision.HIGHEST)[:, :1]
    y = y * lax.rsqrt(total / y.shape[-1] + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)
