"""A plan's programs without compiling them: what the forward pass does to one device, counted by hand.

Coarser than what a compiler tells, but good enough to rank plans, and all there is to say of a plan that none compiles.
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxserve.planning.analytic import WeightPart, shared_groups
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.request import PlanRequest

SUM_BYTES = 4  # partial sums travel in float32


@dataclass(frozen=True, kw_only=True)
class EstimatedStep:
    """Figures of one program in the form in which compilation.py gives them."""

    flops: float
    temp_bytes: int
    collectives: tuple[dict[str, Any], ...]


def estimated_step(
    request: PlanRequest,
    described: DescribedModel,
    parts: list[WeightPart],
    *,
    num_tokens: int,
    num_rows: int,
    keys: float,
) -> EstimatedStep:
    """One step of so many tokens, of which so many rows are unembedded. keys: pairs of a query and a key are counted
    as if every token read its share of these tokens of the cache."""
    config = described.config
    flops = float(sum(_part_flops(request, config, part, num_tokens, num_rows) for part in parts if part.is_used))
    flops += _attention_flops(request, config, keys)
    return EstimatedStep(
        flops=flops,
        temp_bytes=_temp_bytes(request, config, num_tokens, num_rows),
        collectives=tuple(_collectives(request, config, num_tokens, num_rows)),
    )


def _part_flops(request: PlanRequest, config: Any, part: WeightPart, num_tokens: int, num_rows: int) -> float:
    size = float(math.prod(part.shapes[0])) if len(part.shapes) == 1 else _size_on_device(request, part)
    if part.spec.is_vector or part.path == "embed":
        return 0.0
    if part.path == "unembed":
        return 2.0 * num_rows * size
    if "experts" not in part.spec.axes:
        return 2.0 * num_tokens * size
    rows = num_tokens * shared_groups(request) * config.moe.routing.num_chosen
    if request.where.platform != "tpu":  # every row with every expert of the device
        return 2.0 * rows * size
    return 2.0 * rows * size / config.moe.num_experts


def _size_on_device(request: PlanRequest, part: WeightPart) -> float:
    """Values of a packed parameter."""
    return part.spec.size / math.prod(request.plan.size(axis) for axis in part.spec.axes)


def _attention_flops(request: PlanRequest, config: Any, keys: float) -> float:
    mla = getattr(config, "mla", None)
    width = 2 * (mla.latent_size + mla.rope_size) if mla else 2 * config.head_size
    return 2.0 * keys * width * config.num_layers * config.num_heads / request.tensor


def _temp_bytes(request: PlanRequest, config: Any, num_tokens: int, num_rows: int) -> int:
    """The widest activations of a layer and three copies of the logits, in float32."""
    moe, tensor = getattr(config, "moe", None), request.tensor
    heads = config.num_heads * config.head_size / tensor if getattr(config, "mla", None) is None else 0
    if getattr(config, "mla", None) is not None:
        heads = config.num_heads * (config.mla.latent_size + config.mla.rope_size) / tensor
    width = 3 * config.hidden_size + 2 * config.ffn_size / tensor + 2 * heads
    if moe is not None:
        rows = moe.routing.num_chosen * shared_groups(request)  # of all groups' tokens: each device sees them all
        width += rows * (2 * config.hidden_size + 2 * moe.expert_size / tensor)
    return int(4 * (num_tokens * width + 3 * num_rows * config.vocab_size))


def _collectives(request: PlanRequest, config: Any, num_tokens: int, num_rows: int) -> list[dict[str, Any]]:
    """Sums of the embedding and of each layer's two parts, and the logits put together."""
    tensor, expert = request.tensor, request.expert
    row = tuple(range(tensor))
    summed = num_tokens * config.hidden_size * SUM_BYTES
    num_moe = sum(config.has_experts(n) for n in range(config.num_layers)) if getattr(config, "moe", None) else 0
    found = []
    if tensor > 1:
        found.append(_reduced(row, 1 + 2 * config.num_layers - num_moe, summed))
        logits = num_rows * config.vocab_size * 4
        found.append(_sent("all-gather", row, 1, float(logits), logits * (tensor - 1) / tensor))
    if num_moe and tensor * expert > 1:
        found.append(_reduced(tuple(range(tensor * expert)), num_moe, summed))
    groups = shared_groups(request)
    if num_moe and groups > 1:  # activations brought together, sums dealt out again
        across = tuple(n * tensor * expert for n in range(groups))
        for kind, width in (("all-gather", activation_bytes(request)), ("reduce-scatter", SUM_BYTES)):
            size = float(num_moe * num_tokens * groups * config.hidden_size * width)
            found.append(_sent(kind, across, num_moe, size, size * (groups - 1) / groups))
    return found


def activation_bytes(request: PlanRequest) -> int:
    """Of one value."""
    return 4 if request.dtype == "float32" else 2


def _reduced(group: tuple[int, ...], count: int, size: int) -> dict[str, Any]:
    return _sent("all-reduce", group, count, float(count * size), count * size * 2 * (len(group) - 1) / len(group))


def _sent(kind: str, group: tuple[int, ...], count: int, size: float, wire_bytes: float) -> dict[str, Any]:
    return {"kind": kind, "group": group, "count": count, "bytes": size, "wire_bytes": wire_bytes, "shape": ""}
