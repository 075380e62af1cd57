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
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jaxserve.kv_cache import Cache
from jaxserve.models.model import Model
from jaxserve.quant.dense import Dense
from jaxserve.quant.quantized import Weight
from pallas_kernels.kernels import Kernels
from pallas_kernels.mla_attention.latent_pages import LatentPages
from sharding.divide import Division, divide, taken
from sharding.plan import EXPERT, TENSOR, ShardingPlan
from sharding.spec import ArraySpec, map_specs, paths

_WHOLE = PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One model over one mesh. config: with the heads that the devices share out among them, copies and zeros
    included; param_partitions: how each array of the parameters is cut."""

    plan: ShardingPlan
    mesh: Mesh
    config: Any
    param_partitions: Any

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array that every device has whole."""
        return NamedSharding(self.mesh, _WHOLE)

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


def spread(plan: ShardingPlan, model: Model, config: Any, params: Any, devices: list[Any]) -> tuple[Spread, Any]:
    """The model over the first devices, and its parameters there. ValueError for what cannot be cut so."""

    def part(path: str, spec: ArraySpec, division: Division) -> Any:
        return _divided(_at(params, path), spec, division)

    return _arranged(plan, model, config, devices, part, jax.device_put)


def described_spread(
    plan: ShardingPlan, model: Model, config: Any, weight_of: Callable[[str, ArraySpec], Any], devices: list[Any]
) -> tuple[Spread, Any]:
    """As `spread`, of parameters that are shapes and types only; the devices may be described ones as well.

    weight_of: a parameter, by its path, with a jax.ShapeDtypeStruct in place of each array.
    """

    def part(path: str, spec: ArraySpec, division: Division) -> Any:
        return _described_division(weight_of(path, spec), spec, division)

    def place(array: Any, sharding: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return _arranged(plan, model, config, devices, part, place)


def _arranged(
    plan: ShardingPlan,
    model: Model,
    config: Any,
    devices: list[Any],
    part_of: Callable[[str, ArraySpec, Division], Any],
    place: Callable[[Any, NamedSharding], Any],
) -> tuple[Spread, Any]:
    division = model_division(plan, config)
    mesh, leaves, partitions = plan.mesh(devices), {}, {}
    specs = model.param_specs(config)
    for path, spec in paths(specs).items():
        part = part_of(path, spec, division)
        cut = plan.partition(spec.axes)
        partitions[path] = jax.tree.map(lambda array, cut=cut: _fitting(array, cut, plan), part)
        leaves[path] = jax.tree.map(lambda array, cut: place(array, NamedSharding(mesh, cut)), part, partitions[path])
    padded = dataclasses.replace(config, num_heads=len(division.heads.queries))
    if getattr(config, "mla", None) is None:
        padded = dataclasses.replace(padded, num_kv_heads=len(division.heads.keys))
    return (
        Spread(plan=plan, mesh=mesh, config=padded, param_partitions=map_specs(specs, partitions)),
        map_specs(specs, leaves),
    )


def model_division(plan: ShardingPlan, config: Any) -> Division:
    """How the model's parameters are made divisible. ValueError for what cannot be cut so."""
    has_kv_heads = getattr(config, "mla", None) is None
    division = divide(plan, config.num_heads, config.num_kv_heads, has_kv_heads=has_kv_heads)
    _check(plan, config, division)
    return division


def _check(plan: ShardingPlan, config: Any, division: Division) -> None:
    changed = len(division.heads.queries) != config.num_heads or len(division.heads.keys) != config.num_kv_heads
    if changed and getattr(config, "qk_norm", None) == "projection":
        raise ValueError(f"{config.num_heads} heads normed together cannot be shared by {plan.tensor} devices")
    moe = getattr(config, "moe", None)
    if plan.expert > 1 and moe is None:
        raise ValueError(f"the model has no experts to deal out to {plan.expert} devices")
    if moe is not None and moe.num_experts % plan.expert:
        raise ValueError(f"{moe.num_experts} experts cannot be dealt out to {plan.expert} devices in equal parts")


def _at(params: Any, path: str) -> Any:
    for key in path.split("."):
        params = params[int(key)] if isinstance(params, tuple) else params[key]
    return params


def _divided(whole: Weight | Array, spec: ArraySpec, division: Division) -> Any:
    """A parameter on the host with every axis divisible; written out where its inputs must be copied or filled up."""
    indices = division.indices(spec)
    part = jax.device_get(whole)
    if isinstance(part, Weight) and indices[-1] is not None and not isinstance(part, Dense):
        part = Dense(array=np.asarray(jax.device_get(part.decode())))
    for axis, index in enumerate(indices):
        if index is not None:
            part = jax.tree.map(lambda array, index=index, axis=axis: taken(np.asarray(array), index, axis), part)
    return part


def _described_division(whole: Any, spec: ArraySpec, division: Division) -> Any:
    """What `_divided` makes of a parameter, as shapes."""
    indices = division.indices(spec)
    if isinstance(whole, Weight) and indices[-1] is not None and not isinstance(whole, Dense):
        whole = Dense(array=jax.ShapeDtypeStruct(whole.shape, np.float32))
    sizes = {axis: len(index) for axis, index in enumerate(indices) if index is not None}

    def divided(array: Any) -> Any:
        shape = tuple(sizes.get(axis, size) for axis, size in enumerate(array.shape))
        return jax.ShapeDtypeStruct(shape, array.dtype)

    return jax.tree.map(divided, whole)


def _fitting(array: Any, cut: PartitionSpec, plan: ShardingPlan) -> PartitionSpec:
    """The cut of one array of a weight; ValueError where blocks would have to be cut in two."""
    sizes = {TENSOR: plan.tensor, EXPERT: plan.expert}
    for axis, name in enumerate(cut):
        if name is not None and array.shape[axis] % sizes[name]:
            raise ValueError(
                f"the packed blocks of a weight {array.shape} cannot be cut into {sizes[name]} parts; "
                "--expand-weights always writes weights out"
            )
    return cut
