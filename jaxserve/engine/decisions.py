"""What an engine's options come to on this machine, and why: every choice is recorded with its reason as it is made."""

import os
from typing import Any, Literal

import jax

from jaxserve.config import Choice, EngineConfig
from jaxserve.engine.buckets import MAX_PREFILLS, check_limits, step_shapes
from jaxserve.engine.cpu_choice import (
    CpuKernelsUnavailable,
    KernelNeeds,
    available_cpu_kernels,
    default_cpu_kernels,
    origins_line,
)
from jaxserve.engine.host_memory import keep_freed_memory, unmap_unused_code
from jaxserve.engine.loading import FormatsToMultiply, LoadedModel, Recipe, tiled_bytes
from jaxserve.engine.memory import PageBudget, page_budget
from jaxserve.engine.progress import Progress
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import CacheSpec, cache_spec, cache_window
from jaxserve.layer_groups import LayerGroups, layer_groups
from jaxserve.scheduler.page_need import SequenceNeed, page_need, sequence_need
from jaxserve.step_inputs import StepShape
from pallas_kernels.kernels import Kernels, cpu_kernels, kernels_for
from sharding.plan import MESH_AXES, ShardingPlan, named_plan

CPU_LIMITS = (32, 512)  # max_num_seqs, max_num_batched_tokens where computing, not reading, is scarce
ACCELERATOR_LIMITS = (256, 2048)

Layout = Literal["packed", "expanded", "tiled"]


class Decisions:
    """Decides one thing after another; `choices` is the effective configuration so far.

    Raises ConfigError for what cannot work. The methods are called in the order in which they are written here.
    """

    def __init__(self, config: EngineConfig, device: Any) -> None:
        self.config = config
        self.device = device
        self.is_cpu = device.platform == "cpu"
        self._is_spread = False
        self.choices: dict[str, Choice] = {}
        self._note("device", f"{device.platform} ({device.device_kind})", "first device of jax's default platform")
        for name, reason in _AS_GIVEN:
            self._note(name, getattr(config, name), reason)

    def _note[T](self, name: str, value: T, reason: str) -> T:
        self.choices[name] = Choice(value, reason)
        return value

    def plan(self) -> ShardingPlan | None:
        """Over which devices the model is spread; None for one."""
        config = self.config
        try:
            if config.plan is not None:
                plan, reason = named_plan(config.plan, len(jax.devices())), f"--plan {config.plan}"
            else:
                plan = ShardingPlan(
                    tensor=config.tensor_parallel_size or 1,
                    expert=config.expert_parallel_size or 1,
                    data=config.data_parallel_size or 1,
                )
                reason = ", ".join(f"--{a}-parallel-size" for a in MESH_AXES if plan.mesh_size(a) > 1) or "default"
        except (OSError, ValueError) as error:
            raise ConfigError(f"--plan {config.plan}: {error}") from error
        num_devices = len(jax.devices())
        if plan.num_devices > num_devices:
            raise ConfigError(
                f"{plan} needs {plan.num_devices} devices and jax sees {num_devices}; on a CPU "
                f"XLA_FLAGS=--xla_force_host_platform_device_count={plan.num_devices} makes virtual ones"
            )
        if jax.process_count() > 1 and plan.num_devices != num_devices:
            raise ConfigError(
                f"{plan} has {plan.num_devices} devices and the {jax.process_count()} hosts have {num_devices}: "
                "a plan over several hosts must use them all"
            )
        if plan.num_devices == 1:
            self._note("plan", "one device", reason)
            return None
        self._is_spread = True
        each = (
            "" if plan.data == 1 else f"; pages, sequences and tokens of a step are those of each of {plan.data} groups"
        )
        self._note("plan", str(plan), reason + each)
        return plan

    def kernels(self) -> Kernels:
        """The implementation of every op; where the CPU kernels are to be tried, of those that need no compiler."""
        self._check_cpu_options()
        name, default = self.config.kernels, default_cpu_kernels()
        if name == "auto" and self.is_cpu and default == "reference":
            name = default
        kernels, reason = kernels_for("xla" if name == "cpu" else name, self.device.platform)
        try:
            kernels.check_page_size(self.config.page_size)
        except ValueError as error:
            raise ConfigError(f"--page-size {self.config.page_size}: {error}") from error
        self._note("kernels", kernels.name, reason)
        return kernels

    def _check_cpu_options(self) -> None:
        config = self.config
        if config.kernels == "cpu" and not self.is_cpu:
            raise ConfigError(f"--kernels cpu: the device is {self.device.platform}; leave it out, or choose xla")
        if config.kernels == "cpu" and self._is_spread:
            raise ConfigError("--kernels cpu: they serve one device; choose xla, or leave the plan out")
        if config.kernels == "cpu" and not self._suits_cpu_kernels:
            raise ConfigError("--kernels cpu reads packed weights and computes in float32: leave the others out")
        if config.cpu_level != "auto" and (config.kernels in ("xla", "reference") or not self.is_cpu):
            raise ConfigError(f"--cpu-level {config.cpu_level} is for --kernels cpu: leave one of them out")

    @property
    def _suits_cpu_kernels(self) -> bool:
        packed_float32 = self.config.expand_weights == "auto" and self.config.dtype in ("auto", "float32")
        return packed_float32 and not self._is_spread

    def limits(self) -> tuple[int, int]:
        """max_num_seqs and max_num_batched_tokens; one that was not given makes room for one that was."""
        config, reason = self.config, f"default on {self.device.platform}"
        default_seqs, default_tokens = CPU_LIMITS if self.is_cpu else ACCELERATOR_LIMITS
        num_seqs = config.max_num_seqs or min(default_seqs, config.max_num_batched_tokens or default_seqs)
        num_tokens = config.max_num_batched_tokens or max(default_tokens, num_seqs)
        check_limits(num_seqs, num_tokens)
        self._note("max_num_seqs", num_seqs, "--max-num-seqs" if config.max_num_seqs else reason)
        given = "--max-num-batched-tokens" if config.max_num_batched_tokens else reason
        return num_seqs, self._note("max_num_batched_tokens", num_tokens, given)

    @property
    def tries_cpu_kernels(self) -> bool:
        """Whether they were named, or are the default here and nothing was chosen that they cannot do."""
        is_default = self.config.kernels == "auto" and self.is_cpu and default_cpu_kernels() == "cpu"
        return self.config.kernels == "cpu" or (is_default and self._suits_cpu_kernels)

    def cpu_kernels(self, formats: FormatsToMultiply, model: Any, progress: Progress) -> Kernels | None:
        """The CPU kernels for the formats that a model's file holds, tested; None where the default goes back to XLA,
        which is said."""
        named = self.config.kernels == "cpu"
        if not named and not formats.single:
            self._note("kernels", "xla", "the model has no packed weights in a format of the CPU kernels")
            return None
        folder = self.config.compilation_cache_dir or self.config.cache_dir
        level = None if self.config.cpu_level == "auto" else self.config.cpu_level
        cache_dtype = "float32" if self.config.kv_cache_dtype == "auto" else self.config.kv_cache_dtype
        needs = KernelNeeds(
            formats=formats.single, expert_formats=formats.experts, cache=self._geometry(model, cache_dtype)
        )
        try:
            targets = available_cpu_kernels(needs, folder, level, progress)
        except ValueError as error:
            raise ConfigError(f"--cpu-level: {error}") from error
        except CpuKernelsUnavailable as lack:
            if named:
                raise ConfigError(f"--kernels cpu: {lack}; choose xla") from lack
            progress.note(lack.fallback_line)
            self._note("kernels", "xla", "the CPU kernels cannot be had here")
            self._note("kernel_fallback", lack.lack, str(lack))
            return None
        built = ", ".join(sorted(formats.single | formats.experts)) or "no format"
        reason = f"{built} ({origins_line(targets) or 'none'})"
        if (formats.single | formats.experts) - {"F32", "F16", "BF16"}:
            reason += "; activations are rounded to 8 bits, as llama.cpp does"
        self._note("kernels", "cpu", reason)
        self._note("cpu_level", targets.level, "the best this CPU has" if level is None else "--cpu-level")
        return cpu_kernels(targets)

    def recipe(self) -> Recipe:
        """What becomes of the weights at load."""
        dtype, reason = self.config.dtype, "--dtype"
        if dtype == "auto":
            dtype, reason = "float32" if self.is_cpu else "bfloat16", f"activations on {self.device.platform}"
        self._note("dtype", dtype, reason)
        layouts: dict[str, tuple[Layout, str]] = {
            "always": ("expanded", "--expand-weights"),
            "never": ("packed", "--expand-weights"),
            "auto": ("expanded", "XLA:CPU would decode packed weights in every step"),
        }
        layout, reason = layouts[self.config.expand_weights]
        if self.config.expand_weights == "auto" and not self.is_cpu:
            layout, reason = "packed", "weights stay in their format"
        if self.choices["kernels"].value == "cpu":
            layout, reason = "tiled", "the CPU kernels read packed weights, sixteen outputs side by side"
        return Recipe(layout=self._note("weight_layout", layout, reason), dtype=dtype)

    def weights(self, loaded: LoadedModel) -> None:
        """Records what the weights take."""
        in_file = ", ".join(f"{name} {size:,} bytes" for name, size in sorted(loaded.file_bytes.items()))
        reason = f"as in the file ({in_file})"
        if self.choices["weight_layout"].value == "tiled":
            in_tiles = f"{tiled_bytes(loaded):,} bytes in tiles for the CPU kernels"
            reason = f"{in_tiles}, the others packed or in float32 ({in_file})"
        if loaded.is_expanded:
            dtype = self.choices["dtype"].value
            reason = f"expanded to {dtype} from {sum(loaded.file_bytes.values()):,} bytes ({in_file})"
        self._note("weights", f"{loaded.held_bytes:,} bytes", reason)
        if loaded.notes:
            self._note("activations", "not rounded", "; ".join(loaded.notes))

    def wanted_len(self, model: Any) -> int:
        """The context asked for: the model's unless a shorter one is given."""
        wanted = self.config.max_model_len or model.max_position
        if wanted > model.max_position:
            raise ConfigError(
                f"--max-model-len {wanted:,} exceeds the {model.max_position:,} positions the model was made for"
            )
        return wanted

    def groups(self, model: Any, num_tokens: int, wanted_len: int) -> LayerGroups | None:
        """The groups of layers that have a page table each; None where all share one."""
        windows, page_size = getattr(model, "windows", ()), self.config.page_size
        if not any(windows):
            return None
        need = page_need(max(window or 0 for window in windows), page_size, num_tokens)
        return layer_groups(windows, page_size, need.most, -(-wanted_len // page_size))

    def cache_spec(self, model: Any, groups: LayerGroups | None = None) -> CacheSpec:
        """Geometry and type of the KV cache."""
        dtype, reason = self._cache_dtype()
        return self._geometry(model, self._note("kv_cache_dtype", dtype, reason), groups)

    def _geometry(self, model: Any, dtype: str, groups: LayerGroups | None = None) -> CacheSpec:
        try:
            layers_per_page = groups and groups.layers_per_group
            return cache_spec(model, self.config.page_size, dtype, layers_per_page, platform=self.device.platform)
        except ValueError as error:
            raise ConfigError(f"--kv-cache-dtype {dtype}: {error}") from error

    def _cache_dtype(self) -> tuple[str, str]:
        if self.config.kv_cache_dtype == "auto":
            return self.choices["dtype"].value, "the activations' type"
        return self.config.kv_cache_dtype, "--kv-cache-dtype"

    def shapes(
        self, num_seqs: int, num_tokens: int, max_model_len: int, groups: LayerGroups | None
    ) -> tuple[StepShape, ...]:
        """The closed list of step shapes."""
        shapes = step_shapes(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
            max_prefills=MAX_PREFILLS,
            max_pages=-(-max_model_len // self.config.page_size),
            deterministic=self.config.deterministic,
            groups=groups,
        )
        self._note("step_shapes", [str(shape) for shape in shapes], "every step is padded to one of these")
        return shapes

    def page_need(
        self, model: Any, spec: CacheSpec, groups: LayerGroups | None, num_tokens: int, wanted_len: int
    ) -> SequenceNeed:
        """What one sequence needs of the pages; of a model without any window nothing is said."""
        window, windows, page_size = cache_window(model), getattr(model, "windows", ()), self.config.page_size
        if groups is not None:
            tables = (groups.num_full, groups.num_windowed)
            need = sequence_need(groups.window, page_size, num_tokens, tables)
            freed = f"pages that left the window of {groups.window:,} tokens are freed"
            in_layers = f"in {groups.num_windowed_layers} of {len(windows)} layers"
            self._note("window", f"{freed} {in_layers}", _saving(need, spec, groups, wanted_len))
            return need
        if window is not None and window < wanted_len:
            freed = f"pages that left the window of {window:,} tokens are freed"
            self._note("window", freed, "no layer sees further back")
            return sequence_need(window, page_size, num_tokens)
        if window is not None:
            self._note("window", "all pages are kept", f"{window:,} tokens, no less than max_model_len")
        elif any(windows):
            some = f"{windows.count(None)} of {len(windows)} layers have no window"
            reason = f"{some}, and {wanted_len:,} tokens would take hardly less with pages of their own for these"
            self._note("window", "all pages are kept", reason)
        return sequence_need(None, page_size, num_tokens)

    def pages(
        self, spec: CacheSpec, need: SequenceNeed, num_seqs: int, wanted_len: int, free: tuple[int, str]
    ) -> tuple[PageBudget, int]:
        """The pages, and max_model_len: what was asked for, or as far as the pages reach."""
        budget = page_budget(
            page_bytes=spec.page_bytes,
            wanted_pages=num_seqs * need.of_tokens(wanted_len),
            num_pages=self.config.num_pages,
            memory_bytes=self.config.kv_cache_memory_bytes,
            free=free,
            total_bytes=device_memory_bytes(self.device),
            column_pages=need.num_tables,
        )
        reach = need.longest(budget.num_pages, wanted_len, in_chunks=not self.config.max_model_len)
        if wanted_len > reach and self.config.max_model_len:
            raise ConfigError(
                f"--max-model-len {wanted_len:,} needs {need.least_for(wanted_len):,} KV pages and there are "
                f"{budget.num_pages:,} ({budget.reason}); lower it to {reach:,} or give the cache more memory"
            )
        reason = "--max-model-len" if self.config.max_model_len else "the model's"
        max_model_len = self._note("max_model_len", reach, reason if wanted_len <= reach else "what the KV pages hold")
        size = f"{budget.num_pages:,} pages, {budget.num_bytes:,} bytes"
        in_groups = "" if need.num_tables == 1 else f"; a token takes {need.num_tables} at first, one for each group"
        self._note("kv_pages", size, f"{budget.reason}{in_groups}")
        return budget, max_model_len

    def host_memory(self, huge_page_bytes: int) -> None:
        """Settles how a CPU's memory is kept once all is loaded: how much of the cache lies in huge pages, that code of
        the start alone is let go, and that freed buffers stay with the process."""
        if not self.is_cpu:
            return
        reason = "fewer address translations" if huge_page_bytes else "too small, or the system has none"
        self._note("huge_pages", f"{huge_page_bytes:,} bytes of the cache", reason)
        unmap_unused_code()
        kept = keep_freed_memory()
        reason = "or large temporary buffers would fault page by page" if kept else "this C library cannot keep it"
        self._note("freed_memory", "kept by the process" if kept else "given back", reason)


def _saving(need: SequenceNeed, spec: CacheSpec, groups: LayerGroups, wanted_len: int) -> str:
    """What groups of layers save, in words."""
    num_pages, per_page = -(-wanted_len // need.page_size), spec.page_bytes
    assert need.windowed is not None
    held = groups.num_full * num_pages + groups.num_windowed * min(num_pages, need.windowed.least + 1)
    together = num_pages * per_page * len(groups.places) // groups.layers_per_group
    return (
        f"{groups.num_groups} groups of up to {groups.layers_per_group} layers have a page table each; {wanted_len:,} "
        f"tokens hold {held * per_page:,} bytes while more are generated, instead of {together:,}"
    )


_AS_GIVEN = (
    ("page_size", "tokens per KV page, as given or by default"),
    ("overlap", "whether the next step is dispatched before the last one's tokens are read"),
    ("deterministic", "whether logits are bit-identical in every batch"),
    ("enable_prefix_caching", "whether computed prefixes are reused"),
    ("seed", "for requests that name none"),
)


def device_memory_bytes(device: Any) -> int:
    """Memory of the device; of the machine where the device does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def first_device() -> Any:
    """The first device of this host."""
    return jax.local_devices()[0]
