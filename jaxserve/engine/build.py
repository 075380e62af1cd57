"""From the user's choices to a running engine, and the record of every choice with its reason."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.config import Choice, EngineConfig
from jaxserve.engine.buckets import MAX_PREFILLS, check_limits, step_shapes
from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import DeviceExecutor
from jaxserve.engine.loading import LoadedModel, Recipe, load_model
from jaxserve.engine.memory import PageBudget, page_budget, spare_bytes
from jaxserve.engine.progress import Progress
from jaxserve.engine.step import Program
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import KVCacheSpec
from jaxserve.layers.stack import stack_layers
from jaxserve.scheduler import Scheduler
from pallas_kernels.kernels import Kernels, kernels_for

CPU_LIMITS = (32, 512)  # max_num_seqs, max_num_batched_tokens where computing, not reading, is scarce
ACCELERATOR_LIMITS = (256, 2048)


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine that is ready, with what is known about it."""

    engine: Engine
    executor: DeviceExecutor
    loaded: LoadedModel
    choices: dict[str, Choice]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Device:
    device: Any  # a jax.Device
    is_cpu: bool

    @property
    def kind(self) -> str:
        return f"{self.device.platform} ({self.device.device_kind})"


def build_engine(
    config: EngineConfig, path: Path, eos_token_ids: frozenset[int], progress: Progress, *, warm_up: bool
) -> BuiltEngine:
    """Loads, sizes the cache and, if warm_up, compiles every step shape.

    Raises ConfigError for choices that cannot work, before anything is loaded where that can be known.
    """
    start = time.perf_counter()
    use_compilation_cache(config.compilation_cache_dir)
    device = _Device(device=jax.devices()[0], is_cpu=jax.devices()[0].platform == "cpu")
    choices: dict[str, Choice] = {"model": Choice(str(path), f"--model {config.model}")}
    choices["device"] = Choice(device.kind, "first device of jax's default platform")
    kernels = _kernels(config, device, choices)
    recipe = _recipe(config, device, choices)
    limits = _limits(config, device, choices)
    loaded = load_model(path, recipe, progress)
    if not device.is_cpu:
        loaded.params["layers"] = stack_layers(loaded.params["layers"])
    _describe_weights(loaded, recipe, choices)
    executor, max_model_len, num_pages = _executor(
        config, loaded, kernels, recipe, limits, device, eos_token_ids, choices
    )
    if warm_up:
        executor.compile_all(progress)
    scheduler = Scheduler(
        num_pages=num_pages,
        page_size=config.page_size,
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        max_model_len=max_model_len,
        max_prefills_per_step=MAX_PREFILLS,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    return BuiltEngine(
        engine=Engine(scheduler, executor, overlap=config.overlap, seed=config.seed),
        executor=executor,
        loaded=loaded,
        choices=choices,
        max_model_len=max_model_len,
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        page_size=config.page_size,
        num_pages=num_pages,
        seconds=time.perf_counter() - start,
    )


def use_compilation_cache(folder: Path | None) -> None:
    """Turns on JAX's persistent cache for every program, however small."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _kernels(config: EngineConfig, device: _Device, choices: dict[str, Choice]) -> Kernels:
    kernels, reason = kernels_for(config.kernels, device.device.platform)
    try:
        kernels.check_page_size(config.page_size)
    except ValueError as error:
        raise ConfigError(f"--page-size {config.page_size}: {error}") from error
    choices["kernels"] = Choice(kernels.name, reason)
    choices["page_size"] = Choice(config.page_size, "as given, or the default of 16 tokens")
    return kernels


def _recipe(config: EngineConfig, device: _Device, choices: dict[str, Choice]) -> Recipe:
    if config.dtype == "auto":
        dtype = "float32" if device.is_cpu else "bfloat16"
        choices["dtype"] = Choice(dtype, f"activations on {device.device.platform}")
    else:
        dtype = config.dtype
        choices["dtype"] = Choice(dtype, "--dtype")
    if config.expand_weights == "auto":
        expand = device.is_cpu
        reason = "XLA:CPU would decode packed weights in every step" if expand else "weights stay in their format"
    else:
        expand, reason = config.expand_weights == "always", "--expand-weights"
    choices["expand_weights"] = Choice(expand, reason)
    return Recipe(expand=expand, dtype=dtype)


def _limits(config: EngineConfig, device: _Device, choices: dict[str, Choice]) -> tuple[int, int]:
    defaults = CPU_LIMITS if device.is_cpu else ACCELERATOR_LIMITS
    reason = f"default on {device.device.platform}"
    num_seqs = config.max_num_seqs or defaults[0]
    tokens = config.max_num_batched_tokens or max(defaults[1], num_seqs)
    check_limits(num_seqs, tokens)
    choices["max_num_seqs"] = Choice(num_seqs, "--max-num-seqs" if config.max_num_seqs else reason)
    choices["max_num_batched_tokens"] = Choice(
        tokens, "--max-num-batched-tokens" if config.max_num_batched_tokens else reason
    )
    return num_seqs, tokens


def _describe_weights(loaded: LoadedModel, recipe: Recipe, choices: dict[str, Choice]) -> None:
    in_file = ", ".join(f"{name} {size:,} bytes" for name, size in sorted(loaded.file_bytes.items()))
    if loaded.is_expanded:
        reason = f"expanded to {recipe.dtype} from {sum(loaded.file_bytes.values()):,} bytes ({in_file})"
    else:
        reason = f"as in the file ({in_file})"
    choices["weights"] = Choice(f"{loaded.held_bytes:,} bytes", reason)


def _executor(
    config: EngineConfig,
    loaded: LoadedModel,
    kernels: Kernels,
    recipe: Recipe,
    limits: tuple[int, int],
    device: _Device,
    eos_token_ids: frozenset[int],
    choices: dict[str, Choice],
) -> tuple[DeviceExecutor, int, int]:
    spec = _cache_spec(config, loaded.config, device, choices)
    budget, max_model_len = _sizes(config, loaded.config, spec, limits, device, choices)
    shapes = step_shapes(
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        max_prefills=MAX_PREFILLS,
        max_pages=-(-max_model_len // spec.page_size),
        deterministic=config.deterministic,
    )
    choices["step_shapes"] = Choice([str(shape) for shape in shapes], "compiled before the first request")
    choices["overlap"] = Choice(config.overlap, "the next step is dispatched before the last one's tokens are read")
    choices["deterministic"] = Choice(config.deterministic, "bit-identical logits in every batch if true")
    choices["enable_prefix_caching"] = Choice(config.enable_prefix_caching, "computed prefixes are reused")
    choices["seed"] = Choice(config.seed, "for requests that name none")
    executor = DeviceExecutor(
        program=Program(model=loaded.model, config=loaded.config, kernels=kernels, dtype=recipe.dtype),
        params=loaded.params,
        shapes=shapes,
        cache_spec=spec,
        num_pages=budget.num_pages,
        num_slots=limits[0],
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
    )
    return executor, max_model_len, budget.num_pages


def _cache_spec(config: EngineConfig, model: Any, device: _Device, choices: dict[str, Choice]) -> KVCacheSpec:
    dtype, reason = config.kv_cache_dtype, "--kv-cache-dtype"
    if dtype == "auto":
        dtype, reason = choices["dtype"].value, "the activations' type"
    choices["kv_cache_dtype"] = Choice(dtype, reason)
    return KVCacheSpec(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        page_size=config.page_size,
        dtype=dtype,
    )


def _sizes(
    config: EngineConfig,
    model: Any,
    spec: KVCacheSpec,
    limits: tuple[int, int],
    device: _Device,
    choices: dict[str, Choice],
) -> tuple[PageBudget, int]:
    """Page budget and max_model_len: the model's, unless given, or as far as the pages reach."""
    wanted_len = config.max_model_len or model.max_position
    if wanted_len > model.max_position:
        raise ConfigError(
            f"--max-model-len {wanted_len:,} exceeds the {model.max_position:,} positions the model was made for"
        )
    budget = page_budget(
        page_bytes=spec.page_bytes,
        wanted_pages=limits[0] * -(-wanted_len // spec.page_size),
        num_pages=config.num_pages,
        memory_bytes=config.kv_cache_memory_bytes,
        free=spare_bytes(device.device, 0, host_memory_bytes()),
    )
    reach = budget.num_pages * spec.page_size
    if wanted_len > reach and config.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted_len:,} needs {-(-wanted_len // spec.page_size):,} KV pages and there are "
            f"{budget.num_pages:,} ({budget.reason}); lower it to {reach:,} or give the cache more memory"
        )
    max_model_len = min(wanted_len, reach)
    reason = "--max-model-len" if config.max_model_len else "the model's"
    choices["max_model_len"] = Choice(max_model_len, reason if max_model_len == wanted_len else "what the pages hold")
    choices["kv_pages"] = Choice(f"{budget.num_pages:,} pages, {budget.num_bytes:,} bytes", budget.reason)
    return budget, max_model_len


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
