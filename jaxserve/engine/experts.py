"""Which slots hold which experts while an engine runs: tables for the router, reports of load, and moves between slots.

A slot is a place for one expert's weights, in the order of devices (sharding/placement.py). Tokens of an expert with
several slots take turns. Moving weights between slots changes no output: the same weights multiply the same tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, Int32, Int64

from jaxserve.engine.arrays import put
from jaxserve.layers.stack import StackedLayers
from sharding.placement import ExpertPlacement, balanced
from sharding.plan import ShardingPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertReport:
    """Load of the layers with experts, whose numbers are in `layers`, since the start.

    tokens: of each expert. device_tokens: of each device's share under the placement of now. imbalance: the busiest
    device's tokens over the mean.
    """

    layers: tuple[int, ...]
    tokens: Int64[np.ndarray, "L E"]
    device_tokens: Float64[np.ndarray, "L D"]
    imbalance: Float64[np.ndarray, " L"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rebalanced:
    """What a new placement does for the load it was made for; moved: slots that changed their expert."""

    imbalance_before: Float64[np.ndarray, " L"]
    imbalance_after: Float64[np.ndarray, " L"]
    moved: int


def layers_with_experts(config: Any) -> tuple[int, ...]:
    """Numbers of the layers that have experts."""
    if getattr(config, "moe", None) is None:
        return ()
    return tuple(n for n in range(config.num_layers) if config.has_experts(n))


def first_placement(config: Any, plan: ShardingPlan) -> ExpertPlacement:
    """Experts in order, and copies of the first ones in the slots that are left."""
    num_experts, num_layers = config.moe.num_experts, len(layers_with_experts(config))
    row = np.resize(np.arange(num_experts, dtype=np.int32), plan.num_slots(num_experts))
    return ExpertPlacement(
        slots=np.tile(row, (num_layers, 1)), num_experts=num_experts, num_devices=plan.size("experts")
    )


def with_tables(params: Mapping[str, Any], placement: ExpertPlacement, put: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters, layers one by one, with each router's table of slots; `put` brings it to where they run."""
    layers, mixed = list(params["layers"]), 0
    for number, layer in enumerate(layers):
        if "moe" in layer:
            tables = jax.tree.map(put, _tables(placement, mixed))
            layers[number] = {**layer, "moe": {**layer["moe"], **tables}}
            mixed += 1
    return {**params, "layers": tuple(layers)}


def _tables(placement: ExpertPlacement, layer: int) -> dict[str, Int32[np.ndarray, "..."]]:
    width = placement.slots.shape[1] - placement.num_experts + 1
    return {"slots": placement.slots_of_experts(width)[layer], "copies": placement.num_copies[layer]}


def report(load: Int64[np.ndarray, "Y E"], config: Any, placement: ExpertPlacement) -> ExpertReport:
    """The load under a placement."""
    layers = layers_with_experts(config)
    tokens = load[list(layers)]
    by_device = placement.device_load(tokens)
    return ExpertReport(layers=layers, tokens=tokens, device_tokens=by_device, imbalance=placement.imbalance(tokens))


def placement_for(tokens: Int64[np.ndarray, "L E"], before: ExpertPlacement) -> ExpertPlacement:
    """A placement in the same slots that evens this load out; a layer that gets no better stays as it is."""
    found = balanced(tokens, num_devices=before.num_devices, num_slots=before.slots.shape[1])
    better = found.imbalance(tokens) < before.imbalance(tokens)
    slots = np.where(better[:, None], found.slots, before.slots)
    return ExpertPlacement(slots=slots, num_experts=before.num_experts, num_devices=before.num_devices)


def moved(params: dict[str, Any], before: ExpertPlacement, after: ExpertPlacement) -> dict[str, Any]:
    """The parameters with each slot's weights those of its expert of `after`, and with its tables."""
    source = np.stack([_sources(*rows) for rows in zip(before.slots, after.slots, strict=True)])
    layers, mixed = [], 0
    for layer in params["layers"]:
        is_stack = isinstance(layer, StackedLayers)
        weights = layer.weights if is_stack else layer
        if "moe" not in weights:
            layers.append(layer)
            continue
        count = layer.num_layers if is_stack else 1
        numbers = list(range(mixed, mixed + count))
        mixed += count
        taken = source[numbers] if is_stack else source[numbers[0]]
        moe = dict(weights["moe"])
        moe["experts"] = jax.tree.map(partial(_taken, source=taken), moe["experts"])
        tables = [_tables(after, number) for number in numbers]
        for name in ("slots", "copies"):
            table = np.stack([row[name] for row in tables]) if is_stack else tables[0][name]
            moe[name] = put(table, moe[name].sharding)
        weights = {**weights, "moe": moe}
        layers.append(StackedLayers(weights=weights) if is_stack else weights)
    return {**params, "layers": tuple(layers)}


def _sources(before: Int32[np.ndarray, " S"], after: Int32[np.ndarray, " S"]) -> Int32[np.ndarray, " S"]:
    """For each slot, one that held its new expert before: itself where nothing changes."""
    slot_of = {int(expert): slot for slot, expert in reversed(list(enumerate(before)))}
    own = np.arange(len(before))
    return np.where(before == after, own, [slot_of[int(expert)] for expert in after]).astype(np.int32)


def _taken(leaf: Array, source: Int32[np.ndarray, "..."]) -> Array:
    """Of an array with slots in front (behind the layers of a stack), those in `source`; the old one is given up."""
    return _take(source.ndim, leaf.sharding)(leaf, jnp.asarray(source))


def _take(num_axes: int, sharding: Any) -> Callable[[Array, Array], Array]:
    take = (lambda a, s: a[s]) if num_axes == 1 else jax.vmap(lambda a, s: a[s])
    return jax.jit(take, donate_argnums=0, out_shardings=sharding)
