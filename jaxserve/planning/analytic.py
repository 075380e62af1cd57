"""What a plan puts on one device and makes it do, by arithmetic on the model's specs alone: no compiler, no device."""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any

import jax

from jaxserve.engine.experts import layers_with_experts
from jaxserve.engine.spread import division_of
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.pages import PagePlan, page_plan
from jaxserve.planning.request import PlanRequest
from pallas_kernels.paged_attention.xla import BLOCK, TILE
from sharding.divide import Division
from sharding.plan import DATA
from sharding.roofline import experts_met
from sharding.spec import ArraySpec, paths

_UNUSED = "mtp."  # modules that this version loads and no step runs


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """One parameter on one device: its arrays' shapes there, and their bytes."""

    path: str
    spec: ArraySpec
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int

    @property
    def stack(self) -> str:
        """The name it shares with the same parameter of other layers."""
        return re.sub(r"^layers\.\d+", "layers", self.path)

    @property
    def is_used(self) -> bool:
        """Whether a step reads it."""
        return not self.path.startswith(_UNUSED)


def weight_parts(request: PlanRequest, described: DescribedModel) -> list[WeightPart]:
    """Every parameter as one device holds it: each axis cut into the plan's parts, after filling up what does not
    divide. ValueError for what cannot be cut so."""
    division = division_of(request.plan, described.config)
    specs = paths(described.model.param_specs(described.config))
    parts = [_part(request, described, division, path, spec) for path, spec in specs.items()]
    return parts + _tables(request, described)


def _tables(request: PlanRequest, described: DescribedModel) -> list[WeightPart]:
    """Of each layer with experts that are dealt out, which slots have them (engine/experts.py)."""
    layers = layers_with_experts(described.config) if request.plan.num_devices > 1 else ()
    found = []
    for layer in layers:
        num_experts = described.config.moe.num_experts
        width = request.plan.num_slots(num_experts) - num_experts + 1
        for name, shape in (("slots", (num_experts, width)), ("copies", (num_experts,))):
            spec = ArraySpec(shape=shape, axes=("choices",) * len(shape), dtype="int32")
            path = f"layers.{layer}.moe.{name}"
            found.append(WeightPart(path=path, spec=spec, shapes=(shape,), num_bytes=4 * math.prod(shape)))
    return found


def _part(
    request: PlanRequest, described: DescribedModel, division: Division, path: str, spec: ArraySpec
) -> WeightPart:
    expanded_to = request.dtype if request.where.platform == "cpu" else None
    indices = division.indices(spec)
    if indices[-1] is not None and described.is_packed(path, spec, expanded_to):
        raise ValueError(f"{path}: rows of blocks cannot be filled up; --weights bf16 has none")
    shapes, num_bytes = [], 0
    for leaf in jax.tree.leaves(described.weight(path, spec, expanded_to)):
        sizes = list(leaf.shape)
        for axis, (name, index) in enumerate(zip(spec.axes[: leaf.ndim], indices[: leaf.ndim], strict=True)):
            if axis == len(spec.axes) - 1 and sizes[axis] == 1:
                continue  # one value for each output
            size, parts = sizes[axis] if index is None else len(index), request.plan.size(name)
            if size % parts:
                raise ValueError(f"{path}: {size} blocks cannot be cut into {parts} parts; --weights bf16 has none")
            sizes[axis] = size // parts
        shapes.append(tuple(sizes))
        num_bytes += math.prod(sizes) * leaf.dtype.itemsize
    return WeightPart(path=path, spec=spec, shapes=tuple(shapes), num_bytes=num_bytes)


def stack_bytes(parts: list[WeightPart]) -> dict[str, int]:
    """Bytes of each parameter over all layers."""
    found: dict[str, int] = {}
    for part in parts:
        found[part.stack] = found.get(part.stack, 0) + part.num_bytes
    return found


def whole_shapes(request: PlanRequest, part: WeightPart) -> list[tuple[int, ...]]:
    """The shapes that a device's part would have if all parts, or those of one mesh axis, were put together."""
    found = []
    for shape in part.shapes:
        sizes = [request.plan.size(axis) for axis in part.spec.axes]
        whole = tuple(size * parts for size, parts in zip(shape, sizes, strict=False))  # blocks have axes of their own
        found += [whole, *((parts, *shape) for parts in sizes if parts > 1)]
    return [shape for shape in found if math.prod(shape) > math.prod(part.shapes[0])]


def device_pages(request: PlanRequest, described: DescribedModel) -> PagePlan:
    """The cache of one device: its group's pages of its heads; latents are on every device of a group."""
    config = described.config
    heads = len(division_of(request.plan, config).heads.keys)
    if getattr(config, "mla", None) is None:
        config = dataclasses.replace(config, num_kv_heads=heads // request.plan.tensor)
    return page_plan(request, config)


def cache_bytes(request: PlanRequest, pages: PagePlan) -> int:
    """Of every sequence of a group at its full length."""
    return request.group_batch * pages.sequence_pages * pages.spec.page_bytes


def seen_share(config: Any, context: int) -> float:
    """The part of a context that a token at its end attends to, over all layers: less than 1 with windows."""
    windows = getattr(config, "windows", ())
    if not windows:
        return 1.0
    return sum(min(window or context, context) for window in windows) / len(windows) / context


def keys_of_decode(config: Any, batch: int, context: int) -> float:
    """Tokens of the cache that a step reads: every sequence's context."""
    return batch * context * seen_share(config, context)


def keys_of_prefill(config: Any, num_tokens: int, context: int) -> float:
    """The same of a chunk: every tile reads what stands before it, half the context on average."""
    return num_tiles(num_tokens) * context / 2 * seen_share(config, context)


def block_trips(config: Any, context: float) -> float:
    """Blocks of keys that attention walks for one row."""
    return max(1.0, context * seen_share(config, max(1, int(context))) / BLOCK)


def num_tiles(num_tokens: int) -> int:
    """Tiles of queries of a prefill."""
    return math.ceil(num_tokens / TILE)


def read_weight_bytes(
    request: PlanRequest, parts: list[WeightPart], described: DescribedModel, num_tokens: int, *, all_experts: bool
) -> float:
    """Bytes of weights that a step of so many tokens a group reads on one device.

    Of the embedding its rows, of the experts those that are met (all where the kernel multiplies with all), everything
    else once.
    """
    moe = getattr(described.config, "moe", None)
    is_tied = not any(part.path == "unembed" for part in parts)
    total = 0.0
    for part in parts:
        if not part.is_used:
            continue
        share = 1.0
        if part.path == "embed" and not is_tied:
            share = min(1.0, num_tokens / part.spec.shape[0])
        elif "experts" in part.spec.axes and moe is not None and not all_experts:
            share = (
                experts_met(moe.num_experts, num_tokens * shared_groups(request), moe.routing.num_chosen)
                / moe.num_experts
            )
        total += share * part.num_bytes
    return total


def shared_groups(request: PlanRequest) -> int:
    """Data groups whose tokens meet the same experts."""
    return request.data if DATA in request.plan.cut_over("experts") else 1
