"""Placement of experts: every expert has a slot, copies go where the load is, and the sums even out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.placement import ExpertPlacement, balanced, imbalance, in_order, packed, with_copies


def test_without_load_the_experts_lie_in_order():
    placement = in_order(2, 8, 4)
    assert placement.slots.tolist() == [list(range(8))] * 2
    load = np.array([[4, 4, 0, 0, 0, 0, 0, 0], [1] * 8])
    assert placement.device_load(load).tolist() == [[8, 0, 0, 0], [2, 2, 2, 2]]
    assert placement.imbalance(load).tolist() == [4, 1]


def test_the_busiest_expert_is_copied():
    load = np.array([[90, 10, 10, 10]])
    placement = balanced(load, num_devices=3, num_slots=6)
    assert placement.num_copies.tolist() == [[3, 1, 1, 1]]
    assert placement.device_load(load).tolist() == [[40, 40, 40]]
    assert placement.slots_of_experts(4)[0, 1].tolist() == [int(np.flatnonzero(placement.slots[0] == 1)[0])] * 4
    assert len(set(placement.slots_of_experts(3)[0, 0].tolist())) == 3


def test_a_layer_without_load_is_balanced():
    assert imbalance(np.zeros((2, 3))).tolist() == [1, 1]
    assert balanced(np.zeros((1, 4)), num_devices=2, num_slots=4).imbalance(np.zeros((1, 4))).tolist() == [1]


def test_groups_stay_on_their_host():
    load = np.arange(16, dtype=float)[None]
    placement = balanced(load, num_devices=4, num_slots=24, num_hosts=2, num_groups=4)
    for host in placement.slots[0].reshape(2, 12):
        assert len({expert // 4 for expert in host.tolist()}) == 2
    assert placement.imbalance(load)[0] < 1.1 < in_order(1, 16, 4).imbalance(load)[0]


def test_groups_that_hosts_cannot_share_are_not_kept_together():
    load = np.arange(12, dtype=float)[None]
    apart = balanced(load, num_devices=4, num_slots=12, num_hosts=2, num_groups=3)
    assert (apart.slots == balanced(load, num_devices=4, num_slots=12).slots).all()


def test_a_hand_made_case_of_deepseeks_layout():
    """Two layers of twelve experts on eight devices of two hosts: near balance, with four spare slots."""
    rng = np.random.default_rng(0)
    load = rng.integers(10, 200, (2, 12)).astype(float)
    placement = balanced(load, num_devices=8, num_slots=16, num_hosts=2, num_groups=4)
    before = in_order(2, 12, 4).imbalance(load)
    assert (placement.imbalance(load) < before).all()
    assert (placement.imbalance(load) < 1.35).all()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_devices": 2, "num_slots": 3}, "3 slots for 4 experts"),
        ({"num_devices": 3, "num_slots": 4}, "4 slots cannot be dealt out to 3 devices"),
        ({"num_devices": 4, "num_slots": 4, "num_hosts": 3}, "4 devices cannot be dealt out to 3 hosts"),
    ],
)
def test_numbers_that_do_not_go_into_each_other(numbers, message):
    with pytest.raises(ValueError, match=message):
        balanced(np.ones((1, 4)), **numbers)


def test_a_placement_without_an_expert_is_none():
    with pytest.raises(ValueError, match=r"layer 0: every expert of 3 needs a slot; without: \[2\]"):
        ExpertPlacement(slots=np.array([[0, 1, 1, 0]], np.int32), num_experts=3, num_devices=2)


@settings(deadline=None, max_examples=60)
@given(
    load=st.lists(st.integers(0, 1000), min_size=1, max_size=24),
    num_devices=st.integers(1, 6),
    spare=st.integers(0, 3),
)
def test_any_load(load, num_devices, spare):
    num_slots = -(-len(load) // num_devices) * num_devices + spare * num_devices
    values = np.array([load], float)
    placement = balanced(values, num_devices=num_devices, num_slots=num_slots)
    assert placement.num_copies.min() >= 1
    assert placement.device_load(values).sum() == pytest.approx(sum(load))
    assert placement.imbalance(values)[0] <= num_devices + 1e-9


@settings(deadline=None, max_examples=60)
@given(weights=st.lists(st.integers(0, 100), min_size=1, max_size=30), spare=st.integers(0, 10))
def test_copies_go_to_the_heaviest(weights, spare):
    load = np.array(weights, float)
    copies = np.bincount(with_copies(load, len(load) + spare), minlength=len(load))
    assert copies.sum() == len(load) + spare
    heaviest, lightest = load / copies, load / np.maximum(copies - 1, 1)
    assert all(heaviest.max() <= lightest[index] + 1e-9 for index in np.flatnonzero(copies > 1))


def test_packing_keeps_kinds_apart_where_it_can():
    bins = packed(np.array([9.0, 9, 1, 1]), 2, np.array([0, 0, 1, 2]))
    assert all(len({0, 1} & set(items)) == 1 for items in bins)
