"""Which layers share a page table: what memory a sequence takes decides, and every layer has a place of its own."""

from typing import Any

import pytest

from jaxserve.layer_groups import MAX_GROUPS, layer_groups

PAGES, HELD = 1000, 33  # of a sequence in layers that see everything, and of a window of 512 tokens


def pattern(period, num_layers, window=512):
    """Every `period`-th layer sees everything."""
    return [window if (n + 1) % period else None for n in range(num_layers)]


def groups_of(windows, pages: int = PAGES) -> Any:
    return layer_groups(windows, 16, 100, pages)


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (pattern(6, 26), (4, 1, 6)),  # Gemma 3 1B: 4 layers see everything, 22 do not
        (pattern(6, 34), (5, 1, 6)),
        (pattern(6, 48), (8, 1, 5)),
        (pattern(6, 62), (10, 1, 6)),
        (pattern(2, 26), (13, 1, 1)),  # Gemma 2
        (pattern(2, 36), (18, 1, 1)),  # gpt-oss-120b
        ([None] * 21 + [512] * 7, (7, 3, 1)),  # Qwen2 with windows from layer 21 on
        ([None, 16, 16], (1, 1, 2)),
    ],
)
def test_the_groups_of_known_models(windows, sizes):
    found = groups_of(windows)
    assert (found.layers_per_group, found.num_full, found.num_windowed) == sizes
    assert found.num_windowed_layers == sum(window is not None for window in windows)


@pytest.mark.parametrize("num_layers", [2, 3, 7, 26, 61])
@pytest.mark.parametrize("period", [2, 3, 4, 6])
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(num_layers, period):
    windows = pattern(period, num_layers)
    found = groups_of(windows)
    if num_layers < period:
        assert found is None  # all layers have a window: one page table is enough
        return
    assert found.num_groups <= MAX_GROUPS
    assert len(found.places) == len(set(found.places)) == num_layers
    for window, (group, place) in zip(windows, found.places, strict=True):
        assert (window is None) == (group < found.num_full)
        assert 0 <= group < found.num_groups
        assert 0 <= place < found.layers_per_group
    in_groups = found.layers_per_group * (found.num_full * PAGES + found.num_windowed * HELD)
    assert in_groups < 0.9 * num_layers * PAGES


@pytest.mark.parametrize(
    ("windows", "pages"),
    [([], PAGES), ([None] * 4, PAGES), ([16] * 4, PAGES), (pattern(2, 4), HELD), (pattern(2, 4), HELD + 4)],
)
def test_no_groups_where_they_save_next_to_nothing(windows, pages):
    assert groups_of(windows, pages) is None


def test_groups_as_soon_as_they_save_a_tenth():
    """Half of the layers hold 33 pages: with 42 pages that is 75 of 84."""
    assert groups_of(pattern(2, 4), 41) is None
    assert groups_of(pattern(2, 4), 42) is not None


def test_windows_of_several_widths_are_kept_as_the_widest():
    assert groups_of([None, 16, 64, 32]).window == 64
