"""The product with the weight of each row's expert, by XLA's ragged dot."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.grouped_matmul.reference import PackedExperts
from pallas_kernels.quantized_matmul.around import Before, apply_before


def grouped_matmul(
    x: Float[Array, "T X"], weight: PackedExperts, group_sizes: Int32[Array, "E"], *, before: Before = None
) -> Float32[Array, "T O"]:
    """As the reference for float32 activations; for bfloat16 ones the decoded weights are rounded to bfloat16 first.

    A precision is asked for in float32 only: the TPU's compiler refuses ragged products of bfloat16 with one.
    """
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    return lax.ragged_dot(
        apply_before(x, before).astype(dtype),
        weight.decode().astype(dtype).swapaxes(1, 2),
        group_sizes,
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
