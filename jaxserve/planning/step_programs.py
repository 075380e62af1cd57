"""The engine's prefill and decode programs with described arguments: ready to be lowered, nothing allocated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxserve.engine.buckets import MAX_PREFILLS, choose_shape, step_shapes
from jaxserve.engine.experts import first_placement, layers_with_experts, with_tables
from jaxserve.engine.placement import leaf_sharding, shape_in_units
from jaxserve.engine.slot_state import empty_state
from jaxserve.engine.spread import Spread, spread_over
from jaxserve.engine.step import Program
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import empty_cache
from jaxserve.layers.stack import stack_layers
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.pages import PagePlan, page_plan
from jaxserve.planning.request import PlanRequest
from jaxserve.quant.dense import Dense
from jaxserve.step_inputs import StepShape, packing
from pallas_kernels.kernels import kernels_for
from sharding.spec import ArraySpec, map_specs, paths


@dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """One program in its two shapes, and the arrays it holds between steps, as shapes, types and shardings."""

    program: Program
    prefill: StepShape
    decode: StepShape
    params: Any
    cache: Any
    state: Any
    over: Spread

    def arguments(self, shape: StepShape) -> tuple[Any, ...]:
        """What one step is called with."""
        length = packing(shape)[1] * self.over.plan.data
        buffer = jax.ShapeDtypeStruct((length,), jnp.int32, sharding=self.over.by_group)
        return self.params, self.cache, self.state, buffer


def step_programs(request: PlanRequest, described: DescribedModel, devices: Sequence[Any]) -> StepPrograms:
    """The engine's program for this request on these devices. ConfigError for what cannot be cut or kept so.

    As the engine itself: on CPUs weights are written out and layers unrolled, elsewhere weights stay packed and layers
    are stacked; one device is not spread over.
    """
    is_cpu = request.where.platform == "cpu"
    try:
        over = spread_over(request.plan, described.config, list(devices))
        params = _described_params(over, described, request.dtype if is_cpu else None)
        pages = page_plan(request, over.config)
        if request.plan.num_devices > 1 and layers_with_experts(over.config):
            params = with_tables(params, first_placement(over.config, request.plan), partial(_described, over))
    except ValueError as error:
        raise ConfigError(f"{request.plan}: {error}") from error
    if not is_cpu:
        params = {**params, "layers": stack_layers(params["layers"], _described_stack)}
    over = over.with_params(params)
    kernels, _ = kernels_for("auto", request.where.platform)
    program = Program(model=described.model, config=over.config, kernels=kernels, dtype=request.dtype, spread=over)
    prefill, decode = step_shapes_of(request, pages)
    num_pages = request.group_batch * pages.sequence_pages * request.data
    cache = over.described_cache(partial(empty_cache, pages.spec, num_pages, kernels))
    state = jax.eval_shape(lambda: empty_state(program, request.group_batch, request.context))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=over.by_group), state)
    if request.plan.num_devices == 1:
        program = replace(program, spread=None)
    return StepPrograms(
        program=program.for_context(request.context),
        prefill=prefill,
        decode=decode,
        params=params,
        cache=cache,
        state=state,
        over=over,
    )


def _described_params(over: Spread, described: DescribedModel, expanded_to: str | None) -> Any:
    """Parameters as a load would place them, as shapes, types and shardings. ValueError for what cannot be cut so."""
    placement, specs = over.placement, described.model.param_specs(described.config)

    def placed(path: str, spec: ArraySpec) -> Any:
        weight, units, sharding = described.weight(path, spec, expanded_to), placement.units(spec), None
        sharding = placement.sharding(path, spec)
        assert sharding is not None, f"{path} has no place"

        def of_leaf(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = (*shape_in_units(leaf.shape, units[: leaf.ndim]),)
            is_plain = spec.is_vector or isinstance(weight, Dense)
            cut = sharding if is_plain else leaf_sharding(path, shape, weight.shape, sharding)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=cut)

        return jax.tree.map(of_leaf, weight)

    return map_specs(specs, {path: placed(path, spec) for path, spec in paths(specs).items()})


def step_shapes_of(request: PlanRequest, pages: PagePlan) -> tuple[StepShape, StepShape]:
    """The engine's largest step, whose temporary bytes it makes room for, and the one of `batch` decodes."""
    shapes = step_shapes(
        max_num_seqs=request.group_batch,
        max_num_batched_tokens=request.step_tokens,
        max_prefills=MAX_PREFILLS,
        max_pages=pages.max_pages,
        deterministic=False,
        groups=pages.groups,
    )
    return shapes[-1], choose_shape(shapes, request.group_batch, 0, 0)


def _described(over: Spread, array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=over.everywhere)


def _described_stack(arrays: Sequence[Any]) -> jax.ShapeDtypeStruct:
    first = arrays[0]
    sharding = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
    return jax.ShapeDtypeStruct((len(arrays), *first.shape), first.dtype, sharding=sharding)


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of described arrays, as sizes say, without what a layout may add."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
