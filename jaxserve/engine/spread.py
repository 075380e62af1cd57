"""A model over several devices: its parameters cut and placed as a plan says, its steps run on all of them.

A step is one program that every device runs with its part of the weights (shard_map); where sums over devices are
needed, layers say so. The devices of one data group compute the same rows, those of another group other ones: each
group has inputs, cache and state of its own, laid one behind the other along the first axis of each array (of a cache:
the axis of pages), and knows nothing of the others' but in layers that share experts.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxserve.engine.placement import Placement
from jaxserve.kv_cache import Cache
from pallas_kernels.kernels import Kernels
from pallas_kernels.mla_attention.latent_pages import LatentPages
from sharding.divide import Division, divide
from sharding.plan import DATA, EXPERT, TENSOR, ShardingPlan
from sharding.spec import ArraySpec

_WHOLE = PartitionSpec()

type Step = Callable[[Any, Any, Any, Array], tuple[Any, Any, Any]]
type Logits = Callable[[Any, Any, Array, Any], tuple[Array, Any]]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One model over one mesh. config: with the heads that the devices share out among them, copies and zeros
    included; division: which of the file's; param_partitions: how each array of the parameters, once there, is cut."""

    plan: ShardingPlan
    mesh: Mesh
    config: Any
    division: Division
    param_partitions: Any

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that every device has whole."""
        return NamedSharding(self.mesh, _WHOLE)

    @property
    def placement(self) -> Placement:
        """Where a load puts the parameters."""

        def sharding(parameter: str, spec: ArraySpec) -> NamedSharding:
            return NamedSharding(self.mesh, self.plan.partition(spec.axes))

        return Placement(sharding=sharding, units=self.division.indices)

    def with_params(self, params: Any) -> "Spread":
        """The same for these parameters, which lie on the mesh."""
        return dataclasses.replace(self, param_partitions=jax.tree.map(_partition, params))

    @property
    def by_group(self) -> NamedSharding:
        """The sharding of an array in which each data group has its part of the first axis."""
        return NamedSharding(self.mesh, self._by_group)

    @property
    def _by_group(self) -> PartitionSpec:
        return PartitionSpec(DATA) if self.plan.data > 1 else _WHOLE

    def placed_cache(self, make: Callable[[], Cache]) -> Cache:
        """The cache that `make` makes, each device with its group's pages of its heads."""
        shardings = jax.tree.map(lambda array: array.sharding, self.described_cache(make))
        return jax.jit(make, out_shardings=shardings)()

    def described_cache(self, make: Callable[[], Cache]) -> Any:
        """The same as shapes, types and shardings."""
        shapes = jax.eval_shape(make)

        def described(array: Any, cut: PartitionSpec) -> Any:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self.mesh, cut))

        return jax.tree.map(described, shapes, self._cache_partitions(shapes))

    def _cache_partitions(self, cache: Any) -> Any:
        group = DATA if self.plan.data > 1 else None
        has_heads = not isinstance(cache, LatentPages) and self.plan.tensor > 1
        cut = PartitionSpec(None, group, None, TENSOR) if has_heads else PartitionSpec(None, group)
        return jax.tree.map(lambda _: cut, cache)

    def step(self, step: Step, params: Any, cache: Any, state: Any, buffer: Array) -> tuple[Any, Any, Any]:
        """A step of one device, run on all of them: outputs, cache, state."""
        caches, rows = self._cache_partitions(cache), self._by_group
        on_each = self._on_each(step, (self.param_partitions, caches, rows, rows), (rows, caches, rows))
        outputs, cache, state = on_each(params, cache, state, buffer)
        if not self.by_group.is_fully_addressable:  # every host reads them
            outputs = jax.lax.with_sharding_constraint(outputs, self.everywhere)
        return outputs, cache, state

    def logits(self, logits: Logits, params: Any, cache: Any, token_ids: Array, layout: Any) -> tuple[Array, Any]:
        """Logits of one device, computed on all of them: at every token, and the cache."""
        assert self.plan.data == 1, "groups have tokens of their own"
        caches = self._cache_partitions(cache)
        return self._on_each(logits, (self.param_partitions, caches, _WHOLE, _WHOLE), (_WHOLE, caches))(
            params, cache, token_ids, layout
        )

    def _on_each(self, function: Callable[..., Any], given: Any, result: Any) -> Callable[..., Any]:
        # Unchecked: the loops of attention start from constants, which the check takes for less than they become.
        return jax.shard_map(function, mesh=self.mesh, in_specs=given, out_specs=result, check_vma=False)

    def kernels_of_one_device(self, kernels: Kernels) -> Kernels:
        """The kernels for a device's part: layers read from them which sums they need."""
        axes = [axis for axis in (TENSOR, EXPERT) if self.plan.mesh_size(axis) > 1]
        if getattr(self.config, "moe", None) is not None and DATA in self.plan.cut_over("experts"):
            axes.append(DATA)
        return dataclasses.replace(kernels, spread_over=tuple(axes))

    @property
    def of_one_device(self) -> Any:
        """The config of one device's part."""
        parts = self.plan.tensor
        if getattr(self.config, "mla", None) is not None:
            return dataclasses.replace(self.config, num_heads=self.config.num_heads // parts)
        num_kv_heads = self.config.num_kv_heads // parts
        return dataclasses.replace(self.config, num_heads=self.config.num_heads // parts, num_kv_heads=num_kv_heads)


def spread_over(plan: ShardingPlan, config: Any, devices: list[Any]) -> Spread:
    """A model of this config over the first devices. ValueError for what cannot be cut so."""
    division = division_of(plan, config)
    padded = dataclasses.replace(config, num_heads=len(division.heads.queries))
    if _has_kv_heads(config):
        padded = dataclasses.replace(padded, num_kv_heads=len(division.heads.keys))
    return Spread(plan=plan, mesh=plan.mesh(devices), config=padded, division=division, param_partitions=None)


def division_of(plan: ShardingPlan, config: Any) -> Division:
    """How the parameters of a model of this config are made divisible. ValueError for what cannot be cut so."""
    division = divide(plan, config.num_heads, config.num_kv_heads, has_kv_heads=_has_kv_heads(config))
    _check(plan, config, division)
    return division


def _has_kv_heads(config: Any) -> bool:
    return getattr(config, "mla", None) is None


def _check(plan: ShardingPlan, config: Any, division: Division) -> None:
    changed = len(division.heads.queries) != config.num_heads or len(division.heads.keys) != config.num_kv_heads
    if changed and getattr(config, "qk_norm", None) == "projection":
        raise ValueError(f"{config.num_heads} heads normed together cannot be shared by {plan.tensor} devices")
    moe = getattr(config, "moe", None)
    if plan.expert > 1 and moe is None:
        raise ValueError(f"the model has no experts to deal out to {plan.expert} devices")


def _partition(array: jax.Array) -> PartitionSpec:
    assert isinstance(array.sharding, NamedSharding), "a parameter does not lie on the mesh"
    return array.sharding.spec
