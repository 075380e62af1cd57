"""The command line in this process, over a frontend without an engine."""

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxserve.cli.main import run_command
from jaxserve.errors import PromptTooLong
from jaxserve.outputs import FinishReason, Logprob, TextDelta
from jaxserve.sampling_params import SamplingParams

WORDS = ("one", " two", " three", " four")


@dataclass(frozen=True, kw_only=True)
class FakeProgram:
    name: str = "step"
    seconds: float = 1.5
    from_cache: bool = False
    temp_bytes: int = 1000


class FakeGeneration:
    """Every choice says WORDS; `interrupt_after` deltas the person at the keyboard presses Ctrl-C."""

    def __init__(self, frontend: "FakeFrontend", ids: list[int], params: SamplingParams) -> None:
        self.prompt_token_ids = ids
        self.num_cached_tokens = 0
        self.prompt_logprobs = None if params.prompt_logprobs is None else [None, {7: Logprob(-1.0, 1, "x")}]
        self.aborted = threading.Event()
        self._frontend, self._params = frontend, params

    def abort(self) -> None:
        self.aborted.set()

    def __iter__(self) -> Iterator[TextDelta]:
        words = WORDS[: self._params.max_tokens]
        for position, word in enumerate(words):
            for index in range(self._params.n):
                if position == self._frontend.interrupt_after:
                    self._frontend.interrupt_after = None
                    raise KeyboardInterrupt
                yield self._delta(index, position, word, position == len(words) - 1)

    def _delta(self, index: int, position: int, word: str, is_last: bool) -> TextDelta:
        logprobs = None if self._params.logprobs is None else ({position: Logprob(-0.5, 1, word)},)
        reason = self._frontend.finish_reason if is_last else None
        return TextDelta(index=index, text=word, token_ids=(position,), logprobs=logprobs, finish_reason=reason)


@dataclass(frozen=True, kw_only=True)
class FakeStats:
    total_pages: int = 10
    running_pages: int = 0
    cached_pages: int = 3
    free_pages: int = 7


@dataclass(kw_only=True)
class FakeFrontend:
    model_name: str = "fake"
    max_model_len: int = 100
    tokenizer: Any = "present"
    chat_template: Any = "present"
    sampling_defaults: dict[str, float | int] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    interrupt_after: int | None = None
    programs: list[FakeProgram] = field(default_factory=list)
    startup_seconds: float = 0.5
    chats: list[list[dict]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    generations: list[FakeGeneration] = field(default_factory=list)
    prepared: list[tuple[int, int]] = field(default_factory=list)
    num_closed: int = 0

    def encode_prompt(self, text: str) -> list[int]:
        self.prompts.append(text)
        return list(text.encode())

    def encode_chat(self, messages: list[dict], **template_kwargs: Any) -> list[int]:
        self.chats.append(messages)
        return list("".join(message["content"] for message in messages).encode())

    def prepare(self, num_prompt_tokens: int, num_choices: int, progress: Any) -> None:
        self.prepared.append((num_prompt_tokens, num_choices))

    def submit(self, prompt_token_ids: list[int], params: SamplingParams) -> FakeGeneration:
        if len(prompt_token_ids) >= self.max_model_len:
            raise PromptTooLong(f"prompt has {len(prompt_token_ids)} tokens; at most {self.max_model_len}")
        self.params.append(params)
        self.generations.append(FakeGeneration(self, prompt_token_ids, params))
        return self.generations[-1]

    def stats(self) -> FakeStats:
        return FakeStats()

    def effective_config(self) -> dict[str, dict[str, Any]]:
        return {
            "kernels": {"value": "xla", "reason": "because"},
            "step_shapes": {"value": ["a", "b"], "reason": "compiled"},
        }

    def close(self) -> None:
        self.num_closed += 1


@dataclass(kw_only=True)
class Starts:
    """What commands asked of `start_frontend`, and the frontend they get."""

    frontend: FakeFrontend
    configs: list[Any] = field(default_factory=list)
    warm_ups: list[bool] = field(default_factory=list)
    needs_text: list[bool] = field(default_factory=list)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Replaces the engine by a fake, whose frontend a test may change before it runs a command."""
    from jaxserve import offline

    starts = Starts(frontend=FakeFrontend())

    def start_frontend(config: Any, progress: Any, *, warm_up: bool, needs_text: bool = False) -> FakeFrontend:
        starts.configs.append(config)
        starts.warm_ups.append(warm_up)
        starts.needs_text.append(needs_text)
        with progress.task("loading weights", 3) as advance:
            advance(3)
        return starts.frontend

    monkeypatch.setattr(offline, "start_frontend", start_frontend)
    return starts


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a command line did."""

    code: int
    out: str
    err: str

    def error_line(self) -> str:
        """The one line that says what was wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("jaxserve: error: ")]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Ran]:
    """run("generate", "-p", "x", stdin="...") in this process, with caches in a folder of its own."""
    monkeypatch.setenv("JAXSERVE_HOME", str(tmp_path_factory.mktemp("home")))
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAXSERVE_TRACEBACK", "JAXSERVE_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, stdin: str = "") -> Ran:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = run_command(arguments)
        captured = capsys.readouterr()
        print(captured.err)  # shown where a test fails
        return Ran(code=code, out=captured.out, err=captured.err)

    return run
