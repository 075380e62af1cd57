"""Token embedding and its inverse."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.layers.spread import place, total
from jaxserve.quant.quantized import Weight, embedding_rows
from pallas_kernels.kernels import Kernels


def embed(kernels: Kernels, token_ids: Int32[Array, "T"], table: Weight, dtype: str) -> Float[Array, "T D"]:
    """One row of the table per token; of a table spread over devices each adds the rows it has."""
    if "tensor" not in kernels.spread_over:
        return embedding_rows(table, token_ids).astype(dtype)
    num_rows = table.shape[0]
    at = token_ids - place(kernels, "tensor") * num_rows
    is_here = (at >= 0) & (at < num_rows)
    rows = embedding_rows(table, jnp.clip(at, 0, num_rows - 1))
    return total(kernels, jnp.where(is_here[:, None], rows, 0), "tensor").astype(dtype)


def unembed(kernels: Kernels, x: Float[Array, "R D"], table: Weight) -> Float32[Array, "R V"]:
    """Logits in float32, those of this device's part of the vocabulary."""
    return kernels.quantized_matmul(x, table).astype(jnp.float32)
