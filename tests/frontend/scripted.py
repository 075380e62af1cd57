"""An executor that draws what a script says, so that the whole path above the device runs without compiling."""

import hashlib
import threading
from collections.abc import Callable

import jax
import numpy as np

from jaxserve.engine.executor import InFlight, StepResult, wanted_outputs
from jaxserve.sampling_params import MAX_LOGPROBS
from jaxserve.scheduler import Request, StepPlan
from jaxserve.step_inputs import StepShape, TokenLogprobs

VOCABULARY = 262  # of the tokenizer in conftest.py
EOS = 260
NOTHING = -99  # what a row that draws nothing has; nobody may read it

Script = Callable[[Request, int], int]
"""The token a request draws as its output number n."""


def hashed(request: Request, n: int) -> int:
    """A token that only this prompt, choice and place have; never a control token."""
    return hashed_token(request.prompt_token_ids, choice_of(request), n)


def hashed_token(prompt: list[int], index: int, n: int) -> int:
    return hashlib.blake2b(repr((prompt, index, n)).encode(), digest_size=2).digest()[0]


def choice_of(request: Request) -> int:
    return int(request.request_id.rpartition("/")[2])


def says(tokens: list[int]) -> Script:
    """The given tokens, then end-of-sequence for ever."""
    return lambda request, n: tokens[n] if n < len(tokens) else EOS


class ScriptedExecutor:
    """Draws by a script. `gate` closed: steps wait in fetch. `failure`: raised by the next fetch."""

    def __init__(self, script: Script = hashed) -> None:
        self.script = script
        self.gate = threading.Event()
        self.gate.set()
        self.arrived = threading.Semaphore(0)  # released whenever a step begins to wait at the gate
        self.failure: Exception | None = None
        self.num_closes = 0
        self.plans: list[StepPlan] = []

    def dispatch(self, plan: StepPlan) -> InFlight:
        self.plans.append(plan)
        singles = plan.num_single_rows
        shape = StepShape(
            single_rows=singles,
            chunk_tokens=len(plan.token_ids) - singles,
            chunk_rows=len(plan.slots) - singles,
            max_pages=1,
        )
        return InFlight(plan=plan, shape=shape, outputs=[self._draw(plan, row) for row in range(len(plan.slots))])

    def _draw(self, plan: StepPlan, row: int) -> int:
        if not plan.samples[row]:
            return NOTHING
        request = plan.requests[row]
        return self.script(request, plan.starts[row] + plan.lengths[row] - len(request.prompt_token_ids))

    def fetch(self, step: InFlight) -> StepResult:
        self.arrived.release()
        assert self.gate.wait(30), "a test left the gate closed"
        if self.failure is not None:
            raise self.failure
        wants, wants_prompt, wants_pooled = wanted_outputs(step.plan)
        return StepResult(
            shape=step.shape,
            token_ids=step.outputs,
            logprobs=made_up_logprobs(step.outputs) if wants else None,
            prompt_logprobs=made_up_logprobs(next_tokens(step)) if wants_prompt else None,
            pooled=made_up_states(step.plan) if wants_pooled else None,
        )

    def close(self) -> None:
        self.num_closes += 1


def made_up_states(plan: StepPlan) -> np.ndarray:
    """[sum of the row's positions, number of its tokens]; of the last one only where the request pools that."""
    rows = []
    for request, start, length in zip(plan.requests, plan.starts, plan.lengths, strict=True):
        pooled = getattr(request.payload, "pooled", None)
        first = start + length - 1 if pooled is not None and pooled.pooling == "last" else start
        rows.append([float(sum(range(first, start + length))), float(start + length - first)])
    return np.asarray(rows, np.float32)


def next_tokens(step: InFlight) -> list[int]:
    """The token after each of the step's tokens, as far as the prompt knows it."""
    targets: list[int] = []
    for request, start, length in zip(step.plan.requests, step.plan.starts, step.plan.lengths, strict=True):
        prompt = request.prompt_token_ids
        targets += [prompt[p + 1] if p + 1 < len(prompt) else 0 for p in range(start, start + length)]
    return targets


def made_up_logprobs(tokens: list[int]) -> TokenLogprobs:
    """Log probability -token/100 at rank 3 for each token; the alternatives are token + 1, token + 2, ..."""
    chosen = np.asarray(tokens)
    tops = chosen[:, None] + 1 + np.arange(MAX_LOGPROBS)
    found = TokenLogprobs(
        chosen=jax.numpy.asarray(-chosen / 100, np.float32),
        rank=jax.numpy.asarray(np.full(len(tokens), 3), np.int32),
        top_ids=jax.numpy.asarray(tops, np.int32),
        top_logprobs=jax.numpy.asarray(-np.broadcast_to(np.arange(MAX_LOGPROBS) / 10, tops.shape), np.float32),
    )
    return jax.device_get(found)
