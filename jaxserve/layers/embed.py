"""Token embedding and its inverse."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.quant.quantized import Weight, embedding_rows
from pallas_kernels.kernels import Kernels


def embed(token_ids: Int32[Array, "T"], table: Weight, dtype: str) -> Float[Array, "T D"]:
    """One row of the table per token."""
    return embedding_rows(table, token_ids).astype(dtype)


def unembed(kernels: Kernels, x: Float[Array, "R D"], table: Weight) -> Float32[Array, "R V"]:
    """Logits in float32."""
    return kernels.quantized_matmul(x, table).astype(jnp.float32)
