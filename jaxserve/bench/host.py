"""What a step costs on the host with many running requests: the real engine loop and input filling, no device.

Not in it: what the device call itself costs the host (transfer, launch, waiting) and the text of the answers.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxserve.bench.measure import percentiles
from jaxserve.bench.report import Distribution, Report, Target
from jaxserve.bench.workload import random_source, random_tokens, sampling
from jaxserve.engine.buckets import MAX_PREFILLS, step_shapes
from jaxserve.engine.decisions import ACCELERATOR_LIMITS
from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import InFlight, StepResult, wanted_outputs
from jaxserve.engine.inputs import InputFiller
from jaxserve.engine.requests import EngineRequest
from jaxserve.errors import ConfigError
from jaxserve.scheduler import Scheduler, StepPlan, TokenEvent
from jaxserve.step_inputs import StepShape

TARGET = Target(limit=1.5, is_floor=False)
PAGE_SIZE = 16
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 32_000
PROMPT_LENGTHS = (16, 1024)  # drawn evenly, so that requests fill their pages at different steps
PARTS = ("schedule", "fill inputs", "read tokens", "commit")


@dataclass(slots=True)
class PartClock:
    """Seconds of each part of each step. A step's parts are summed until `next_step`."""

    steps: list[dict[str, float]] = field(default_factory=lambda: [{}])

    def add(self, part: str, seconds: float) -> None:
        """Counts seconds towards a part of the current step."""
        now = self.steps[-1]
        now[part] = now.get(part, 0.0) + seconds

    def next_step(self) -> None:
        """Begins another step."""
        self.steps.append({})


class TimedScheduler(Scheduler):
    """The scheduler, with its two calls timed."""

    clock: PartClock

    def schedule(self) -> StepPlan | None:
        """As the scheduler's."""
        start = time.perf_counter()
        plan = super().schedule()
        self.clock.add("schedule", time.perf_counter() - start)
        return plan

    def commit(self, plan: StepPlan, tokens: Sequence[int]) -> list[TokenEvent]:
        """As the scheduler's."""
        start = time.perf_counter()
        events = super().commit(plan, tokens)
        self.clock.add("commit", time.perf_counter() - start)
        return events


class HostExecutor:
    """Does what the device executor does on the host, and draws the same token for every row."""

    def __init__(self, shapes: tuple[StepShape, ...], num_slots: int, clock: PartClock) -> None:
        self._filler = InputFiller(shapes, num_slots)
        self._clock = clock
        self.num_filled_bytes = 0

    def dispatch(self, plan: StepPlan) -> InFlight:
        """Fills the step's buffer."""
        start = time.perf_counter()
        for request in plan.placed:
            payload = request.payload
            assert isinstance(payload, EngineRequest)
            self._filler.place(request, payload.params, payload.seed, payload.prompt_logprobs is not None)
        shape = self._filler.shape_of(plan)
        buffer = self._filler.fill(plan, shape)
        self._clock.add("fill inputs", time.perf_counter() - start)
        self.num_filled_bytes = buffer.nbytes
        return InFlight(plan=plan, shape=shape, outputs=np.full(shape.num_rows, 7, np.int32))

    def fetch(self, step: InFlight) -> StepResult:
        """The drawn tokens, as the device executor reads them once they are on the host."""
        start = time.perf_counter()
        drawn = step.outputs.tolist()
        plan, shape = step.plan, step.shape
        singles = plan.num_single_rows
        token_ids = drawn[:singles] + drawn[shape.single_rows : shape.single_rows + len(plan.slots) - singles]
        assert not any(wanted_outputs(plan))
        self._clock.add("read tokens", time.perf_counter() - start)
        return StepResult(shape=shape, token_ids=token_ids)

    def close(self) -> None:
        """Nothing to give back."""


def bench_host(
    *,
    num_seqs: int,
    num_steps: int,
    num_warmup_steps: int,
    max_model_len: int = MAX_MODEL_LEN,
    prompt_lengths: tuple[int, int] = PROMPT_LENGTHS,
    seed: int = 0,
) -> Report:
    """Times steps in which num_seqs requests decode one token each."""
    shortest, longest = prompt_lengths
    if num_seqs < 1 or num_steps < 1 or longest + num_warmup_steps + num_steps + 2 > max_model_len:
        raise ConfigError(
            f"--num-seqs and --num-steps must be at least 1 and prompts of up to {longest:,} tokens plus all steps fit "
            f"{max_model_len:,}, got {num_seqs}, {num_steps} and {num_warmup_steps} warm-up steps"
        )
    clock = PartClock()
    max_tokens = max(ACCELERATOR_LIMITS[1], num_seqs)
    engine, executor = host_engine(num_seqs, max_tokens, max_model_len, clock)
    _start_requests(engine, num_seqs, (shortest, longest), num_warmup_steps + num_steps + 2, seed)
    totals = _timed_steps(engine, clock, num_seqs, num_warmup_steps, num_steps)
    return Report(
        title="host time per step",
        settings={
            "running requests": num_seqs,
            "steps": num_steps,
            "page size": f"{PAGE_SIZE} tokens",
            "max model len": f"{max_model_len:,} tokens",
            "prompts": f"{shortest}-{longest} tokens",
            "buffer": f"{executor.num_filled_bytes:,} bytes",
            "seed": seed,
        },
        distributions=_distributions(clock.steps, totals),
        notes=("without device calls (transfer, launch, waiting) and without detokenization",),
    )


def host_engine(
    num_seqs: int, max_num_batched_tokens: int, max_model_len: int, clock: PartClock
) -> tuple[Engine, HostExecutor]:
    """An engine configured as on an accelerator, with pages for every sequence at full length."""
    max_pages = -(-max_model_len // PAGE_SIZE)
    shapes = step_shapes(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefills=MAX_PREFILLS,
        max_pages=max_pages,
        deterministic=False,
    )
    scheduler = TimedScheduler(
        num_pages=(num_seqs + 1) * max_pages,
        page_size=PAGE_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_prefills_per_step=MAX_PREFILLS,
    )
    scheduler.clock = clock
    executor = HostExecutor(shapes, num_seqs, clock)
    return Engine(scheduler, executor, overlap=True, seed=0), executor


def _start_requests(engine: Engine, num_seqs: int, lengths: tuple[int, int], num_steps: int, seed: int) -> None:
    """Adds the requests and steps until all have their prompts behind them."""
    source = random_source(seed, "host")
    # A request admitted first decodes while the others' prompts are computed: those steps come on top.
    prompts = [random_tokens(source, source.randint(*lengths), VOCAB_SIZE) for _ in range(num_seqs)]
    max_tokens = num_steps + sum(map(len, prompts)) // 256 + num_seqs
    for index, prompt in enumerate(prompts):
        params = sampling(max_tokens)
        engine.add(engine.request(f"r{index}", prompt, params, max_tokens=max_tokens, eos_token_ids=frozenset()))
    begun: set[str] = set()
    while len(begun) < num_seqs:
        begun.update(event.request_id for event in engine.step())


def _timed_steps(engine: Engine, clock: PartClock, num_seqs: int, num_warmup: int, num_steps: int) -> list[float]:
    for _ in range(num_warmup):
        engine.step()
    clock.steps = []
    totals = []
    for _ in range(num_steps):
        clock.next_step()
        start = time.perf_counter()
        events = engine.step()
        totals.append(time.perf_counter() - start)
        assert len(events) == num_seqs, "every request decodes in every measured step"
    return totals


def _distributions(steps: list[dict[str, float]], totals: list[float]) -> tuple[Distribution, ...]:
    parts = {part: [step.get(part, 0.0) for step in steps] for part in PARTS}
    known = [sum(step.values()) for step in steps]
    parts["events and the rest"] = [total - part for total, part in zip(totals, known, strict=True)]
    named = {"total": totals} | parts
    return tuple(
        Distribution(
            name=name,
            unit="ms",
            value=percentiles([1e3 * value for value in values]),
            target=TARGET if name == "total" else None,
        )
        for name, values in named.items()
    )
