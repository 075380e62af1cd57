"""The product with the weight of each row's expert, as its definition: decode, then multiply in float32."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.quantized_matmul.around import Before, apply_before
from pallas_kernels.quantized_matmul.reference import product


@runtime_checkable
class PackedExperts(Protocol):
    """Weights [E, O, I] in some format, that can be written out exactly in float32."""

    def decode(self) -> Float32[Array, "E O I"]: ...


def grouped_matmul(
    x: Float[Array, "T X"], weight: PackedExperts, group_sizes: Int32[Array, "E"], *, before: Before = None
) -> Float32[Array, "T O"]:
    """before(x)[t] @ decode(weight)[expert of t].T: the first group_sizes[0] rows are expert 0's, the next 1's.

    Zero for rows after the last group. Every expert multiplies every row, and what is not its own is dropped.
    """
    rows = apply_before(x, before).astype(jnp.float32)
    experts = weight.decode()
    ends = jnp.cumsum(group_sizes)
    at = jnp.arange(len(x))
    out = jnp.zeros((len(x), experts.shape[1]), jnp.float32)
    for expert in range(len(experts)):
        is_own = (at >= ends[expert] - group_sizes[expert]) & (at < ends[expert])
        out = jnp.where(is_own[:, None], product(rows, experts[expert]), out)
    return out
