"""Data parallelism: requests dealt out to groups, each with a scheduler of its own, in steps that all groups share.

A group's rows, pages and slots are numbered as if it were alone. Each step has one bucket, that of the fullest group; a
group without work runs padding, because the others may need its experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import numpy as np

from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import DeviceExecutor, StepResult, drawn_tokens, wanted_outputs
from jaxserve.engine.requests import EngineEvent
from jaxserve.scheduler import Request, Scheduler, SchedulerStats, StepPlan
from jaxserve.step_inputs import StepOutputs, StepShape

NO_ROWS = StepPlan(
    step=-1, requests=[], slots=[], starts=[], lengths=[], samples=[], num_single_rows=0, token_ids=[], placed=[],
    page_updates=[],
)  # fmt: skip

type Plans = tuple[StepPlan | None, ...]


@dataclass(frozen=True, kw_only=True)
class GroupsInFlight:
    """A step of all groups that was dispatched and not read yet."""

    plans: Plans
    shape: StepShape
    outputs: StepOutputs


class GroupSchedulers:
    """Several schedulers as one: a new request goes to the group with the fewest open ones."""

    def __init__(self, groups: Sequence[Scheduler]) -> None:
        self.groups = tuple(groups)

    def check(self, request: Request) -> None:
        """Raises PromptTooLong for a request that can never run."""
        self.groups[0].check(request)

    def add(self, request: Request) -> None:
        """Queues a request in one group, where it stays."""
        loads = [stats.num_running + stats.num_waiting for stats in (group.stats() for group in self.groups)]
        self.groups[loads.index(min(loads))].add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request; False when no group knows it."""
        return any(group.abort(request_id) for group in self.groups)

    @property
    def has_work(self) -> bool:
        return any(group.has_work for group in self.groups)

    def schedule(self) -> Plans | None:
        """A plan for each group that has something to compute; None when no group has."""
        plans = tuple(group.schedule() for group in self.groups)
        return plans if any(plan is not None for plan in plans) else None

    def check_invariants(self) -> None:
        """For tests."""
        for group in self.groups:
            group.check_invariants()

    def stats(self) -> SchedulerStats:
        """The sums over all groups."""
        each = [group.stats() for group in self.groups]
        names = [field.name for field in fields(SchedulerStats)]
        return SchedulerStats(**{name: sum(getattr(stats, name) for stats in each) for name in names})


class GroupsExecutor(DeviceExecutor):
    """Runs the groups' plans in one step."""

    def dispatch_all(self, plans: Plans) -> GroupsInFlight:
        """Starts the step on the devices and returns at once."""
        for group, plan in enumerate(plans):
            if plan is not None:
                self.place(plan.placed, group)
        whole = [plan or NO_ROWS for plan in plans]
        shape = self._fillers[0].shape_of(*whole)
        buffers = [filler.fill(plan, shape) for filler, plan in zip(self._fillers, whole, strict=True)]
        return GroupsInFlight(plans=plans, shape=shape, outputs=self.run(shape, np.concatenate(buffers)))

    def fetch_all(self, step: GroupsInFlight) -> list[StepResult | None]:
        """Waits for the step and brings each group's tokens, and what else its requests want, to the host."""
        outputs, num_groups = step.outputs, len(step.plans)
        wants = [wanted_outputs(plan or NO_ROWS) for plan in step.plans]

        def of_groups(tree: Any, kind: int) -> list[Any]:
            if not any(wanted[kind] for wanted in wants):
                return [None] * num_groups
            host = jax.device_get(tree)
            parts = [jax.tree.map(lambda a, g=g: np.split(a, num_groups)[g], host) for g in range(num_groups)]
            return [part if wanted[kind] else None for part, wanted in zip(parts, wants, strict=True)]

        drawn = np.asarray(outputs.token_ids).reshape(num_groups, -1).tolist()
        found = (of_groups(outputs.logprobs, 0), of_groups(outputs.prompt_logprobs, 1), of_groups(outputs.pooled, 2))
        return [
            plan
            and StepResult(
                shape=step.shape,
                token_ids=drawn_tokens(plan, step.shape, drawn[group]),
                logprobs=found[0][group],
                prompt_logprobs=found[1][group],
                pooled=found[2][group],
            )
            for group, plan in enumerate(step.plans)
        ]


class GroupsEngine(Engine):
    """An engine over data groups. With overlap one step of all of them is in flight."""

    def __init__(self, schedulers: GroupSchedulers, executor: GroupsExecutor, *, overlap: bool, seed: int) -> None:
        super().__init__(schedulers.groups[0], executor, overlap=overlap, seed=seed)
        self.scheduler = self._schedulers = schedulers
        self._executor = executor

    def _dispatch(self) -> GroupsInFlight | None:
        plans = self._schedulers.schedule()
        return self._executor.dispatch_all(plans) if plans is not None else None

    def _finish(self, dispatched: GroupsInFlight) -> list[EngineEvent]:
        results = self._executor.fetch_all(dispatched)
        told: list[EngineEvent] = []
        for group, plan, result in zip(self._schedulers.groups, dispatched.plans, results, strict=True):
            if plan is not None and result is not None:
                told += self._told(plan, result, group.commit(plan, result.token_ids))
        return told
