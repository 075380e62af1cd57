"""From the user's choices to a running engine, and the record of every choice with its reason."""

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from checkpoints.errors import CheckpointError
from jaxserve.config import Choice, EngineConfig
from jaxserve.engine.arrays import put
from jaxserve.engine.buckets import MAX_PREFILLS
from jaxserve.engine.data_groups import GroupSchedulers, GroupsEngine, GroupsExecutor
from jaxserve.engine.decisions import CPU_LIMITS, Decisions, device_memory_bytes, first_device
from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import DeviceExecutor, step_temp_bytes, to_nobody
from jaxserve.engine.experts import first_placement, layers_with_experts, with_tables
from jaxserve.engine.host_memory import prepare_allocator
from jaxserve.engine.hosts import Follower, HostOptions, Leader, join
from jaxserve.engine.loading import LoadedModel, cpu_kernel_needs, load_model, logits_bytes, model_config
from jaxserve.engine.memory import spare_bytes
from jaxserve.engine.program_cache import ProgramCache
from jaxserve.engine.progress import Progress
from jaxserve.engine.spread import spread_over
from jaxserve.engine.step import Program
from jaxserve.engine.threads import settle_threads
from jaxserve.errors import ConfigError
from jaxserve.kv_cache import CacheSpec
from jaxserve.layers.stack import stack_layers
from jaxserve.scheduler import Scheduler
from jaxserve.scheduler.page_need import SequenceNeed
from jaxserve.step_inputs import StepShape
from pallas_kernels.kernels import Kernels
from sharding.plan import ShardingPlan


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """An engine that is ready, with what is known about it. num_pages: of each data group; max_num_seqs: of all."""

    engine: Engine
    executor: DeviceExecutor
    loaded: LoadedModel
    choices: dict[str, Choice]
    max_model_len: int
    hosts: Leader | Follower | None
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    seconds: float


def build_engine(
    config: EngineConfig, path: Path, eos_token_ids: frozenset[int], progress: Progress, *, warm_up: bool
) -> BuiltEngine:
    """Loads, sizes the cache and, if warm_up, compiles every step shape.

    Raises ConfigError for choices that cannot work, before anything is loaded where that can be known.
    """
    start, hosts = time.perf_counter(), _other_hosts(config)
    use_compilation_cache(config.compilation_cache_dir)
    prepare_allocator(logits_bytes(path, config.max_num_seqs or CPU_LIMITS[0]))
    threads = settle_threads(config.threads)
    decisions = Decisions(config, first_device())
    decisions.choices |= {"threads": threads, "model": Choice(str(path), f"found for {config.model}")}
    plan, kernels = decisions.plan(), decisions.kernels()
    num_seqs, num_tokens = decisions.limits()
    if decisions.tries_cpu_kernels:  # before the load: it lays the weights out for the kernels that will read them
        kernels = decisions.cpu_kernels(*cpu_kernel_needs(path), progress) or kernels
    program, loaded = _loaded(decisions, plan, path, kernels, progress)
    wanted_len = decisions.wanted_len(loaded.config)
    groups = decisions.groups(loaded.config, num_tokens, wanted_len)
    spec = decisions.cache_spec(program.config, groups)
    free = _free_bytes(decisions, program, loaded, spec, decisions.shapes(num_seqs, num_tokens, wanted_len, groups)[-1])
    need = decisions.page_need(loaded.config, spec, groups, num_tokens, wanted_len)
    budget, max_model_len = decisions.pages(spec, need, num_seqs, wanted_len, free)
    num_pages, max_model_len = _agreed(hosts, budget.num_pages, max_model_len)
    executor = (DeviceExecutor if program.num_groups == 1 else GroupsExecutor)(
        program=program.for_context(max_model_len),
        params=loaded.params,
        shapes=decisions.shapes(num_seqs, num_tokens, max_model_len, groups),
        cache_spec=spec,
        num_pages=num_pages,
        num_slots=num_seqs,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        program_cache=_program_cache(config.compilation_cache_dir, plan, progress),
        tell=hosts.tell if isinstance(hosts, Leader) else to_nobody,
    )
    if warm_up:
        executor.compile_all(progress)
    decisions.host_memory(executor.huge_page_bytes)
    schedulers = [
        _scheduler(config, num_pages, (num_seqs, num_tokens), max_model_len, need) for _ in range(program.num_groups)
    ]
    return BuiltEngine(
        engine=_engine(config, schedulers, executor),
        executor=executor,
        loaded=loaded,
        choices=decisions.choices,
        max_model_len=max_model_len,
        hosts=hosts,
        max_num_seqs=num_seqs * program.num_groups,
        max_num_batched_tokens=num_tokens,
        page_size=config.page_size,
        num_pages=num_pages,
        seconds=time.perf_counter() - start,
    )


def _other_hosts(config: EngineConfig) -> Leader | Follower | None:
    """The connections to other hosts, once all are there; before anything asks JAX for devices."""
    if config.coordinator is None or config.num_hosts is None or config.host_id is None or config.num_hosts == 1:
        return None
    own = {"host_id", "model", "cache_dir", "compilation_cache_dir", "threads", "coordinator", "chat_template", "plan"}
    agreement = {name: getattr(config, name) for name in EngineConfig.names() - own}
    options = HostOptions(
        coordinator=config.coordinator,
        num_hosts=config.num_hosts,
        host_id=config.host_id,
        timeout_seconds=float(config.host_timeout),
    )
    return join(options, agreement)


def _agreed(hosts: Leader | Follower | None, num_pages: int, max_model_len: int) -> tuple[int, int]:
    """What host 0 made of its memory, for all."""
    if isinstance(hosts, Leader):
        hosts.tell("sizes", np.array([num_pages, max_model_len]))
    elif isinstance(hosts, Follower):
        num_pages, max_model_len = map(int, hosts.told("sizes")[0])
    return num_pages, max_model_len


def _loaded(
    decisions: Decisions, plan: ShardingPlan | None, path: Path, kernels: Kernels, progress: Progress
) -> tuple[Program, LoadedModel]:
    """The model with its weights where it will run, on the devices of a plan if there is one, and the program."""
    recipe = decisions.recipe()
    if plan is None:
        loaded = load_model(path, recipe, progress)
        program = Program(model=loaded.model, config=loaded.config, kernels=kernels, dtype=recipe.dtype)
    else:
        try:
            over = spread_over(plan, model_config(path), jax.devices())
            loaded = load_model(path, recipe, progress, over.placement)
        except CheckpointError:
            raise
        except ValueError as error:
            raise ConfigError(f"{plan}: {error}") from error
        if layers_with_experts(over.config):
            put_everywhere = partial(put, sharding=over.everywhere)
            params = with_tables(loaded.params, first_placement(over.config, plan), put_everywhere)
            loaded = dataclasses.replace(loaded, params=params)
        over = over.with_params(loaded.params)
        program = Program(model=loaded.model, config=over.config, kernels=kernels, dtype=recipe.dtype, spread=over)
    if not decisions.is_cpu:
        stacked = {**loaded.params, "layers": stack_layers(loaded.params["layers"])}
        loaded, program = dataclasses.replace(loaded, params=stacked), program.with_params(stacked)
    decisions.weights(loaded)
    return program, loaded


def _engine(config: EngineConfig, schedulers: list[Scheduler], executor: DeviceExecutor) -> Engine:
    if isinstance(executor, GroupsExecutor):
        return GroupsEngine(GroupSchedulers(schedulers), executor, overlap=config.overlap, seed=config.seed)
    return Engine(schedulers[0], executor, overlap=config.overlap, seed=config.seed)


def _scheduler(
    config: EngineConfig, num_pages: int, limits: tuple[int, int], max_model_len: int, need: SequenceNeed
) -> Scheduler:
    return Scheduler(
        num_pages=num_pages,
        page_size=config.page_size,
        max_num_seqs=limits[0],
        max_num_batched_tokens=limits[1],
        max_model_len=max_model_len,
        max_prefills_per_step=MAX_PREFILLS,
        enable_prefix_caching=config.enable_prefix_caching,
        window=None if need.windowed is None else need.windowed.window,
        tables=(need.num_full_tables, need.num_windowed_tables),
    )


def use_compilation_cache(folder: Path | None) -> None:
    """Turns on JAX's persistent cache for every program, however small."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if jax.config.jax_compilation_cache_dir != str(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        compilation_cache.reset_cache()  # JAX stays with the first folder it wrote to otherwise
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _program_cache(folder: Path | None, plan: ShardingPlan | None, progress: Progress) -> ProgramCache | None:
    """The finished programs beside XLA's own cache; None where there is none, or JAX was told to use none.

    On a single CPU device only: that what other devices load again does what was compiled has not been tried, and XLA
    ends the process that loads a program of some devices where there are more.
    """
    if (
        folder is None
        or plan is not None
        or not jax.config.jax_enable_compilation_cache
        or jax.default_backend() != "cpu"
    ):
        return None
    return ProgramCache(folder / "programs", progress.note)


def _free_bytes(
    decisions: Decisions, program: Program, loaded: LoadedModel, spec: CacheSpec, largest: StepShape
) -> tuple[int, str]:
    """What the cache may take. On an accelerator the largest step is compiled once to learn its temporary bytes."""
    temp_bytes = 0
    if not decisions.is_cpu and decisions.config.num_pages is None:
        temp_bytes = step_temp_bytes(program, loaded.params, largest, spec)
    spare, reason = spare_bytes(decisions.device, temp_bytes, device_memory_bytes(decisions.device))
    if decisions.is_cpu and program.num_groups > 1:  # whose pages lie in one memory
        return spare // program.num_groups, f"{reason}, shared by {program.num_groups} data groups"
    return spare, reason
