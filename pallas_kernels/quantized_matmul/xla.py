"""The product with a packed weight from XLA operations, in the type of the activations."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.quantized_matmul.around import Before, apply_before
from pallas_kernels.quantized_matmul.reference import PackedWeight, plus, product


def quantized_matmul(
    x: Float[Array, "T X"],
    weight: PackedWeight,
    *,
    before: Before = None,
    residual: Float[Array, "T O"] | None = None,
) -> Float32[Array, "T O"]:
    """As the reference for float32 activations; for bfloat16 ones the decoded weight is rounded to bfloat16 first, so
    that the product runs on matrix units. Accumulated in float32 either way."""
    dtype = jnp.bfloat16 if x.dtype == jnp.bfloat16 else jnp.float32
    out = product(apply_before(x, before).astype(dtype), weight.decode().astype(dtype))
    return plus(out, residual)
