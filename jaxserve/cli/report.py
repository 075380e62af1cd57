"""What a person is told around a generation: what was loaded, every choice with its reason, and how fast it went."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from checkpoints.inspect import ModelDescription
from jaxserve.outputs import TextDelta

SHORT_CHOICES = ("device", "threads", "weights", "kernels", "kv_pages")


@runtime_checkable
class Program(Protocol):
    """The part of the engine's ProgramReport that is printed."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def from_cache(self) -> bool: ...
    @property
    def temp_bytes(self) -> int: ...


def startup_lines(
    model_name: str,
    choices: Mapping[str, Mapping[str, Any]],
    programs: Sequence[Program],
    startup_seconds: float,
    description: ModelDescription | None,
) -> list[str]:
    """The short report: model and file, device, weights, kernels, KV pages, programs, time."""
    lines = [f"model     {model_name}{_described(description)}"]
    if description is not None:
        formats = ", ".join(f"{name} {size:,}" for name, size in description.bytes_by_format.items())
        lines.append(f"file      {description.path}, {description.num_bytes:,} bytes ({formats})")
    for name in SHORT_CHOICES:
        if name in choices:
            lines.append(f"{name.replace('_', ' '):<9} {_choice(choices[name])}")
    if choices.get("sampling_defaults", {}).get("value"):  # the model's own: answers may be random by them
        lines.append(f"sampling  {_choice(choices['sampling_defaults'])}")
    lines.append(f"programs  {programs_line(programs)}")
    lines.append(f"started   in {startup_seconds:.1f} s")
    return lines


def choice_lines(choices: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The effective configuration: each choice and its reason."""
    width = max(map(len, choices), default=0)
    return [f"{name:<{width}}  {_choice(choice)}" for name, choice in choices.items()]


def program_lines(programs: Sequence[Program]) -> list[str]:
    """Each compiled program: seconds, where it came from, and its temporary memory."""
    width = max((len(program.name) for program in programs), default=0)
    return [
        f"{program.name:<{width}}  {program.seconds:6.2f} s  {'cached  ' if program.from_cache else 'compiled'}  "
        f"{program.temp_bytes:,} temporary bytes"
        for program in programs
    ]


def programs_line(programs: Sequence[Program]) -> str:
    """All programs in one line. Their seconds are added up, also of those that were compiled side by side."""
    if not programs:
        return "compiled on first use"
    cached = sum(program.from_cache for program in programs)
    seconds = sum(program.seconds for program in programs)
    return f"{len(programs)}, {seconds:.1f} s of compiling added up, {cached} of them from the compilation cache"


def _described(description: ModelDescription | None) -> str:
    if description is None:
        return ""
    return f": {description.architecture}, {description.num_parameters:,} parameters"


def _choice(choice: Mapping[str, Any]) -> str:
    value = choice["value"]
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()] or ["none"]
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f"{shown}: {choice['reason']}" if choice["reason"] else shown


@dataclass(frozen=True, kw_only=True)
class Figures:
    """How one generation went. Compilation that fell into it is counted apart, so that the rates are the model's."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_answer_tokens: int
    first_token_seconds: float
    prefill_seconds: float
    num_decoded_tokens: int
    decode_seconds: float
    compile_seconds: float
    startup_seconds: float

    def line(self) -> str:
        """One line for a person."""
        computed = self.num_prompt_tokens - self.num_cached_tokens
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        parts = [
            f"prompt {self.num_prompt_tokens} tokens{cached}, {_rate(computed, self.prefill_seconds)}",
            f"answer {self.num_answer_tokens} tokens, {_rate(self.num_decoded_tokens, self.decode_seconds)}",
            f"first token after {self.first_token_seconds:.2f} s",
        ]
        if self.compile_seconds >= 0.005:
            parts.append(f"compiling {self.compile_seconds:.2f} s (not in the rates)")
        return " | ".join([*parts, f"startup {self.startup_seconds:.1f} s"])


def _rate(num_tokens: int, seconds: float) -> str:
    return f"{num_tokens / seconds:.1f} tok/s" if num_tokens and seconds > 0 else "- tok/s"


class GenerationClock:
    """Notes when increments arrive. `programs` is the engine's growing list of compiled programs."""

    def __init__(self, programs: Sequence[Program], clock: Callable[[], float] = time.perf_counter) -> None:
        self._programs = programs
        self._clock = clock
        self._start = self._first = self._last = clock()
        self._compiled_before = self._compiled_at_first = self._compiled_at_last = self._compiled()
        self._num_first = self._num_tokens = 0

    def saw(self, delta: TextDelta) -> None:
        """Counts one increment. The tokens of the first one that has any are the prompt's doing, not decoding."""
        if not delta.token_ids:
            return
        self._last, self._compiled_at_last = self._clock(), self._compiled()
        if not self._num_tokens:
            self._first, self._compiled_at_first = self._last, self._compiled_at_last
            self._num_first = len(delta.token_ids)
        self._num_tokens += len(delta.token_ids)

    def figures(self, *, num_prompt_tokens: int, num_cached_tokens: int, startup_seconds: float) -> Figures:
        """What was measured so far."""
        compiled_first = self._compiled_at_first - self._compiled_before
        compiled_later = self._compiled_at_last - self._compiled_at_first
        return Figures(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=num_cached_tokens,
            num_answer_tokens=self._num_tokens,
            first_token_seconds=self._first - self._start,
            prefill_seconds=self._first - self._start - compiled_first,
            num_decoded_tokens=self._num_tokens - self._num_first,
            decode_seconds=self._last - self._first - compiled_later,
            compile_seconds=compiled_first + compiled_later,
            startup_seconds=startup_seconds,
        )

    def _compiled(self) -> float:
        return float(sum(program.seconds for program in tuple(self._programs)))
