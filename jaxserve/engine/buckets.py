"""The closed list of step shapes that are compiled, and the choice among them."""

from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.layer_groups import LayerGroups
from jaxserve.step_inputs import StepShape

GROWTH = 8  # from one bucket to the next; coarser means fewer programs to compile and more padding
DECODE_GROWTH = 2
MAX_PREFILLS = 16  # prompts that may share a step
MIXED_SINGLES = 2  # a prefill beside at most this many decodes does not pay for the rows of a full batch


def step_shapes(
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_prefills: int,
    max_pages: int,
    deterministic: bool,
    groups: LayerGroups | None = None,
) -> tuple[StepShape, ...]:
    """All shapes, smallest first: decode-only ones, then those with room for prefill chunks.

    groups: of layers with a page table each, where they do not share one. deterministic: no step has a single row,
    because XLA then uses a matrix-vector product that sums in another order.
    """
    smallest = 2 if deterministic else 1
    tables: dict[str, Any] = {"max_pages": max_pages, "groups": groups}
    decodes = [
        StepShape(single_rows=rows, chunk_tokens=0, chunk_rows=0, **tables)
        for rows in _sizes(smallest, max(max_num_seqs, smallest), growth=DECODE_GROWTH)
    ]
    singles = decodes[-1].single_rows
    mixed = [
        StepShape(single_rows=rows, chunk_tokens=tokens, chunk_rows=min(max_prefills, tokens), **tables)
        for tokens in _sizes(min(64, max_num_batched_tokens), max_num_batched_tokens, growth=GROWTH)
        for rows in {min(MIXED_SINGLES, singles), singles}
    ]
    return tuple(sorted(decodes) + sorted(mixed, key=lambda s: (s.num_tokens, s.chunk_tokens)))


def _sizes(smallest: int, largest: int, *, growth: int) -> list[int]:
    """smallest, its multiples by growth, and largest, which replaces a last one that is almost as large."""
    sizes = [smallest]
    while sizes[-1] * growth < largest:
        sizes.append(sizes[-1] * growth)
    if 2 * sizes[-1] > largest and len(sizes) > 1:
        sizes.pop()
    return sizes if sizes[-1] >= largest else [*sizes, largest]


def choose_shape(shapes: tuple[StepShape, ...], num_singles: int, chunk_tokens: int, chunk_rows: int) -> StepShape:
    """The smallest shape that holds the step. The scheduler's limits guarantee that there is one."""
    for shape in shapes:
        fits = num_singles <= shape.single_rows and chunk_tokens <= shape.chunk_tokens
        if fits and chunk_rows <= shape.chunk_rows:
            return shape
    raise AssertionError(f"no compiled shape holds {num_singles} singles + {chunk_tokens} tokens in {chunk_rows} rows")


def check_limits(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raises ConfigError when a step could not hold one token of every running request."""
    if max_num_batched_tokens < max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {max_num_batched_tokens} is below --max-num-seqs {max_num_seqs}: "
            "a step must hold one token of every running request"
        )
