"""Which device holds which experts: placement from measured load, with copies of the experts that are asked for most.

A layer has S slots, S / D on each of D devices, and one expert's weights in each slot; an expert in several slots
shares its tokens out evenly. As in DeepSeek-V3's deployment (arXiv 2412.19437, section 3.4; the public EPLB balances in
the same three steps): groups of experts are packed onto hosts, experts are copied within their host, and copies are
packed onto its devices. Packing is greedy: the heaviest first, to the least loaded place that still has room.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int, Int32, Num


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertPlacement:
    """slots: the expert in each slot, by layer; the first S / D slots of a layer are the first device's."""

    slots: Int32[np.ndarray, "L S"]
    num_experts: int
    num_devices: int

    def __post_init__(self) -> None:
        num_slots = self.slots.shape[1]
        if num_slots % self.num_devices:
            raise ValueError(f"{num_slots} slots cannot be dealt out to {self.num_devices} devices in equal parts")
        for layer, row in enumerate(self.slots):
            missing = sorted(set(range(self.num_experts)) - set(row.tolist()))
            if missing or row.max() >= self.num_experts or row.min() < 0:
                raise ValueError(f"layer {layer}: every expert of {self.num_experts} needs a slot; without: {missing}")

    @property
    def num_copies(self) -> Int32[np.ndarray, "L E"]:
        """Slots of each expert."""
        return np.stack([np.bincount(row, minlength=self.num_experts) for row in self.slots]).astype(np.int32)

    def slots_of_experts(self, width: int) -> Int32[np.ndarray, "L E width"]:
        """The slots of each expert, from the first on, again and again up to `width`."""
        found = np.empty((len(self.slots), self.num_experts, width), np.int32)
        for layer, row in enumerate(self.slots):
            for expert in range(self.num_experts):
                found[layer, expert] = np.resize(np.flatnonzero(row == expert), width)
        return found

    def device_load(self, load: Num[np.ndarray, "L E"]) -> Float64[np.ndarray, "L D"]:
        """Tokens of each device, by layer."""
        each = load / self.num_copies
        in_slots = np.take_along_axis(each, self.slots, axis=1)
        return in_slots.reshape(len(self.slots), self.num_devices, -1).sum(axis=2)

    def imbalance(self, load: Num[np.ndarray, "L E"]) -> Float64[np.ndarray, " L"]:
        """Tokens of the busiest device over the mean, by layer: how much longer a step takes than a balanced one where
        its experts' products bound it. 1 where there is no load."""
        return imbalance(self.device_load(load))


def imbalance(device_load: Num[np.ndarray, "L D"]) -> Float64[np.ndarray, " L"]:
    """The largest of each row over its mean; 1 for a row of zeros."""
    mean = device_load.mean(axis=1)
    return np.where(mean > 0, device_load.max(axis=1) / np.where(mean > 0, mean, 1), 1.0)


def in_order(num_layers: int, num_experts: int, num_devices: int) -> ExpertPlacement:
    """No copies, the experts in their own order: what a plan does without measured load."""
    slots = np.tile(np.arange(num_experts, dtype=np.int32), (num_layers, 1))
    return ExpertPlacement(slots=slots, num_experts=num_experts, num_devices=num_devices)


def balanced(
    load: Num[np.ndarray, "L E"], *, num_devices: int, num_slots: int, num_hosts: int = 1, num_groups: int = 1
) -> ExpertPlacement:
    """A placement that evens out this load.

    num_hosts: devices are dealt out to them in order. num_groups: of experts that a router chooses together (DeepSeek's
    group-limited choice); a group then stays on one host, so that a token crosses to few of them. Groups that hosts
    cannot share out evenly are not kept together. Raises ValueError for numbers that do not go into each other.
    """
    num_layers, num_experts = load.shape
    _check(num_experts, num_devices, num_slots, num_hosts)
    if num_experts % num_groups or num_groups % num_hosts:
        num_groups = num_hosts = 1
    rows = [_layer(row, num_devices, num_slots, num_hosts, num_groups) for row in np.asarray(load, np.float64)]
    return ExpertPlacement(
        slots=np.array(rows, np.int32).reshape(num_layers, num_slots), num_experts=num_experts, num_devices=num_devices
    )


def _check(num_experts: int, num_devices: int, num_slots: int, num_hosts: int) -> None:
    if num_slots < num_experts:
        raise ValueError(f"{num_slots} slots for {num_experts} experts: there must be one for each")
    if num_slots % num_devices:
        raise ValueError(f"{num_slots} slots cannot be dealt out to {num_devices} devices in equal parts")
    if num_devices % num_hosts:
        raise ValueError(f"{num_devices} devices cannot be dealt out to {num_hosts} hosts in equal parts")


def _layer(
    load: Float64[np.ndarray, " E"], num_devices: int, num_slots: int, num_hosts: int, num_groups: int
) -> list[int]:
    """The expert in each slot of one layer."""
    in_groups = np.arange(len(load)).reshape(num_groups, -1)
    hosts = packed(load[in_groups].sum(axis=1), num_hosts)
    slots: list[int] = []
    for groups in hosts:
        experts = in_groups[groups].reshape(-1)
        copied = experts[with_copies(load[experts], num_slots // num_hosts)]
        counts = np.bincount(copied, minlength=len(load))
        devices = packed(load[copied] / counts[copied], num_devices // num_hosts, copied)
        slots += [int(copied[index]) for device in devices for index in device]
    return slots


def with_copies(load: Float64[np.ndarray, " E"], num_slots: int) -> Int[np.ndarray, " S"]:
    """Every item once, then again and again the one with the most load a copy, in all `num_slots`."""
    copies = np.ones(len(load), np.int64)
    heap = [(-value, index) for index, value in enumerate(load)]
    heapq.heapify(heap)
    for _ in range(num_slots - len(load)):
        _, index = heapq.heappop(heap)
        copies[index] += 1
        heapq.heappush(heap, (-load[index] / copies[index], index))
    return np.repeat(np.arange(len(load)), copies)


def packed(
    weights: Float64[np.ndarray, " I"], num_bins: int, kinds: Int[np.ndarray, " I"] | None = None
) -> list[list[int]]:
    """The items dealt out to bins, equally many to each, so that the sums of weights are near each other.

    kinds: two items of one kind go to different bins while another has room: copies on one device help nobody.
    """
    room = len(weights) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = [0.0] * num_bins
    for item in sorted(range(len(weights)), key=lambda index: -weights[index]):
        has_room = [index for index in range(num_bins) if len(bins[index]) < room]
        chosen = min(has_room, key=lambda index: (_holds(bins[index], item, kinds), sums[index], index))
        bins[chosen].append(item)
        sums[chosen] += float(weights[item])
    return bins


def _holds(members: Sequence[int], item: int, kinds: Int[np.ndarray, " I"] | None) -> bool:
    return kinds is not None and any(kinds[member] == kinds[item] for member in members)
