"""From a plan's facts to what a person asks: does it fit, how fast, what does it cost. Plain data, ready for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.engine.memory import DEVICE_SHARE
from jaxserve.planning import analytic
from jaxserve.planning.advice import advice
from jaxserve.planning.analytic import WeightPart
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.doubts import alias_doubts, gathered_weight_doubts, temp_doubts, version_doubts
from jaxserve.planning.estimate import estimated_step
from jaxserve.planning.pages import PagePlan
from jaxserve.planning.request import PlanRequest
from jaxserve.planning.step_programs import step_shapes_of
from jaxserve.step_inputs import StepShape, packing
from sharding.roofline import StepWork, cost_per_million, step_time

PROGRAMS = ("prefill", "decode")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A request with what arithmetic says about it."""

    request: PlanRequest
    described: DescribedModel
    parts: list[WeightPart]
    pages: PagePlan
    shapes: Mapping[str, StepShape]

    @property
    def weights_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def kv_cache_bytes(self) -> int:
        return analytic.cache_bytes(self.request, self.pages)

    @property
    def capacity_bytes(self) -> int:
        """What an engine takes of a device's memory."""
        return int(self.request.where.memory_bytes * DEVICE_SHARE)


def planned(request: PlanRequest, described: DescribedModel) -> Planned:
    """ValueError for a plan that cannot cut the model."""
    pages = analytic.device_pages(request, described)
    prefill, decode = step_shapes_of(request, pages)
    return Planned(
        request=request,
        described=described,
        parts=analytic.weight_parts(request, described),
        pages=pages,
        shapes={"prefill": prefill, "decode": decode},
    )


def plan_report(plan: Planned, facts: Mapping[str, Any], price: float | None) -> dict[str, Any]:
    """Everything about one plan. facts: of compile_plan, or empty for an estimate. price: of a chip, per hour."""
    request, where = plan.request, plan.request.where
    held = facts.get("weights_bytes", plan.weights_bytes)
    assert held == plan.weights_bytes, f"described arrays have {held:,} bytes, their specs {plan.weights_bytes:,}"
    steps = {name: _step(plan, name, facts.get(name, {})) for name in PROGRAMS}
    compiled = [facts[name] for name in PROGRAMS if "temp_bytes" in facts.get(name, {})]
    memory = _memory(plan, facts, steps)
    refusal = next((facts[name]["refusal"] for name in PROGRAMS if "refusal" in facts.get(name, {})), None)
    failure = facts.get("failure") or (refusal["reason"] if refusal and not refusal["is_memory"] else None)
    fits = memory["total_bytes"] <= memory["capacity_bytes"] and not (refusal and refusal["is_memory"])
    room = memory["capacity_bytes"] - memory["total_bytes"] + memory["kv_cache_bytes"]
    chips = -(-request.plan.num_devices // where.device.devices_per_chip)
    return {
        "model": request.model,
        "num_parameters": plan.described.num_parameters,
        "topology": str(where),
        "num_devices": where.num_devices,
        "num_devices_used": request.plan.num_devices,
        "device": where.device.kind,
        "plan": {"tensor": request.tensor, "expert": request.expert, "data": request.data},
        "context": request.context,
        "batch": request.batch,
        "is_compiled": len(compiled) == len(PROGRAMS),
        "fits": fits and failure is None,
        "failure": failure,
        "refusal": refusal["reason"] if refusal else None,
        "advice": None if fits else advice(plan, room),
        "per_device": memory,
        "kv_bytes_per_token": plan.pages.token_bytes,
        "kv_capacity_tokens": plan.pages.tokens_in(room // plan.pages.spec.page_bytes) * request.data,
        "collectives": [line for name in PROGRAMS for line in steps[name].pop("collectives")],
        **steps,
        "ttft_seconds": steps["prefill"]["seconds"]
        * -(-request.context // max(1, plan.shapes["prefill"].chunk_tokens)),
        "cost_per_million_tokens": {
            kind: None if price is None else cost_per_million(price, chips, steps[name]["tokens_per_second"])
            for kind, name in (("input", "prefill"), ("output", "decode"))
        },
        "price_per_chip_hour": price,
        "compile_seconds": facts.get("compile_seconds"),
        "host_memory_bytes": facts.get("host_memory_bytes"),
        "warnings": _doubts(plan, facts),
    }


def _memory(plan: Planned, facts: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of one device. output: results that take over no argument's place; padding: what layouts add to arrays."""
    compiled = [facts[name] for name in PROGRAMS if "temp_bytes" in facts.get(name, {})]
    temp = max(steps[name]["temp_bytes"] for name in PROGRAMS)
    output = max((each["output_bytes"] - each["alias_bytes"] for each in compiled), default=0)
    padding = max((each["argument_bytes"] - each["input_bytes"] for each in compiled), default=0)
    found = {
        "weights_bytes": plan.weights_bytes,
        "kv_cache_bytes": plan.kv_cache_bytes,
        "state_bytes": facts.get("state_bytes", 0),
        "inputs_bytes": 4 * packing(plan.shapes["prefill"])[1],
        "padding_bytes": padding,
        "temp_bytes": temp,
        "output_bytes": max(0, output),
    }
    return found | {
        "total_bytes": sum(found.values()),
        "capacity_bytes": plan.capacity_bytes,
        "memory_bytes": plan.request.where.memory_bytes,
    }


def _step(plan: Planned, name: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Work and time of one program: as compiled, or estimated where it is not."""
    request, shape, config = plan.request, plan.shapes[name], plan.described.config
    is_decode = name == "decode"
    num_tokens = request.group_batch if is_decode else shape.chunk_tokens
    keys = (
        analytic.keys_of_decode(config, request.group_batch, request.context)
        if is_decode
        else analytic.keys_of_prefill(config, num_tokens, request.context)
    )
    pairs = keys if is_decode else num_tokens * request.context / 2 * analytic.seen_share(config, request.context)
    if "temp_bytes" in facts:
        flops, temp, sent = facts["flops"], facts["temp_bytes"], facts["collectives"]
    else:
        estimate = estimated_step(
            request, plan.described, plan.parts, num_tokens=shape.num_tokens, num_rows=shape.num_rows, keys=pairs
        )
        flops, temp, sent = estimate.flops, estimate.temp_bytes, estimate.collectives
    all_experts = request.where.platform != "tpu"
    read = analytic.read_weight_bytes(request, plan.parts, plan.described, num_tokens, all_experts=all_experts)
    lines = _wire_lines(plan, name, sent)
    work = StepWork(
        flops=flops,
        hbm_bytes=read + keys * plan.pages.token_bytes,
        wire_bytes=float(sum(each["wire_bytes"] for each in sent)),
        wire_seconds=float(sum(line["seconds"] for line in lines)),
    )
    time = step_time(work, request.where.device, request.dtype)
    return {
        "program": str(shape),
        "flops": work.flops,
        "hbm_bytes": work.hbm_bytes,
        "wire_bytes": work.wire_bytes,
        "seconds": time.seconds,
        "compute_seconds": time.compute_seconds,
        "memory_seconds": time.memory_seconds,
        "wire_seconds": time.wire_seconds,
        "bound_by": time.bound_by,
        "tokens_per_second": (request.batch if is_decode else num_tokens * request.data) / time.seconds,
        "temp_bytes": temp,
        "argument_bytes": facts.get("argument_bytes"),
        "predicted_argument_bytes": facts.get("input_bytes"),
        "collectives": lines,
    }


def _wire_lines(plan: Planned, name: str, sent: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Collectives of one kind and group size in one line, with the time of their wires."""
    device, lines = plan.request.where.device, {}
    for each in sent:
        key = (each["kind"], len(each["group"]), device.crosses_hosts(each["group"]))
        line = lines.setdefault(
            key,
            {
                "program": name,
                "kind": each["kind"],
                "num_devices": len(each["group"]),
                "crosses_hosts": key[2],
                "count": 0,
                "bytes": 0.0,
                "wire_bytes": 0.0,
                "seconds": 0.0,
            },
        )
        once = device.wire_seconds(each["kind"], each["group"], each["wire_bytes"] / each["count"])
        line["count"] += each["count"]
        line["bytes"] += each["bytes"]
        line["wire_bytes"] += each["wire_bytes"]
        line["seconds"] += each["count"] * once
    return list(lines.values())


def _doubts(plan: Planned, facts: Mapping[str, Any]) -> list[dict[str, str]]:
    found = []
    stacks = analytic.stack_bytes(plan.parts)
    donated = facts.get("kv_cache_bytes", 0) + facts.get("state_bytes", 0)
    shapes = {part.stack: analytic.whole_shapes(plan.request, part) for part in plan.parts if not part.spec.is_vector}
    for name in PROGRAMS:
        program = facts.get(name, {})
        if "temp_bytes" not in program:
            continue
        found += temp_doubts(name, program["temp_bytes"], plan.kv_cache_bytes, stacks)
        found += gathered_weight_doubts(name, program["collectives"], shapes)
        found += alias_doubts(name, program["alias_bytes"], donated)
    return found + version_doubts(
        plan.request.where.platform,
        plan.request.plan.num_devices,
        has_experts=getattr(plan.described.config, "moe", None) is not None,
        is_packed=any(len(part.shapes) > 1 for part in plan.parts),
    )
