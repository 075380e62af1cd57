"""Named shapes for tests and benchmarks of paged attention, taken from real models where they have a name."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: heads and page geometry, and per row (tokens in this step, tokens in the cache afterwards)."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    page_size: int
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


CASES = (
    Case(
        name="smollm2-decode", num_heads=9, num_kv_heads=3, head_size=64, page_size=16, rows=((1, 1), (1, 130), (1, 37))
    ),
    Case(name="smollm2-chunk", num_heads=9, num_kv_heads=3, head_size=64, page_size=16, rows=((70, 70), (5, 200))),
    Case(
        name="mixed",
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        page_size=16,
        rows=((1, 129), (1, 1), (3, 3), (66, 140)),
    ),
    Case(name="page-1", num_heads=4, num_kv_heads=4, head_size=16, page_size=1, rows=((1, 5), (7, 9))),
    Case(name="page-256", num_heads=4, num_kv_heads=1, head_size=16, page_size=256, rows=((1, 300), (130, 257))),
    Case(name="window", num_heads=4, num_kv_heads=2, head_size=16, page_size=16, window=20, rows=((1, 150), (40, 190))),
    Case(
        name="soft-cap", num_heads=4, num_kv_heads=2, head_size=16, page_size=16, soft_cap=5.0, rows=((1, 33), (9, 12))
    ),
    Case(name="sinks", num_heads=8, num_kv_heads=2, head_size=16, page_size=16, sinks=True, rows=((1, 3), (66, 66))),
)
