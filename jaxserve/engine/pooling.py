"""Hidden states of a prompt as one vector: summed over each step's tokens on the device, over steps on the host.

Nothing of it is kept on the device between steps, and a request that was preempted starts anew by itself.
"""

from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.pooling_params import Pooling
from pallas_kernels.ragged import RaggedLayout

POOLS_NOTHING, POOLS_SUM, POOLS_LAST = 0, 1, 2
CODES: dict[Pooling, int] = {"mean": POOLS_SUM, "last": POOLS_LAST}


def pooled_states(
    hidden: Float[Array, "T D"], layout: RaggedLayout, pooling: Int32[Array, "B"]
) -> Float32[Array, "B D"]:
    """For each row that pools, the sum of its tokens' hidden states, or the last one's; zeros at no cost when no row
    does. Rows that pool nothing hold what they happen to; no row reads a state of another, were it NaN."""
    num_rows, singles = pooling.shape[0], layout.num_single_rows

    def of_chunk(row: tuple[Array, Array, Array]) -> Array:
        start, end, code = row
        tokens = jnp.arange(singles, hidden.shape[0], dtype=jnp.int32)
        first = jnp.where(code == POOLS_LAST, end - 1, start)
        own = (tokens >= first) & (tokens < end)
        return jnp.sum(jnp.where(own[:, None], hidden[singles:].astype(jnp.float32), 0.0), axis=0)

    def compute() -> Array:
        alone = hidden[:singles].astype(jnp.float32)
        if num_rows == singles:
            return alone
        starts = layout.query_starts
        chunks = lax.map(of_chunk, (starts[singles:-1], starts[singles + 1 :], pooling[singles:]))
        return jnp.concatenate([alone, chunks])

    def nothing() -> Array:
        return jnp.zeros((num_rows, hidden.shape[1]), jnp.float32)

    return lax.cond(jnp.any(pooling > POOLS_NOTHING), compute, nothing)


@dataclass(slots=True, kw_only=True, eq=False)
class PooledPrompt:
    """What the steps so far made of one prompt. Positions come in order; one that starts at 0 begins anew."""

    pooling: Pooling
    num_tokens: int = 0
    _total: np.ndarray | None = field(default=None, repr=False)

    def add(self, states: np.ndarray, start: int, length: int) -> None:
        """Takes a step's row, which covers the positions from start on."""
        if start == 0:
            self._total, self.num_tokens = None, 0
        assert start == self.num_tokens, "hidden states of a pooled prompt are missing"
        self.num_tokens += length
        values = np.asarray(states, np.float64)
        self._total = values if self.pooling == "last" or self._total is None else self._total + values

    def vector(self) -> list[float]:
        """The pooled vector of the whole prompt."""
        assert self._total is not None, "the prompt was not computed yet"
        return (self._total / (self.num_tokens if self.pooling == "mean" else 1)).tolist()
