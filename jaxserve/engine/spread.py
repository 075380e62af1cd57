"""A model over several devices: its parameters cut and placed as a plan says, its forward pass run on all of them.

The pass is one program that every device runs with its part of the weights (shard_map); where sums over devices are
needed, layers say so. Activations are the same on all of them, so that what stands around the pass (sampling, state)
does not know about the plan.
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
from jaxserve.models.model import Model
from pallas_kernels.kernels import Kernels
from pallas_kernels.mla_attention.latent_pages import LatentPages
from sharding.divide import Division, divide
from sharding.plan import EXPERT, TENSOR, ShardingPlan
from sharding.spec import ArraySpec

_WHOLE = PartitionSpec()


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

    def placed_cache(self, make: Callable[[], Cache]) -> Cache:
        """The cache that `make` makes, each device with the pages of its heads."""
        shardings = jax.tree.map(lambda array: array.sharding, self.described_cache(make))
        return jax.jit(make, out_shardings=shardings)()

    def described_cache(self, make: Callable[[], Cache]) -> Any:
        """The same as shapes, types and shardings."""
        shapes = jax.eval_shape(make)

        def described(array: Any, cut: PartitionSpec) -> Any:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self.mesh, cut))

        return jax.tree.map(described, shapes, self._cache_partitions(shapes))

    def _cache_partitions(self, cache: Any) -> Any:
        if isinstance(cache, LatentPages) or self.plan.tensor == 1:
            return jax.tree.map(lambda _: _WHOLE, cache)
        return jax.tree.map(lambda _: PartitionSpec(None, None, None, TENSOR), cache)

    def forward(
        self, model: Model, kernels: Kernels, dtype: str, params: Any, token_ids: Array, layout: Any, cache: Any
    ) -> tuple[Array, Any]:
        """As the model's own, of arrays that lie on the mesh."""
        partitions = self._cache_partitions(cache)

        def on_each(params: Any, token_ids: Array, layout: Any, cache: Any) -> tuple[Array, Any]:
            return model.forward(
                params, self.of_one_device, self._within(kernels), token_ids, layout, cache, dtype=dtype
            )

        return jax.shard_map(
            on_each,
            mesh=self.mesh,
            in_specs=(self.param_partitions, _WHOLE, _WHOLE, partitions),
            out_specs=(_WHOLE, partitions),
            check_vma=False,  # the loops of attention start from constants, which it takes for less than they become
        )(params, token_ids, layout, cache)

    def unembed(self, model: Model, kernels: Kernels, params: Any, x: Array) -> Array:
        """Logits of the whole vocabulary on every device."""
        logits = jax.shard_map(
            lambda params, x: model.unembed(params, self.of_one_device, self._within(kernels), x),
            mesh=self.mesh,
            in_specs=(self.param_partitions, _WHOLE),
            out_specs=PartitionSpec(None, TENSOR) if self.plan.tensor > 1 else _WHOLE,
            check_vma=False,
        )(params, x)
        return jax.lax.with_sharding_constraint(logits[:, : self.config.vocab_size], self.everywhere)

    def _within(self, kernels: Kernels) -> Kernels:
        axes = ((TENSOR, self.plan.tensor), (EXPERT, self.plan.expert))
        return dataclasses.replace(kernels, spread_over=tuple(name for name, size in axes if size > 1))

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
    if moe is not None and moe.num_experts % plan.expert:
        raise ValueError(f"{moe.num_experts} experts cannot be dealt out to {plan.expert} devices in equal parts")


def _partition(array: jax.Array) -> PartitionSpec:
    assert isinstance(array.sharding, NamedSharding), "a parameter does not lie on the mesh"
    return array.sharding.spec
