"""Rounds in which every engine has its turn at the same prompts, and what each turn gave."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxserve.bench.peers.engines import EngineCommand, EngineProcess, EngineUnusable, machine_cpu_seconds
from jaxserve.bench.workload import random_source, random_tokens


@dataclass(frozen=True, kw_only=True)
class Work:
    """Sequences that start together: random prompts of equal length, each answered by so many tokens."""

    name: str
    num_seqs: int
    prompt_len: int
    num_tokens: int

    def prompts(self, vocab_size: int, seed: int, round_number: int) -> list[list[int]]:
        """The same for every engine; no two rounds share one."""
        source = random_source(seed, "peers", self.name, round_number)
        return [random_tokens(source, self.prompt_len, vocab_size) for _ in range(self.num_seqs)]

    def tokens_per_second(self, timing: dict[str, float]) -> float:
        """Generated tokens after every sequence had its first, over the time from then; prompt tokens over the time
        to the first token where one token is all that is asked for."""
        if self.num_tokens == 1:
            return self.num_seqs * self.prompt_len / timing["first_token_seconds"]
        num_tokens = timing["num_tokens"] - timing["num_tokens_at_first"]
        return num_tokens / (timing["seconds"] - timing["first_token_seconds"])


def all_work(batch_sizes: Sequence[int], decode_prompt: int, decode_tokens: int, prompt_tokens: int) -> list[Work]:
    """Decode at every batch size, then one prefill."""
    decode = {"prompt_len": decode_prompt, "num_tokens": decode_tokens}
    prefill = Work(name=f"prefill {prompt_tokens}", num_seqs=1, prompt_len=prompt_tokens, num_tokens=1)
    return [*(Work(name=f"decode {size}", num_seqs=size, **decode) for size in batch_sizes), prefill]


@dataclass(kw_only=True)
class Contestant:
    """One engine in a run. reason: why it is out; rates: tokens/s by work, one per counted round."""

    name: str
    command: EngineCommand
    process: EngineProcess | None = None
    reason: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    load_seconds: float = 0.0
    loaded_bytes: dict[str, int] = field(default_factory=dict)
    final_bytes: dict[str, int] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)
    idle_cpu_seconds: float = 0.0
    idle_seconds: float = 0.0

    def drop(self, reason: str) -> None:
        """Takes the engine out of the run; its figures so far do not count."""
        self.reason, self.rates = reason, {}
        self.close()

    def close(self) -> None:
        """Ends its process."""
        if self.process is not None:
            self.process.close()
            self.process = None

    @property
    def idle_share(self) -> float | None:
        """Cores it kept busy while others had their turn."""
        return self.idle_cpu_seconds / self.idle_seconds if self.idle_seconds else None


def turn(
    engines: Sequence[Contestant],
    at: int,
    work: Work,
    prompts: list[list[int]],
    *,
    is_counted: bool,
    timeout_seconds: float,
    clock: Callable[[], float],
) -> None:
    """One engine's turn at one piece of work; the processor time of the others meanwhile is noted."""
    engine = engines[at]
    if engine.process is None:
        return
    others = [(other, _cpu_seconds(other)) for other in engines if other is not engine]
    start = clock()
    try:
        timing = engine.process.ask("generate", timeout_seconds, prompts=prompts, num_tokens=work.num_tokens)
        wanted = work.num_seqs * work.num_tokens
        if timing["num_tokens"] != wanted:
            raise EngineUnusable(f"{work.name}: {timing['num_tokens']:,} tokens instead of {wanted:,}")
    except EngineUnusable as error:
        engine.drop(str(error))
        return
    seconds = clock() - start
    if is_counted:
        engine.rates.setdefault(work.name, []).append(work.tokens_per_second(timing))
    for other, before in others:
        after = _cpu_seconds(other)
        if before is not None and after is not None:
            other.idle_cpu_seconds += after - before
            other.idle_seconds += seconds


class ForeignLoad:
    """How many cores processes outside the run keep busy, between start and now."""

    def __init__(self, engines: Sequence[Contestant]) -> None:
        self._engines = engines
        self._start = self._read()

    def cores(self) -> float | None:
        """None where the system does not say, or an engine ended meanwhile: its time would count as foreign."""
        end = self._read()
        if self._start is None or end is None or self._start[2] != end[2]:
            return None
        busy, seconds = end[0] - self._start[0], end[1] - self._start[1]
        return max(0.0, busy / seconds)

    def _read(self) -> tuple[float, float, tuple[str, ...]] | None:
        """(processor seconds of others, wall seconds, engines that run)."""
        running = [engine for engine in self._engines if engine.process is not None]
        own = [_cpu_seconds(engine) for engine in running]
        whole = machine_cpu_seconds()
        if whole is None or None in own:
            return None
        ours = sum(seconds for seconds in own if seconds is not None) + time.process_time()
        return whole - ours, time.perf_counter(), tuple(engine.name for engine in running)


def rotated(count: int, round_number: int) -> list[int]:
    """Positions 0 ... count - 1, beginning with another one each round: whoever goes first changes."""
    return [(i + round_number) % count for i in range(count)]


def _cpu_seconds(engine: Contestant) -> float | None:
    return None if engine.process is None else engine.process.cpu_seconds()
