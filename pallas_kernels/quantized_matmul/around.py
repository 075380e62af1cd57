"""What a product may take over from its neighbours: the norm or gated unit before it, the residual sum after it.

Activations then pass through memory once instead of two or three times. The functions here are the definitions; they
are what backends without a fused kernel run.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.pytree import pytree

Activation = Literal["silu", "gelu_tanh"]


@pytree
@dataclass(frozen=True, kw_only=True)
class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight before the product (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    weight: Float[Array, "I"]
    eps: float = field(metadata={"static": True})


@dataclass(frozen=True, kw_only=True)
class GatedUnit:
    """activation(gate) * up before the product, for x = [gate | up] (Shazeer 2020, arXiv 2002.05202)."""

    activation: Activation


Before = RmsNorm | GatedUnit | None


def apply_before(x: Float[Array, "T X"], before: Before) -> Float[Array, "T I"]:
    """What the product multiplies, in x's dtype; X is 2 I for a gated unit, else I."""
    if isinstance(before, RmsNorm):
        return rms_norm(x, before.weight, before.eps)
    if isinstance(before, GatedUnit):
        return gated_unit(x, before.activation)
    return x


def rms_norm(x: Float[Array, "... I"], weight: Float[Array, "I"], eps: float) -> Float[Array, "... I"]:
    """The norm over the last axis, computed in float32.

    The squares are summed by a product with ones: XLA:CPU's own reductions sum in an order that depends on the number
    of rows, and a token's result must not depend on its batch.
    """
    y = x.astype(jnp.float32)
    ones = jnp.ones((8, y.shape[-1]), jnp.float32)
    total = jnp.einsum("...i,oi->...o", jnp.square(y), ones, precision=lax.Precision.HIGHEST)[..., :1]
    y = y * lax.rsqrt(total / y.shape[-1] + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def gated_unit(x: Float[Array, "T X"], activation: Activation) -> Float[Array, "T I"]:
    """activation(first half of the columns) * second half."""
    gate, up = jnp.split(x, 2, axis=-1)
    if activation == "silu":
        return jax.nn.silu(gate) * up
    return jax.nn.gelu(gate, approximate=True) * up
