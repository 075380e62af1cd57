"""Which layers share a page table: what memory a sequence takes decides, and every layer has a place of its own."""

from typing import Any

import pytest

from jaxserve.layer_groups import MAX_GROUPS, layer_groups

PAGES, HELD = 1000, 50  # of a sequence in layers that see everything, and in those with a window


def pattern(period, num_layers, window=512):
    """Every `period`-th layer sees everything."""
    return [window if (n + 1) % period else None for n in range(num_layers)]


def groups_of(windows, held: int = HELD) -> Any:
    return layer_groups(windows, 16, held, PAGES)


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (pattern(6, 26), (4, 1, 6)),  # Gemma 3 1B: 4 layers see everything, 22 do not
        (pattern(6, 34), (5, 1, 6)),
        (pattern(6, 48), (8, 1, 5)),
        (pattern(6, 62), (10, 1, 6)),
        (pattern(2, 26), (13, 1, 1)),  # Gemma 2
        (pattern(2, 36), (18, 1, 1)),  # gpt-oss-120b
        ([None] * 21 + [4096] * 7, (7, 3, 1)),  # Qwen2 with windows from layer 21 on
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
    assert in_groups < num_layers * PAGES


@pytest.mark.parametrize(
    ("windows", "held"),
    [([], HELD), ([None] * 4, HELD), ([16] * 4, HELD), (pattern(2, 4), PAGES), (pattern(2, 4), PAGES + 1)],
)
def test_no_groups_where_they_save_nothing(windows, held):
    assert groups_of(windows, held) is None


def test_windows_of_several_widths_are_kept_as_the_widest():
    assert groups_of([None, 16, 64, 32]).window == 64
