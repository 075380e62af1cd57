"""Named shapes for tests and benchmarks of MLA, taken from real models where they have a name."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from pallas_kernels.mla_attention.latent_pages import LatentPages
from pallas_kernels.ragged import RaggedLayout


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: sizes and page geometry, and per row (tokens in this step, tokens in the cache afterwards)."""

    name: str
    num_heads: int
    latent_size: int
    rope_size: int
    page_size: int
    rows: tuple[tuple[int, int], ...]
    is_large: bool = False


CASES = (
    Case(
        name="v2-lite-decode",
        num_heads=16,
        latent_size=512,
        rope_size=64,
        page_size=16,
        rows=((1, 1), (1, 70), (1, 37)),
    ),
    Case(name="v2-lite-chunk", num_heads=16, latent_size=512, rope_size=64, page_size=64, rows=((9, 75), (3, 3))),
    Case(
        name="mixed",
        num_heads=8,
        latent_size=64,
        rope_size=16,
        page_size=16,
        rows=((1, 129), (1, 1), (3, 3), (66, 140)),
    ),
    Case(name="one-head", num_heads=1, latent_size=16, rope_size=16, page_size=16, rows=((1, 65), (7, 9))),
    Case(name="odd-heads", num_heads=7, latent_size=80, rope_size=32, page_size=32, rows=((1, 33), (12, 70))),
    Case(name="many-heads", num_heads=42, latent_size=32, rope_size=16, page_size=32, rows=((1, 70), (2, 64))),
    Case(name="spans", num_heads=3, latent_size=48, rope_size=16, page_size=32, rows=((1, 1400), (3, 600), (1, 512))),
    Case(
        name="v3-decode",
        num_heads=128,
        latent_size=512,
        rope_size=64,
        page_size=64,
        rows=((1, 1100), (1, 300)),
        is_large=True,
    ),
    Case(
        name="v3-chunk",
        num_heads=128,
        latent_size=512,
        rope_size=64,
        page_size=64,
        rows=((1, 40), (20, 150)),
        is_large=True,
    ),
)


def inputs_of(
    case: Case, dtype: str, unused: float = 0.0
) -> tuple[Float32[Array, "T N H"], LatentPages, RaggedLayout, dict[str, Any]]:
    """Queries, pages of two layers, layout and options of a case, with padding rows and tokens.

    unused: what slots and pages hold that no sequence has.
    """
    rng = np.random.default_rng(0)
    singles = [row for row in case.rows if row[0] == 1]
    rows = [*singles, (1, 0), *(row for row in case.rows if row[0] > 1), (0, 0)]
    needs = [-(-kv // case.page_size) for _, kv in rows]
    num_pages, size = sum(needs) + 3, case.latent_size + case.rope_size
    free = rng.permutation(num_pages)
    table = np.full((len(rows), max(needs) + 1), num_pages + 7, np.int32)
    used = np.zeros((num_pages, case.page_size), bool)
    for i, (_, kv) in enumerate(rows):
        table[i, : needs[i]], free = free[: needs[i]], free[needs[i] :]
        for position in range(kv):
            used[table[i, position // case.page_size], position % case.page_size] = True
    latent = rng.standard_normal((2, num_pages, case.page_size, size), np.float32)
    latent[:, ~used] = unused
    starts = np.concatenate([[0], np.cumsum([n for n, _ in rows])]).astype(np.int32)
    layout = RaggedLayout(
        kv_lengths=jnp.asarray([kv for _, kv in rows], jnp.int32),
        query_starts=jnp.asarray(starts),
        page_table=jnp.asarray(table),
        num_single_rows=len(singles) + 1,
    )
    q = rng.standard_normal((int(starts[-1]) + 3, case.num_heads, size), np.float32)
    options = {"scale": size**-0.5, "latent_size": case.latent_size}
    return jnp.asarray(q), LatentPages(latent=jnp.asarray(latent, dtype)), layout, options
