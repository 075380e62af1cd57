"""How fast jaxserve is beside other engines on one file: rounds in which all take turns, ratios round by round."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.load import is_gguf
from jaxserve.bench.errors import BenchmarkFailed
from jaxserve.bench.machine import usable_cores
from jaxserve.bench.peers.bandwidth import ReadBandwidth, bytes_per_decode_step
from jaxserve.bench.peers.engines import OWN, EngineCommand, EngineProcess, EngineUnusable, own_command
from jaxserve.bench.peers.results import Measurements, peers_report
from jaxserve.bench.peers.rounds import Contestant, ForeignLoad, all_work, rotated, turn
from jaxserve.bench.report import Report
from jaxserve.engine.progress import Progress
from jaxserve.errors import ConfigError

DECODE_PROMPT = 16


@dataclass(frozen=True, kw_only=True)
class PeersSetup:
    """What is measured. options: fields of EngineConfig for jaxserve, without the model. Raises ConfigError for
    numbers that cannot work."""

    num_rounds: int = 5
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 512
    decode_tokens: int = 64
    num_threads: int = field(default_factory=usable_cores)
    seed: int = 0
    timeout_seconds: float = 600.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) < len(self.batch_sizes):
            raise ConfigError(f"--batch-sizes must be different numbers of at least 1, got {self.batch_sizes}")
        if self.decode_tokens < 2:
            raise ConfigError(f"--decode-tokens must be at least 2, got {self.decode_tokens}: the first is prefill's")
        if not 1 <= self.num_threads <= usable_cores():
            raise ConfigError(
                f"--threads must be 1 to {usable_cores()}, the cores this process may use, got {self.num_threads}"
            )

        if self.options.get("max_num_seqs", max(self.batch_sizes)) < max(self.batch_sizes):
            raise ConfigError(f"--max-num-seqs must hold the largest batch, {max(self.batch_sizes)} sequences")

    @property
    def max_len(self) -> int:
        """Tokens the longest sequence takes."""
        return max(DECODE_PROMPT + self.decode_tokens, self.prompt_tokens + 1)


def bench_peers(
    path: Path,
    peers: Sequence[EngineCommand],
    progress: Progress,
    setup: PeersSetup,
    *,
    own: EngineCommand | None = None,
    notes: tuple[str, ...] = (),
) -> Report:
    """Loads every engine once, runs a round that is not counted and then num_rounds.

    A peer that is missing or fails is named with its reason. Raises BenchmarkFailed when jaxserve does.
    """
    if not is_gguf(path):
        raise ConfigError(f"{path}: the peers read GGUF files; name one as MODEL")
    commands = [own or own_command(), *peers]
    engines = [Contestant(name=command.name, command=command) for command in commands]
    work = all_work(setup.batch_sizes, DECODE_PROMPT, setup.decode_tokens, setup.prompt_tokens)
    bandwidth: list[float] = []
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.close)
        with progress.task("loading engines", len(engines)) as advance:
            for engine in engines:
                _load(engine, path, setup)
                advance(1)
        memory = stack.enter_context(contextlib.closing(ReadBandwidth(setup.num_threads)))
        vocab = min((engine.facts["vocab_size"] for engine in engines if engine.facts), default=0)
        foreign = ForeignLoad(engines)
        with progress.task("rounds", setup.num_rounds + 1) as advance:
            for number in range(-1, setup.num_rounds):
                bandwidth.append(memory.bytes_per_second())
                for each, at in _turns(work, len(engines), number):
                    prompts = each.prompts(vocab, setup.seed, number)
                    limits = {"is_counted": number >= 0, "timeout_seconds": setup.timeout_seconds}
                    turn(engines, at, each, prompts, **limits, clock=time.perf_counter)
                    _require_own(engines[0])
                advance(1)
        foreign_cores = foreign.cores()
        for engine in engines:
            engine.final_bytes = _memory(engine, setup)
    found = Measurements(
        path=path,
        work=work,
        engines=engines,
        bandwidth=bandwidth[1:],
        bytes_per_step=bytes_per_decode_step(path),
        foreign_cores=foreign_cores,
    )
    return peers_report(found, setup_facts(setup), notes)


def setup_facts(setup: PeersSetup) -> dict[str, Any]:
    """What was asked for, in words."""
    chosen = {name: str(value) for name, value in setup.options.items() if not name.endswith("cache_dir")}
    return {
        "threads of every engine": setup.num_threads,
        "rounds": setup.num_rounds,
        "decode": f"{DECODE_PROMPT}-token prompts, {setup.decode_tokens} tokens each, greedy",
        "prefill": f"{setup.prompt_tokens:,} tokens",
        "seed": setup.seed,
        **({"jaxserve's options": chosen} if chosen else {}),
    }


def _turns(work: list[Any], num_engines: int, number: int) -> Iterator[tuple[Any, int]]:
    """(work, engine) of a round: engines take turns at each piece of work, so that a pair is close in time."""
    return ((each, at) for each in work for at in rotated(num_engines, number))


def _load(engine: Contestant, path: Path, setup: PeersSetup) -> None:
    start = time.perf_counter()
    sizes = {"num_threads": setup.num_threads, "max_num_seqs": max(setup.batch_sizes), "max_len": setup.max_len}
    options = setup.options if engine.name == OWN else {}
    try:
        engine.process = EngineProcess(engine.command)
        engine.facts = engine.process.ask("load", setup.timeout_seconds, model=str(path), **sizes, options=options)
    except EngineUnusable as error:
        engine.drop(str(error))
    engine.load_seconds = time.perf_counter() - start
    engine.loaded_bytes = _memory(engine, setup)
    if engine.name == OWN:
        _require_own(engine)


def _memory(engine: Contestant, setup: PeersSetup) -> dict[str, int]:
    """Resident bytes of the engine's process; nothing of one that is out."""
    if engine.process is None:
        return {}
    try:
        return engine.process.ask("memory", setup.timeout_seconds)
    except EngineUnusable as error:
        engine.drop(str(error))
        return {}


def _require_own(engine: Contestant) -> None:
    if engine.reason is not None:
        raise BenchmarkFailed(f"{engine.name} gave no figures: {engine.reason}")
