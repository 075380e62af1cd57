"""Layers in groups with a page table each, so that those with a window let pages go that the others keep.

All groups have equally many layers. A page holds page_size tokens of one group's layers, so that any page serves any
group and one pool of them is enough (vLLM's hybrid cache does it so): nobody has to say beforehand how much of the
memory windows will need.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.pytree import pytree
from pallas_kernels.ragged import RaggedLayout

MAX_GROUPS = 8  # each costs a page table in every step
MAX_SHARE = 0.9  # of the memory without groups, for them to be worth their page tables
_NO_PAGE = -1


@dataclass(frozen=True, kw_only=True)
class LayerGroups:
    """Which layers share a page table.

    num_full, num_windowed: groups of layers that see all tokens, which come first, and of those with a window.
    places: of each layer its group and its number there. window: the widest. window_pages: no sequence holds more
    pages at a time for a layer with a window; the step is told of so many.
    """

    layers_per_group: int
    num_full: int
    num_windowed: int
    places: tuple[tuple[int, int], ...]
    window: int
    window_pages: int
    page_size: int

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    @property
    def num_windowed_layers(self) -> int:
        return sum(group >= self.num_full for group, _ in self.places)


def layer_groups(
    windows: Sequence[int | None], page_size: int, window_pages: int, max_pages: int
) -> LayerGroups | None:
    """The groups in which a sequence of max_pages pages takes least memory while it generates, the fewest of them; None
    where that saves less than a tenth against all layers together, or where all or no layers have a window.

    Layers of one kind fill their groups in order; the last group of a kind may have room for layers that do not exist.
    window_pages: see LayerGroups.
    """
    widths = [window for window in windows if window is not None]
    num_full = len(windows) - len(widths)
    if not widths or not num_full:
        return None
    held = min(-(-max(widths) // page_size) + 1, max_pages)  # so many pages do the tokens of a window touch
    best = (MAX_SHARE * len(windows) * max_pages, 0, 0)
    for size in range(1, len(windows) + 1):
        full, windowed = -(-num_full // size), -(-len(widths) // size)
        if full + windowed <= MAX_GROUPS:
            best = min(best, (size * (full * max_pages + windowed * held), full + windowed, size))
    _, _, size = best
    if not size:
        return None
    full = -(-num_full // size)
    seen, places = [0, 0], []
    for window in windows:
        first, kind = (0, 0) if window is None else (full, 1)
        places.append((first + seen[kind] // size, seen[kind] % size))
        seen[kind] += 1
    return LayerGroups(
        layers_per_group=size,
        num_full=full,
        num_windowed=-(-len(widths) // size),
        places=tuple(places),
        window=max(widths),
        window_pages=window_pages,
        page_size=page_size,
    )


@pytree
@dataclass(frozen=True, kw_only=True)
class GroupedLayout:
    """One layout for each group of layers; they differ in their page tables alone. places: see LayerGroups."""

    layouts: tuple[RaggedLayout, ...]
    places: tuple[tuple[int, int], ...] = field(metadata={"static": True})


Paging = RaggedLayout | GroupedLayout


def rows_layout(paging: Paging) -> RaggedLayout:
    """How tokens lie in rows, which is the same for all layers."""
    return paging if isinstance(paging, RaggedLayout) else paging.layouts[0]


def layer_places(paging: Paging, num_layers: int) -> tuple[tuple[int, int], ...]:
    """Of each layer, the number of its layout (see `group_layout`) and where it lies in the cache."""
    if isinstance(paging, RaggedLayout):
        return tuple((0, layer) for layer in range(num_layers))
    assert len(paging.places) == num_layers, f"{len(paging.places)} places for {num_layers} layers"
    return paging.places


def group_layout(paging: Paging, group: int) -> RaggedLayout:
    """The layout of one group of layers."""
    return paging if isinstance(paging, RaggedLayout) else paging.layouts[group]


def window_tables(rings: Int32[Array, "G B W"], layout: RaggedLayout, groups: LayerGroups) -> Int32[Array, "G B M"]:
    """Page tables of layers with a window, as wide as that of the others, from the pages that sequences hold.

    rings: the page at index i of a table in column i % W. Pages that no token of the row sees come out as -1.
    """
    max_pages, num_held = layout.page_table.shape[1], rings.shape[2]
    lengths = layout.query_starts[1:] - layout.query_starts[:-1]
    lowest = layout.kv_lengths - lengths + 1 - groups.window  # the first position that the row's first token sees
    first = jnp.maximum(lowest, 0)[:, None] // groups.page_size
    columns = jnp.arange(max_pages)[None]
    repeated = jnp.tile(rings, (1, 1, -(-max_pages // num_held)))[:, :, :max_pages]
    return jnp.where((columns >= first) & (columns < first + num_held), repeated, _NO_PAGE)
