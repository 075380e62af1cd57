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
from jaxserve.engine.decisions import ACCELERATOR_LIMITS, CPU_LIMITS
from jaxserve.engine.executor import empty_state
from jaxserve.engine.spread import described_spread
from jaxserve.engine.step import Program
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import CacheSpec, cache_spec, empty_cache
from jaxserve.layers.stack import stack_layers
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.request import PlanRequest
from jaxserve.step_inputs import StepShape, packing
from pallas_kernels.kernels import kernels_for


@dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """One program in its two shapes, and the arrays it holds between steps, as shapes, types and shardings."""

    program: Program
    prefill: StepShape
    decode: StepShape
    spec: CacheSpec
    params: Any
    cache: Any
    state: Any

    def arguments(self, shape: StepShape) -> tuple[Any, ...]:
        """What one step is called with."""
        return self.params, self.cache, self.state, self._placed(packing(shape)[1], jnp.int32)

    def _placed(self, length: int, dtype: Any) -> jax.ShapeDtypeStruct:
        sharding = jax.tree.leaves(self.params)[0].sharding
        return jax.ShapeDtypeStruct((length,), dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec()))


def step_programs(request: PlanRequest, described: DescribedModel, devices: Sequence[Any]) -> StepPrograms:
    """The engine's program for this request on these devices. ConfigError for what cannot be cut or kept so.

    As the engine itself: on CPUs weights are written out and layers unrolled, elsewhere weights stay packed and layers
    are stacked; one device is not spread over.
    """
    is_cpu = request.where.platform == "cpu"
    weight_of = partial(described.weight, expanded_to=request.dtype if is_cpu else None)
    try:
        over, params = described_spread(request.plan, described.model, described.config, weight_of, list(devices))
        spec = cache_spec(over.config, request.page_size, request.cache_dtype, request.where.platform)
    except ValueError as error:
        raise ConfigError(f"{request.plan}: {error}") from error
    kernels, _ = kernels_for("auto", request.where.platform)
    program = Program(model=described.model, config=over.config, kernels=kernels, dtype=request.dtype, spread=over)
    if not is_cpu:
        params = {**params, "layers": stack_layers(params["layers"], _described_stack)}
        program = program.with_params(params)
    prefill, decode = step_shapes_of(request)
    num_pages = request.batch * -(-request.context // spec.page_size)
    make = partial(empty_cache, spec, num_pages, kernels)
    state = jax.eval_shape(lambda: empty_state(request.batch, request.context))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=over.everywhere), state)
    cache = over.described_cache(make)
    if request.plan.num_devices == 1:
        program = replace(program, spread=None)
    return StepPrograms(
        program=program.for_context(request.context),
        prefill=prefill,
        decode=decode,
        spec=spec,
        params=params,
        cache=cache,
        state=state,
    )


def step_shapes_of(request: PlanRequest) -> tuple[StepShape, StepShape]:
    """The engine's largest step, whose temporary bytes it makes room for, and the one of `batch` decodes."""
    default = (CPU_LIMITS if request.where.platform == "cpu" else ACCELERATOR_LIMITS)[1]
    shapes = step_shapes(
        max_num_seqs=request.batch,
        max_num_batched_tokens=request.num_tokens or max(default, request.batch),
        max_prefills=MAX_PREFILLS,
        max_pages=-(-request.context // request.page_size),
        deterministic=False,
    )
    return shapes[-1], choose_shape(shapes, request.batch, 0, 0)


def _described_stack(arrays: Sequence[Any]) -> jax.ShapeDtypeStruct:
    first = arrays[0]
    sharding = NamedSharding(first.sharding.mesh, PartitionSpec(None, *first.sharding.spec))
    return jax.ShapeDtypeStruct((len(arrays), *first.shape), first.dtype, sharding=sharding)


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of described arrays, as sizes say, without what a layout may add."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
