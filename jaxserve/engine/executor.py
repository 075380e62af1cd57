"""Owns the device: parameters, cache, slot state and the compiled step of every bucket."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxserve.engine import experts
from jaxserve.engine.arrays import put
from jaxserve.engine.buckets import choose_shape
from jaxserve.engine.compiling import executable, held_program
from jaxserve.engine.experts import ExpertReport, Rebalanced
from jaxserve.engine.host_memory import in_huge_pages
from jaxserve.engine.inputs import InputFiller
from jaxserve.engine.program_cache import HeldProgram, ProgramCache, temp_bytes
from jaxserve.engine.progress import Progress
from jaxserve.engine.requests import EngineRequest, needs_slot_state
from jaxserve.engine.slot_state import MAX_EOS_TOKENS, empty_state, set_slot
from jaxserve.engine.step import Program, step_function
from jaxserve.kv_cache import CacheSpec, empty_cache
from jaxserve.sampling_params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from jaxserve.scheduler.request import Request
from jaxserve.scheduler.step_plan import StepPlan
from jaxserve.step_inputs import StepOutputs, StepShape, TokenLogprobs, packing
from sharding.placement import ExpertPlacement
from sharding.plan import ShardingPlan

LOG = logging.getLogger("jaxserve")
MAX_COMPILE_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """How one program came to be: seconds, whether a cache on disk had it, and its temporary bytes."""

    name: str
    seconds: float
    from_cache: bool
    temp_bytes: int


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """A step that was dispatched and not read yet."""

    plan: StepPlan
    shape: StepShape
    outputs: Any


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """A step's outputs on the host. token_ids: drawn token per row of the plan. Log probabilities by device row
    (`row_of`) and by device token (`first_token_of`), pooled hidden states by device row; None where nobody wants
    them."""

    shape: StepShape
    token_ids: list[int]
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    pooled: np.ndarray | None = None


@runtime_checkable
class Executor(Protocol):
    """What the engine needs of whatever runs the steps; tests give a fake."""

    def dispatch(self, plan: StepPlan) -> InFlight: ...

    def fetch(self, step: InFlight) -> StepResult: ...

    def close(self) -> None: ...


def step_temp_bytes(program: Program, params: Any, shape: StepShape, spec: CacheSpec) -> int:
    """Temporary bytes of one step shape, from its compilation on described arrays: nothing is allocated."""
    max_len = shape.max_pages * spec.page_size
    make = partial(empty_cache, spec, shape.max_pages * program.num_groups, program.kernels)
    cache = jax.eval_shape(make) if program.spread is None else program.spread.described_cache(make)
    state = jax.eval_shape(lambda: empty_state(program, shape.num_rows, max_len))
    buffer = jax.ShapeDtypeStruct((packing(shape)[1] * program.num_groups,), jnp.int32, sharding=program.by_group)
    memory = step_function(program, shape).lower(params, cache, state, buffer).compile().memory_analysis()
    return memory.temp_size_in_bytes if memory else 0


def row_of(plan: StepPlan, shape: StepShape, row: int) -> int:
    """The device row of a plan's row: padding lies between the single rows and the chunks."""
    return row if row < plan.num_single_rows else shape.single_rows + row - plan.num_single_rows


type Tell = Callable[..., None]


def to_nobody(name: str, *arrays: np.ndarray) -> None:
    """There are no other hosts."""


class DeviceExecutor:
    """The real executor. After `compile_all` nothing compiles any more; without it each shape does on first use.

    On a CPU a loaded step takes 16 MB of the memory that serves the model, and most servers never see most batch sizes.
    So those that a single short request does not need are held as they were on disk, and loaded at their first use,
    which takes a tenth of a second.
    """

    def __init__(
        self,
        *,
        program: Program,
        params: Any,
        shapes: tuple[StepShape, ...],
        cache_spec: CacheSpec,
        num_pages: int,
        num_slots: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        program_cache: ProgramCache | None = None,
        tell: Tell = to_nobody,
    ) -> None:
        self.program = program
        self._program_cache = program_cache
        self._tell = tell
        self.params = params
        self.shapes = shapes
        self._eos_token_ids = eos_token_ids
        self._max_len = max_model_len
        self._num_slots = num_slots
        self._fillers = tuple(InputFiller(shapes, num_slots) for _ in range(program.num_groups))
        self._dirty_slots: set[int] = set()
        self._cache = program.new_cache(cache_spec, num_pages * program.num_groups)
        is_moved = jax.default_backend() == "cpu" and program.spread is None
        self.huge_page_bytes = in_huge_pages(self._cache) if is_moved else 0
        self._state = put(empty_state(program, num_slots, max_model_len), program.by_group)
        self._expert_tokens: np.ndarray | None = None
        self.placement: ExpertPlacement | None = None
        if experts.layers_with_experts(program.config):
            plan = ShardingPlan() if program.spread is None else program.spread.plan
            self.placement = experts.first_placement(program.config, plan)
        self._steps: dict[StepShape, Any] = {}
        self._held: dict[StepShape, HeldProgram] = {}
        self._set_slot: Any = None
        self.programs: list[ProgramReport] = []
        self._is_warm = False

    def compile_all(self, progress: Progress) -> None:
        """Compiles every program, or reads it from disk; several at a time."""
        few_tokens = min(2, self.shapes[-1].chunk_tokens)
        needed = {choose_shape(self.shapes, 1, 0, 0), choose_shape(self.shapes, 0, few_tokens, 1)}
        for shape in self.shapes:
            self._hold(shape)
        task = "loading compiled steps" if len(self._held) == len(self.shapes) else "compiling"
        ready = [partial(self._step, shape) for shape in self.shapes if shape in needed or shape not in self._held]
        self._compile([*ready, self._slot_setter], progress, task)
        for shape, held in self._held.items():
            self._report(str(shape), 0.0, True, held.link.temp_bytes)
        self._is_warm = True
        order = [str(shape) for shape in self.shapes]
        self.programs.sort(key=lambda report: order.index(report.name) if report.name in order else len(order))

    def compile_for(self, num_prompt_tokens: int, num_choices: int, progress: Progress) -> None:
        """Compiles what a request that runs alone will need: its prompt's chunks, then one row per choice."""
        largest, tokens = self.shapes[-1], num_choices * num_prompt_tokens
        sizes = {tokens} if tokens <= largest.chunk_tokens else {tokens % largest.chunk_tokens, largest.chunk_tokens}
        prefills = min(num_choices, largest.chunk_rows)
        wanted = {choose_shape(self.shapes, min(num_choices, largest.single_rows), 0, 0)}
        wanted |= {choose_shape(self.shapes, 0, size, min(prefills, size)) for size in sizes if size > 1}
        missing = [partial(self._step, shape) for shape in sorted(wanted - self._steps.keys())]
        if missing:
            self._compile(missing, progress, "compiling")

    def _compile(self, jobs: Sequence[Callable[[], Any]], progress: Progress, task: str) -> None:
        with (
            progress.task(task, len(jobs)) as advance,
            ThreadPoolExecutor(max_workers=min(len(os.sched_getaffinity(0)), MAX_COMPILE_THREADS)) as pool,
        ):
            for job in as_completed([pool.submit(job) for job in jobs]):
                job.result()
                advance(1)

    def _step(self, shape: StepShape) -> Any:
        if shape not in self._steps:
            self._steps[shape] = self._loaded(shape) or self._ready(
                step_function(self.program, shape), str(shape), (self.program, shape), self._arguments(shape)
            )
        return self._steps[shape]

    def _hold(self, shape: StepShape) -> None:
        """Brings a step from disk into memory without loading it, where that can be done."""
        cache = self._program_cache
        held = held_program(str(shape), (self.program, shape), self._arguments(shape), cache) if cache else None
        if held:
            self._held[shape] = held

    def _loaded(self, shape: StepShape) -> Any | None:
        """The step that was held, or None where it was not or cannot be loaded."""
        start, held = time.perf_counter(), self._held.pop(shape, None)
        if held is None or self._program_cache is None:
            return None
        program = self._program_cache.load_held(held, self._arguments(shape))
        if program is not None and not self._is_warm:  # else it is in the list already
            self._report(str(shape), time.perf_counter() - start, True, held.link.temp_bytes)
        return program

    def _arguments(self, shape: StepShape) -> tuple[Any, ...]:
        size = packing(shape)[1] * self.program.num_groups
        buffer = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=self.program.by_group)
        return self.params, self._cache, self._state, buffer

    def _slot_setter(self) -> Any:
        if self._set_slot is None:
            arguments = (self._state, *put(self._slot_row(None, 0), self.program.everywhere))
            self._set_slot = self._ready(jax.jit(set_slot, donate_argnums=0), "place request", set_slot, arguments)
        return self._set_slot

    def _ready(self, function: Any, name: str, made_of: Any, arguments: tuple[Any, ...]) -> Any:
        """The executable of a function, from disk without tracing it where it is there; with a report."""
        if self._is_warm:
            LOG.warning("compiling %s while serving: a defect, every program should have been ready", name)
        start = time.perf_counter()
        program, from_cache = executable(function, name, made_of, arguments, self._program_cache)
        self._report(name, time.perf_counter() - start, from_cache, temp_bytes(program))
        return program

    def _report(self, name: str, seconds: float, from_cache: bool, temp_bytes: int) -> None:
        report = ProgramReport(name=name, seconds=seconds, from_cache=from_cache, temp_bytes=temp_bytes)
        self.programs.append(report)

    def place(self, requests: Sequence[Request], group: int = 0) -> None:
        """Takes over requests that were given a slot: sampling rows, and device state where it is needed."""
        for request in requests:
            payload = request.payload
            assert isinstance(payload, EngineRequest)
            assert request.slot is not None
            slot = group * (self._num_slots + 1) + request.slot
            pooling = None if payload.pooled is None else payload.pooled.pooling
            self._fillers[group].place(
                request, payload.params, payload.seed, payload.prompt_logprobs is not None, pooling
            )
            needs_state = needs_slot_state(payload.params)
            if needs_state or slot in self._dirty_slots:
                self.set_slot(self._slot_row(request, slot))
            (self._dirty_slots.add if needs_state else self._dirty_slots.discard)(slot)

    def set_slot(self, row: Sequence[np.ndarray]) -> None:
        """Writes a request's row of the slot state."""
        self._tell("set_slot", *row)
        self._state = self._slot_setter()(self._state, *put(tuple(row), self.program.everywhere))

    def _slot_row(self, request: Request | None, slot: int) -> tuple[np.ndarray, ...]:
        history = np.zeros(self._max_len, np.int32)
        bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
        bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
        stop_ids = np.full(MAX_STOP_TOKEN_IDS + MAX_EOS_TOKENS, -1, np.int32)
        if request is not None:
            assert isinstance(request.payload, EngineRequest)
            params = request.payload.params
            history[: len(request.token_ids)] = request.token_ids
            bias = params.logit_bias or {}
            bias_ids[: len(bias)] = list(bias)
            bias_values[: len(bias)] = list(bias.values())
            eos = frozenset() if params.ignore_eos else self._eos_token_ids
            stops = sorted(eos.union(params.stop_token_ids or ()))
            stop_ids[: len(stops)] = stops
        return np.asarray(slot, np.int32), history, bias_ids, bias_values, stop_ids

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Starts the step on the device and returns at once."""
        self.place(plan.placed)
        shape = self._fillers[0].shape_of(plan)
        return InFlight(plan=plan, shape=shape, outputs=self.run(shape, self._fillers[0].fill(plan, shape)))

    def run(self, shape: StepShape, buffer: Int32[np.ndarray, "W"]) -> StepOutputs:
        """Starts a step with its packed inputs."""
        self._tell("run", np.asarray(self.shapes.index(shape)), buffer)
        outputs, self._cache, self._state = self._step(shape)(
            self.params, self._cache, self._state, put(buffer, self.program.by_group)
        )
        return outputs

    def fetch(self, step: InFlight) -> StepResult:
        """Waits for the step and brings its tokens, and what else its requests want, to the host."""
        drawn = np.asarray(step.outputs.token_ids).tolist()
        wants = wanted_outputs(step.plan)
        return StepResult(
            shape=step.shape,
            token_ids=drawn_tokens(step.plan, step.shape, drawn),
            logprobs=jax.device_get(step.outputs.logprobs) if wants[0] else None,
            prompt_logprobs=jax.device_get(step.outputs.prompt_logprobs) if wants[1] else None,
            pooled=np.asarray(step.outputs.pooled) if wants[2] else None,
        )

    def expert_report(self) -> ExpertReport:
        """Load since the start, of a model with experts. Waits for the steps in flight; for the thread that dispatches
        them. To be called before an expert gets 2^32 tokens more."""
        assert self.placement is not None
        assert self._state is not None
        self._tell("read_experts")
        now = self.read_experts().view(np.uint32)
        before = np.zeros(now.shape, np.int64) if self._expert_tokens is None else self._expert_tokens
        self._expert_tokens = before + (now - before.astype(np.uint32))
        return experts.report(self._expert_tokens.sum(axis=0), self.program.config, self.placement)

    def read_experts(self) -> Int32[np.ndarray, "groups Y E"]:
        """The counters of every group."""
        assert self._state is not None
        counters = self._state.expert_load
        if not (counters.is_fully_addressable or counters.is_fully_replicated):
            counters = jax.jit(lambda array: array, out_shardings=self.program.everywhere)(counters)
        return np.asarray(counters)

    def rebalance_experts(self) -> Rebalanced:
        """Moves experts to where they even out the load since the start; for the thread that dispatches steps."""
        before = self.expert_report()
        assert self.placement is not None
        assert self.params is not None
        after = experts.placement_for(before.tokens, self.placement)
        num_moved = int((after.slots != self.placement.slots).sum())
        if num_moved:
            self.move_experts(after.slots)
        return Rebalanced(
            imbalance_before=before.imbalance, imbalance_after=after.imbalance(before.tokens), moved=num_moved
        )

    def move_experts(self, slots: Int32[np.ndarray, "L S"]) -> None:
        """Brings the weights of the experts to their new slots."""
        assert self.placement is not None
        assert self.params is not None
        self._tell("move_experts", slots)
        after = replace(self.placement, slots=slots)
        self.params, self.placement = experts.moved(self.params, self.placement, after), after

    def follow(self, commands: Iterable[tuple[str, list[np.ndarray]]]) -> None:
        """Runs what host 0 runs, until it closes."""
        for name, arrays in commands:
            if name == "run":
                self.run(self.shapes[int(arrays[0])], arrays[1])
            elif name == "set_slot":
                self.set_slot(arrays)
            elif name == "move_experts":
                self.move_experts(arrays[0])
            elif name == "read_experts":
                self.read_experts()
            else:
                raise AssertionError(f"host 0 says {name!r}")

    def close(self) -> None:
        """Gives the device memory back, on other hosts too."""
        self._tell("close")
        for tree in (self.params, self._cache, self._state):
            for leaf in jax.tree.leaves(tree):
                leaf.delete()
        self.params = self._cache = self._state = None  # type: ignore[assignment]
        self._steps.clear()
        self._held.clear()
        self._set_slot = None


def drawn_tokens(plan: StepPlan, shape: StepShape, drawn: list[int]) -> list[int]:
    """The tokens of the plan's rows among those of all device rows."""
    singles = plan.num_single_rows
    return drawn[:singles] + drawn[shape.single_rows : shape.single_rows + len(plan.slots) - singles]


def wanted_outputs(plan: StepPlan) -> tuple[bool, bool, bool]:
    """Whether any row of the plan wants log probabilities of its drawn token, those of its prompt, pooled states."""
    wants, wants_prompt, wants_pooled = False, False, False
    for request, start in zip(plan.requests, plan.starts, strict=True):
        payload = request.payload
        assert isinstance(payload, EngineRequest)
        wants = wants or payload.params.logprobs is not None
        if payload.pooled is not None:
            wants_pooled = True
        if payload.prompt_logprobs is not None:  # once decoding there is nothing left to bring over
            wants_prompt = wants_prompt or start < len(request.prompt_token_ids)
    return wants, wants_prompt, wants_pooled
