"""Compiles the programs of one plan and reads off what the compiler says. Runs in a process of its own (worker.py)."""

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
from jax.interpreters import partial_eval

from jaxserve.engine.step import step_function
from jaxserve.planning.analytic import block_trips, num_tiles
from jaxserve.planning.described_model import DescribedModel
from jaxserve.planning.request import PlanRequest
from jaxserve.planning.step_programs import StepPrograms, device_bytes, step_programs
from jaxserve.step_inputs import StepShape
from sharding.flops import matmul_flops
from sharding.hlo import collectives
from sharding.topology import described_devices

MAX_REASON = 600
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def compiled_facts(request: PlanRequest, described: DescribedModel) -> dict[str, Any]:
    """Bytes held, and of each program what it takes, sends and computes on one device; plain data.

    A program that the compiler refuses has a `refusal` in place of its figures.
    """
    jax.config.update("jax_enable_compilation_cache", False)  # or the seconds would be those of reading a file
    programs = step_programs(request, described, described_devices(request.where))
    facts = {
        "weights_bytes": device_bytes(programs.params),
        "kv_cache_bytes": device_bytes(programs.cache),
        "state_bytes": device_bytes(programs.state),
    }
    start = time.perf_counter()
    shapes = {"prefill": programs.prefill, "decode": programs.decode}
    with ThreadPoolExecutor(len(shapes)) as pool:  # a compiler uses one core for most of its time
        of_program = partial(_program_facts, request, programs)
        facts |= dict(zip(shapes, pool.map(of_program, shapes, shapes.values()), strict=True))
    seconds = time.perf_counter() - start
    host_memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return facts | {"compile_seconds": seconds, "host_memory_bytes": host_memory}


def _program_facts(request: PlanRequest, programs: StepPrograms, name: str, shape: StepShape) -> dict[str, Any]:
    arguments = programs.arguments(shape)
    facts: dict[str, Any] = {}
    traced = step_function(programs.program, shape).trace(*arguments)
    facts["flops"] = matmul_flops(
        traced.jaxpr.jaxpr,
        trips=partial(_trips, request, programs, name, shape),
        ragged_rows=partial(_ragged_rows, request),
    )
    facts["input_bytes"] = _used_bytes(traced.jaxpr.jaxpr, jax.tree.leaves(arguments))
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        is_memory = OUT_OF_MEMORY in reason
        return facts | {"refusal": {"reason": reason[:MAX_REASON], "is_memory": is_memory}}
    memory = compiled.memory_analysis()
    return facts | {
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "collectives": [vars_of(each) for each in collectives(compiled.as_text(), request.plan.num_devices)],
    }


def vars_of(collective: Any) -> dict[str, Any]:
    """A collective as plain data."""
    return {name: getattr(collective, name) for name in ("kind", "group", "count", "bytes", "wire_bytes", "shape")}


def _used_bytes(jaxpr: Any, leaves: list[Any]) -> int:
    """Bytes on one device of the arguments that the program reads: jit leaves the others out of its executable."""
    _, is_used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return device_bytes([leaf for leaf, used in zip(leaves, is_used, strict=True) if used])


def _trips(
    request: PlanRequest, programs: StepPrograms, name: str, shape: StepShape, holds_loop: bool, depth: int
) -> float:
    """How often the loops of attention run: single rows walk their context, tiles of a chunk half of it on average.

    A prefill is counted without decodes beside it.
    """
    config = programs.program.config
    if name == "decode":
        return block_trips(config, request.context)
    if holds_loop:
        return float(num_tiles(shape.chunk_tokens))
    return block_trips(config, request.context / 2) if depth else 0.0


def _ragged_rows(request: PlanRequest, num_rows: int, num_groups: int) -> float:
    """Rows times groups that are multiplied: a TPU's kernel takes each row once and skips those of experts elsewhere,
    XLA for GPUs and CPUs multiplies every row with every expert and drops what is not wanted."""
    dealt = request.plan.size("experts")
    return num_rows / dealt if request.where.platform == "tpu" else float(num_rows * num_groups)
