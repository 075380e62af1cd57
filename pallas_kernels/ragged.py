"""How the tokens of one step are laid out over sequences: the argument every attention kernel shares."""

from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class RaggedLayout:
    """T tokens of B sequences, concatenated in row order, over a paged cache.

    kv_lengths: tokens of the sequence in the cache once this step's are written; 0 for a padding row.
    query_starts: row b owns tokens query_starts[b] .. query_starts[b + 1].
    page_table: page numbers of each row in order; entries at or past the end of a sequence are never followed. Those
    before the window of all of a row's tokens count for nothing, and are -1 where the pages were given back.
    num_single_rows: the first so many rows own exactly one token each (row i owns token i); static, so that a
    backend may treat them as a dense batch of decodes and the remaining rows as prefill chunks.
    """

    kv_lengths: Int32[Array, "B"]
    query_starts: Int32[Array, "B+1"]
    page_table: Int32[Array, "B M"]
    num_single_rows: int = field(metadata={"static": True})


def rows_of_tokens(layout: RaggedLayout, num_tokens: int) -> Int32[Array, "T"]:
    """The row that owns each token; trailing padding tokens get the last row."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(layout.query_starts, tokens, side="right").astype(jnp.int32) - 1
    return jnp.minimum(rows, layout.kv_lengths.shape[0] - 1)


def positions_of_tokens(
    layout: RaggedLayout, num_tokens: int
) -> tuple[Int32[Array, "T"], Int32[Array, "T"], Bool[Array, "T"]]:
    """Row and position of each token, and whether the token exists (False for padding)."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = rows_of_tokens(layout, num_tokens)
    ends = layout.query_starts[rows + 1]
    positions = layout.kv_lengths[rows] - (ends - tokens)
    return rows, positions, (tokens < ends) & (positions >= 0)
