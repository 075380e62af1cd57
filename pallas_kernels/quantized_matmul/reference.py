"""The product with a packed weight as its definition: decode, then multiply in float32."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


@runtime_checkable
class PackedWeight(Protocol):
    """A weight [O, I] in some format, that can be written out exactly in float32."""

    def decode(self) -> Float32[Array, "O I"]: ...


def quantized_matmul(x: Float[Array, "T I"], weight: PackedWeight) -> Float32[Array, "T O"]:
    """x @ decode(weight).T, computed and accumulated in float32.

    The weight stays [out, in]: XLA:CPU then sums each output in one order whatever T is (from two rows up), which
    makes a row's result independent of its batch.
    """
    return product(x.astype(jnp.float32), weight.decode())


def product(x: Float[Array, "T I"], matrix: Float[Array, "O I"]) -> Float32[Array, "T O"]:
    """x @ matrix.T accumulated in float32, without the shortcuts some devices take for float32 operands."""
    return jnp.einsum("ti,oi->to", x, matrix, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
