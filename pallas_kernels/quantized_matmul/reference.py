"""The product with a packed weight as its definition: decode, then multiply in float32."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.quantized_matmul.around import Before, apply_before


@runtime_checkable
class PackedWeight(Protocol):
    """A weight [O, I] in some format, that can be written out exactly in float32."""

    def decode(self) -> Float32[Array, "O I"]: ...


def quantized_matmul(
    x: Float[Array, "T X"],
    weight: PackedWeight,
    *,
    before: Before = None,
    residual: Float[Array, "T O"] | None = None,
) -> Float32[Array, "T O"]:
    """before(x) @ decode(weight).T + residual, computed and accumulated in float32.

    The weight stays [out, in]: XLA:CPU then sums each output in one order whatever T is (from two rows up), which
    makes a row's result independent of its batch.
    """
    return plus(product(apply_before(x, before).astype(jnp.float32), weight.decode()), residual)


def plus(out: Float32[Array, "T O"], residual: Float[Array, "T O"] | None) -> Float32[Array, "T O"]:
    """The sum in float32."""
    return out if residual is None else out + residual.astype(jnp.float32)


def product(x: Float[Array, "T I"], matrix: Float[Array, "O I"]) -> Float32[Array, "T O"]:
    """x @ matrix.T accumulated in float32, without the shortcuts some devices take for float32 operands."""
    return jnp.einsum("ti,oi->to", x, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
