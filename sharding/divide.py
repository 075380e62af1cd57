"""Arrays whose axes a plan does not divide: which units each gets, copies and zeros among them.

A unit is a head, or one value of a width. An index of -1 stands for a unit of zeros, which adds nothing to any sum.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from sharding.plan import ShardingPlan
from sharding.spec import ArraySpec

ZEROS = -1


@dataclass(frozen=True, kw_only=True)
class Heads:
    """For each query head and each kv head of the spread model, the one of the file."""

    queries: Int[np.ndarray, "n"]
    keys: Int[np.ndarray, "k"]


def divided_heads(num_heads: int, num_kv_heads: int, parts: int) -> Heads:
    """Heads that `parts` devices can share: each query head on one device, beside the kv head it attends with.

    Either every kv head is copied and its queries are dealt out over the copies, or whole groups of zeros are added;
    whichever makes fewer heads.
    """
    group = num_heads // num_kv_heads
    copies = parts // math.gcd(num_kv_heads, parts)
    share = -(-group // copies)
    padded = -(-num_kv_heads // parts) * parts
    if num_kv_heads * copies * share <= padded * group:
        dealt = np.full((num_kv_heads, copies * share), ZEROS)
        dealt[:, :group] = np.arange(num_heads).reshape(num_kv_heads, group)
        return Heads(queries=dealt.reshape(-1), keys=np.repeat(np.arange(num_kv_heads), copies))
    return Heads(queries=padded_units(num_heads, padded * group), keys=padded_units(num_kv_heads, padded))


def padded_units(num_units: int, wanted: int) -> Int[np.ndarray, "u"]:
    """All units, then zeros."""
    return np.concatenate([np.arange(num_units), np.full(wanted - num_units, ZEROS)])


@dataclass(frozen=True, kw_only=True)
class Division:
    """How the parameters of one model are made divisible. num_heads, num_kv_heads: those of the file."""

    plan: ShardingPlan
    num_heads: int
    num_kv_heads: int
    heads: Heads

    def indices(self, spec: ArraySpec) -> list[Int[np.ndarray, "u"] | None]:
        """For each axis of a parameter which of the file's values it has; None where it has them all in order."""
        return [self._of_axis(axis, size) for axis, size in zip(spec.axes, spec.shape, strict=True)]

    def _of_axis(self, axis: str, size: int) -> Int[np.ndarray, "u"] | None:
        parts = self.plan.size(axis)
        if axis == "heads":
            return _values(self.heads.queries, size // self.num_heads, size)
        if axis == "kv_heads":
            return _values(self.heads.keys, size // self.num_kv_heads, size)
        if axis == "experts":
            wanted = self.plan.num_slots(size)
            return None if wanted == size else np.resize(np.arange(size), wanted)
        wanted = -(-size // parts) * parts
        return None if wanted == size else padded_units(size, wanted)


def divide(plan: ShardingPlan, num_heads: int, num_kv_heads: int, *, has_kv_heads: bool) -> Division:
    """The division of a model with these heads; without kv heads (latent attention) query heads only are filled up."""
    if has_kv_heads:
        heads = divided_heads(num_heads, num_kv_heads, plan.tensor)
    else:
        wanted = -(-num_heads // plan.tensor) * plan.tensor
        heads = Heads(queries=padded_units(num_heads, wanted), keys=np.arange(num_kv_heads))
    return Division(plan=plan, num_heads=num_heads, num_kv_heads=num_kv_heads, heads=heads)


def _values(units: Int[np.ndarray, "u"], size_of_unit: int, size: int) -> Int[np.ndarray, "v"] | None:
    values = units[:, None] * size_of_unit + np.arange(size_of_unit)
    values = np.where(units[:, None] == ZEROS, ZEROS, values).reshape(-1)
    return None if len(values) == size and (values == np.arange(size)).all() else values


def taken(array: np.ndarray, index: Int[np.ndarray, "u"], axis: int) -> np.ndarray:
    """The values of an axis that an index names, zeros for -1."""
    zeros = np.zeros_like(array, shape=(*array.shape[:axis], 1, *array.shape[axis + 1 :]))
    return np.take(np.concatenate([array, zeros], axis=axis), index, axis=axis)
