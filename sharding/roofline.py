"""How long a step takes at best, and what its tokens cost: arithmetic on counted work and a device's public figures."""

from dataclasses import dataclass
from typing import Literal

from sharding.devices import DeviceKind

Resource = Literal["compute", "memory", "wire"]


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one device does in a step: operations, bytes from its memory, bytes it sends and the seconds that takes."""

    flops: float
    hbm_bytes: float
    wire_bytes: float
    wire_seconds: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """seconds: of the step; of each resource alone beside it."""

    compute_seconds: float
    memory_seconds: float
    wire_seconds: float

    @property
    def seconds(self) -> float:
        """Computing overlaps reading; sending overlaps neither, because each layer waits for the sum of the last."""
        return max(self.compute_seconds, self.memory_seconds) + self.wire_seconds

    @property
    def bound_by(self) -> Resource:
        """The resource that takes longest."""
        times: dict[Resource, float] = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "wire": self.wire_seconds,
        }
        return max(times, key=times.__getitem__)


def step_time(work: StepWork, device: DeviceKind, dtype: str) -> StepTime:
    """The least time of this work on this device (Williams et al. 2009, the roofline model), sending added."""
    return StepTime(
        compute_seconds=work.flops / device.flops_of(dtype),
        memory_seconds=work.hbm_bytes / device.memory_bytes_per_second,
        wire_seconds=work.wire_seconds,
    )


def decode_ceiling(weight_bytes: int, device: DeviceKind) -> float:
    """Tokens per second of one sequence where every weight is read for every token: the rule of thumb."""
    return device.memory_bytes_per_second / weight_bytes


def experts_met(num_experts: int, num_tokens: int, num_chosen: int) -> float:
    """How many of all experts a step reads on average, if each of its tokens draws `num_chosen` of them evenly."""
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def cost_per_million(price_per_hour: float, num_chips: int, tokens_per_second: float) -> float:
    """Price of a million tokens at this rate, chips being paid by the hour."""
    return price_per_hour * num_chips / 3600 / tokens_per_second * 1e6
