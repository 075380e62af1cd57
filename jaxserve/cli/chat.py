"""`jaxserve chat`: a conversation on the terminal, or over a pipe with one message per line."""

import dataclasses
import sys
from typing import Any

from jaxserve.cli.options import SamplingChoice, engine_options, sampling_options, takes
from jaxserve.cli.report import Figures, GenerationClock
from jaxserve.cli.startup import Started, started, with_sign
from jaxserve.cli.terminal import note, write_text
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.sampling_params import SamplingParams

HELP = (
    "/reset         forget the conversation",
    "/system TEXT   set the system message and start anew; without TEXT: remove it",
    "/stats         figures of the last answer, and what the cache holds",
    "/exit          leave, as Ctrl-D does; Ctrl-C stops an answer, and leaves at an empty prompt",
)


@takes(
    config=engine_options(),
    sampling=sampling_options(max_tokens=1024, temperature=0.0, leave_out=("n", "logprobs", "prompt_logprobs")),
)
def chat(config: EngineConfig, sampling: SamplingChoice) -> None:
    """Talk with a model. /help lists what can be typed besides messages."""
    with started(config, needs_text=True) as running:
        if running.frontend.chat_template is None:
            raise ConfigError("this model has no chat template: give --chat-template, or use `jaxserve generate`")
        note("/help lists the commands; /exit or Ctrl-D leaves")
        Conversation(running, sampling.over(running.frontend.sampling_defaults)).run()


class Conversation:
    """Messages so far, and what a typed line does with them."""

    def __init__(self, running: Started, sampling: SamplingParams) -> None:
        self.messages: list[dict[str, Any]] = []
        self.last_figures: Figures | None = None
        self._running = running
        self._sampling = sampling

    def run(self) -> None:
        """Reads lines until the end of input or /exit."""
        while (line := read_line()) is not None and line.strip() != "/exit":
            if line.strip().startswith("/"):
                self._obey(line.strip())
            elif line.strip():
                self._answer(line)

    def _obey(self, line: str) -> None:
        name, _, text = line.partition(" ")
        if name == "/help":
            for each in HELP:
                print(each)
        elif name == "/reset":
            self._start_anew(self._system())
        elif name == "/system":
            self._start_anew([{"role": "system", "content": text.strip()}] if text.strip() else [])
        elif name == "/stats":
            self._print_stats()
        else:
            note(f"there is no command {name}; /help lists them")

    def _system(self) -> list[dict[str, Any]]:
        return [message for message in self.messages[:1] if message["role"] == "system"]

    def _start_anew(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        note("new conversation")

    def _answer(self, text: str) -> None:
        """Adds the message and its answer; a message that cannot be answered is taken back."""
        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            answer = self._generate(asked)
        except InvalidRequest as error:
            note(f"{error} (/reset forgets the conversation)")
            return
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _generate(self, messages: list[dict[str, Any]]) -> str:
        frontend = self._running.frontend
        ids = frontend.encode_chat(messages)
        room = max(1, frontend.max_model_len - len(ids))
        params = dataclasses.replace(self._sampling, max_tokens=min(room, self._sampling.max_tokens or room))
        clock = GenerationClock(frontend.programs)
        generation = frontend.submit(ids, params)
        parts: list[str] = []
        try:
            for delta in with_sign(generation):
                clock.saw(delta)
                parts.append(delta.text)
                write_text(delta.text)
                if delta.finish_reason == "error":
                    note("the answer ended early: the model computed no finite logits for it")
        except KeyboardInterrupt:
            generation.abort()
            note(" (stopped)")
        except BaseException:
            generation.abort()
            raise
        write_text("\n")
        self.last_figures = clock.figures(
            num_prompt_tokens=len(ids),
            num_cached_tokens=generation.num_cached_tokens,
            startup_seconds=self._running.seconds,
        )
        return "".join(parts)

    def _print_stats(self) -> None:
        stats = self._running.frontend.stats()
        print(self.last_figures.line() if self.last_figures else "no answer yet")
        print(
            f"{len(self.messages)} messages; KV pages: {stats.running_pages} running, {stats.cached_pages} cached, "
            f"{stats.free_pages} free of {stats.total_pages}"
        )


def read_line() -> str | None:
    """The next message. None at the end of input, and for Ctrl-C at an empty prompt."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None
    import readline  # gives input() editing and history

    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()
            if not readline.get_line_buffer().strip():
                return None
