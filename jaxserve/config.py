"""What a person chooses when an engine starts, and the record of what was decided from it. Names are vLLM's."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from jaxserve.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16"]
KVCacheDType = Literal["auto", "float32", "bfloat16", "int8"]
ExpandWeights = Literal["auto", "always", "never"]
KernelChoice = Literal["auto", "reference", "xla", "cpu"]
CpuLevel = Literal["auto", "avx512vnni", "avx512", "avx2", "generic"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Choices for one engine; None and "auto" leave a choice to the engine, which reports it with its reason.

    model: a catalog name, a file, a folder, or hf:ORG/REPO. num_pages: KV pages of all layers (so many for each group
    of layers, where they are in groups), computed from kv_cache_memory_bytes when None. overlap: dispatch the next step
    before the last one's tokens are read. deterministic: the logits of a request are bit-identical in every batch.
    max_waiting: requests queued before new ones are refused. threads: of XLA's pool on the host, one pool for a whole
    process. cpu_level: the instructions that CPU kernels may use. generation_config: "auto" takes sampling defaults
    from the model's generation_config.json, "none" has none, anything else is such a file or its folder. plan: a file
    with the sizes of the mesh, or tensor_parallel_size and expert_parallel_size: devices that share heads and widths,
    and experts; data_parallel_size: groups of them with requests of their own, which share experts.
    coordinator, num_hosts, host_id: HOST:PORT of host 0, how many hosts run the model together, and which of them this
    is; host_timeout: seconds to wait for the others.
    """

    model: str
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"
    threads: int | None = None
    kernels: KernelChoice = "auto"
    cpu_level: CpuLevel = "auto"
    expand_weights: ExpandWeights = "auto"
    plan: str | None = None
    tensor_parallel_size: int | None = None
    expert_parallel_size: int | None = None
    data_parallel_size: int | None = None
    coordinator: str | None = None
    num_hosts: int | None = None
    host_id: int | None = None
    host_timeout: int = 60
    seed: int = 0
    enable_prefix_caching: bool = True
    overlap: bool = True
    deterministic: bool = False
    max_waiting: int = 1024
    chat_template: str | None = None
    generation_config: str = "auto"
    cache_dir: Path | None = None
    compilation_cache_dir: Path | None = None

    def __post_init__(self) -> None:
        for name in ("model", "generation_config"):
            object.__setattr__(self, name, os.fspath(getattr(self, name)))
        for name in _PATHS:  # text is as good as a Path, from a notebook
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, Path(value))
        for name, low in _MINIMUMS:
            value = getattr(self, name)
            if value is None and getattr(EngineConfig, name) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ConfigError(f"{_flag(name)} must be an integer of at least {low}, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"--seed must be an integer, got {self.seed!r}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{_flag(name)} must be true or false, got {getattr(self, name)!r}")
        for name, allowed in _CHOICES:
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{_flag(name)} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        self._check_hosts()
        if self.plan is not None and (
            self.tensor_parallel_size or self.expert_parallel_size or self.data_parallel_size
        ):
            raise ConfigError(f"--plan {self.plan} states the sizes of the mesh: leave the parallel sizes out")
        if self.plan is not None and self.plan not in PLAN_NAMES and not Path(self.plan).is_file():
            known = ", ".join(PLAN_NAMES)
            raise ConfigError(f"--plan {self.plan}: neither {known} nor a TOML file with a table [mesh]")

    def _check_hosts(self) -> None:
        if self.coordinator is None and self.num_hosts is None and self.host_id is None:
            return
        if self.coordinator is None or self.num_hosts is None or self.host_id is None:
            raise ConfigError("--coordinator HOST:PORT, --num-hosts N and --host-id I belong together")
        if self.host_id >= self.num_hosts:
            raise ConfigError(f"--host-id {self.host_id}: ids of --num-hosts {self.num_hosts} go from 0 to one less")

    @classmethod
    def names(cls) -> frozenset[str]:
        """The option names a caller may pass."""
        return frozenset(f.name for f in fields(cls))


_MINIMUMS = (
    ("max_model_len", 2),  # one token of prompt, one to generate
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("page_size", 1),
    ("num_pages", 1),
    ("kv_cache_memory_bytes", 1),
    ("threads", 1),
    ("max_waiting", 1),
    ("tensor_parallel_size", 1),
    ("expert_parallel_size", 1),
    ("data_parallel_size", 1),
    ("num_hosts", 1),
    ("host_id", 0),
    ("host_timeout", 1),
)
_SWITCHES = ("enable_prefix_caching", "overlap", "deterministic")
PLAN_NAMES = ("tensor", "expert", "data")  # sharding.plan.PRESETS, which is not imported: it brings jax along
_PATHS = ("cache_dir", "compilation_cache_dir")
_CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dtype", ("auto", "float32", "bfloat16")),
    ("kv_cache_dtype", ("auto", "float32", "bfloat16", "int8")),
    ("kernels", ("auto", "reference", "xla", "cpu")),
    ("cpu_level", ("auto", "avx512vnni", "avx512", "avx2", "generic")),
    ("expand_weights", ("auto", "always", "never")),
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the effective configuration: what was decided and why."""

    value: Any
    reason: str
