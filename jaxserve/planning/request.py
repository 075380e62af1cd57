"""What is asked of a plan, as plain data that one process can hand to another."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from jaxserve.config import KVCacheDType
from jaxserve.engine.decisions import ACCELERATOR_LIMITS, CPU_LIMITS
from jaxserve.errors import ConfigError
from pallas_kernels.kernels import kernels_for
from sharding.plan import EXPERT_RULES, ShardingPlan
from sharding.topology import Topology, read_topology

KV_CACHE_DTYPES = get_args(KVCacheDType)


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One model, one topology, one plan. context: tokens of a sequence; batch: sequences at once, those of all
    data groups. experts_over, redundant_experts: see ShardingPlan. num_tokens: tokens
    of a prefill step, the engine's own limit where None. weights: format of matrices, as `jaxserve convert` names it,
    the file's where None."""

    model: str
    topology: str
    tensor: int
    expert: int
    context: int
    batch: int
    data: int = 1
    experts_over: tuple[str, ...] = EXPERT_RULES[0]
    redundant_experts: int = 0
    num_tokens: int | None = None
    weights: str | None = None
    kv_cache_dtype: str = "auto"
    page_size: int = 16

    @property
    def where(self) -> Topology:
        return read_topology(self.topology)

    @property
    def plan(self) -> ShardingPlan:
        return ShardingPlan(
            tensor=self.tensor,
            expert=self.expert,
            data=self.data,
            experts_over=tuple(self.experts_over),
            redundant_experts=self.redundant_experts,
        )

    @property
    def group_batch(self) -> int:
        """Sequences of one data group."""
        return -(-self.batch // self.data)

    @property
    def step_tokens(self) -> int:
        """Tokens of a data group in one step at most."""
        default = (CPU_LIMITS if self.where.platform == "cpu" else ACCELERATOR_LIMITS)[1]
        return self.num_tokens or max(default, self.group_batch)

    @property
    def dtype(self) -> str:
        """Of activations: the engine's choice for the platform."""
        return "float32" if self.where.platform == "cpu" else "bfloat16"

    @property
    def cache_dtype(self) -> str:
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def check(self) -> None:
        """Raises ConfigError for what no model could make right."""
        for name in ("context", "batch", "page_size", "tensor", "expert", "data"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            allowed = ", ".join(KV_CACHE_DTYPES)
            raise ConfigError(f"--kv-cache-dtype must be one of {allowed}, got {self.kv_cache_dtype!r:.40}")
        try:
            kernels_for("auto", self.where.platform)[0].check_page_size(self.page_size)
        except ValueError as error:
            raise ConfigError(f"--page-size {self.page_size}: {error}") from error
        if self.num_tokens is not None and self.num_tokens < self.group_batch:
            raise ConfigError(
                f"--max-num-batched-tokens {self.num_tokens} is below --batch {self.group_batch}"
                f"{self._of_group}: a step must hold one token of every sequence"
            )
        if self.plan.num_devices > self.where.num_devices:
            raise ConfigError(
                f"{self.plan} needs {self.plan.num_devices} devices and {self.where} has {self.where.num_devices}"
            )

    def check_model(self, config: Any) -> None:
        """Raises ConfigError for what this model cannot do."""
        if self.context > config.max_position:
            raise ConfigError(
                f"--context {self.context:,} exceeds the {config.max_position:,} positions the model was made for"
            )

    @property
    def _of_group(self) -> str:
        return "" if self.data == 1 else f" (each of {self.data} data groups)"

    def spread_over(self, tensor: int, expert: int, data: int) -> "PlanRequest":
        """The same with another plan."""
        return dataclasses.replace(self, tensor=tensor, expert=expert, data=data)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PlanRequest":
        return cls(**values)
