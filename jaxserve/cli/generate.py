"""`jaxserve generate`: one prompt, its answer on stdout, everything else on stderr."""

import dataclasses
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from jaxserve.cli.bars import Bars
from jaxserve.cli.options import SamplingChoice, engine_options, sampling_options, takes
from jaxserve.cli.report import Figures, GenerationClock
from jaxserve.cli.startup import Started, started, with_sign
from jaxserve.cli.terminal import note, print_json, write_text
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.outputs import Logprob, TextDelta
from jaxserve.sampling_params import SamplingParams


@takes(config=engine_options(), sampling=sampling_options(max_tokens=128, temperature=0.0))
def generate(
    config: EngineConfig,
    sampling: SamplingChoice,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt; - reads it from stdin.")] = None,
    token_ids: Annotated[
        str | None,
        typer.Option("--prompt-token-ids", metavar="IDS", help="The prompt as token ids, with commas between them."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Put the prompt into the chat template, or not; default: if there is one."),
    ] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print text as it comes; default: yes, if one answer.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate text for one prompt. A newline at the end of stdin is not part of the prompt.

    Of a model without a tokenizer token ids are printed.
    """
    _check_output(sampling.over({}), stream, json_)
    given = _given_ids(prompt, token_ids, system, chat)
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    with started(config, needs_text=text is not None) as running:
        params = dataclasses.replace(sampling.over(running.frontend.sampling_defaults), seed=config.seed)
        ids = given if text is None else prompt_token_ids(running.frontend, text, system, chat)
        streams = stream is not False and not json_ and params.n == 1
        finished = _run(running, ids, params, streams)
        if json_:
            print_json(as_json(finished, text, running.frontend.model_name))
        elif not streams:
            _print_whole(finished.answers(), has_text=running.frontend.tokenizer is not None)
        note(finished.figures.line())
    if any(delta.finish_reason == "error" for delta in finished.deltas):
        raise JaxserveError("an answer ended early: the model computed no finite logits for it")


def _check_output(sampling: SamplingParams, stream: bool | None, as_json: bool) -> None:
    """Refuses what would otherwise have no effect."""
    if stream and as_json:
        raise ConfigError("--stream prints text and --json one object at the end: leave one of them out")
    if stream and sampling.n > 1:
        raise ConfigError(f"--stream shows one answer and --n {sampling.n} asks for several: leave one of them out")
    if not as_json and (sampling.logprobs is not None or sampling.prompt_logprobs is not None):
        raise ConfigError("log probabilities are printed with --json only: add it, or leave --logprobs out")


def _given_ids(prompt: str | None, token_ids: str | None, system: str | None, chat: bool | None) -> list[int]:
    """The ids of --prompt-token-ids. ConfigError for anything else there, and unless there is one prompt."""
    if (prompt is None) == (token_ids is None):
        raise ConfigError("give one of --prompt TEXT and --prompt-token-ids IDS")
    if token_ids is None:
        return []
    if system is not None or chat:
        raise ConfigError("--prompt-token-ids are the whole prompt: leave --system and --chat out")
    words = token_ids.replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise ConfigError(f"--prompt-token-ids {token_ids!r:.60}: expected numbers with commas between them, as 1,42,7")
    return [int(word) for word in words]


def prompt_token_ids(frontend: Any, text: str, system: str | None, chat: bool | None) -> list[int]:
    """Token ids of the prompt. chat None: through the chat template if the model has one."""
    if chat is None:
        chat = frontend.chat_template is not None
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        return frontend.encode_chat([*messages, {"role": "user", "content": text}])
    if system is not None:
        raise ConfigError("--system needs a chat template: leave it or --raw out, or give --chat-template")
    return frontend.encode_prompt(text)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A request that ran to its end."""

    generation: Any
    deltas: list[TextDelta]
    figures: Figures

    def answers(self) -> list[dict[str, Any]]:
        """Each choice as a whole, under vLLM's names."""
        indices = sorted({delta.index for delta in self.deltas})
        return [_joined(index, [d for d in self.deltas if d.index == index]) for index in indices]


def _run(running: Started, ids: list[int], params: SamplingParams, streams: bool) -> Finished:
    """Runs the request to its end. Interrupted, it ends the request before it goes on."""
    running.frontend.prepare(len(ids), params.n, Bars())
    clock = GenerationClock(running.frontend.programs)
    generation = running.frontend.submit(ids, params)
    deltas: list[TextDelta] = []
    has_text = running.frontend.tokenizer is not None
    try:
        for delta in with_sign(generation):
            clock.saw(delta)
            deltas.append(delta)
            if streams:
                write_text(delta.text if has_text else "".join(f"{token} " for token in delta.token_ids))
    except BaseException:
        generation.abort()
        raise
    if streams:
        write_text("\n")
    figures = clock.figures(
        num_prompt_tokens=len(ids), num_cached_tokens=generation.num_cached_tokens, startup_seconds=running.seconds
    )
    return Finished(generation=generation, deltas=deltas, figures=figures)


def _joined(index: int, deltas: list[TextDelta]) -> dict[str, Any]:
    last = deltas[-1]
    answer: dict[str, Any] = {
        "index": index,
        "text": "".join(delta.text for delta in deltas),
        "token_ids": [token for delta in deltas for token in delta.token_ids],
        "finish_reason": last.finish_reason,
        "stop_reason": last.stop_reason,
    }
    if any(delta.logprobs is not None for delta in deltas):
        answer["logprobs"] = [_logprobs(entry) for delta in deltas for entry in delta.logprobs or ()]
    return answer


def _logprobs(entry: dict[int, Logprob] | None) -> list[dict[str, Any]] | None:
    return (
        None
        if entry is None
        else [{"token_id": token, **dataclasses.asdict(logprob)} for token, logprob in entry.items()]
    )


def as_json(finished: Finished, prompt: str | None, model: str) -> dict[str, Any]:
    """The result and its figures, in types that JSON has."""
    generation = finished.generation
    result: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "prompt_token_ids": list(generation.prompt_token_ids),
        "outputs": finished.answers(),
        "figures": dataclasses.asdict(finished.figures),
    }
    if generation.prompt_logprobs is not None:
        result["prompt_logprobs"] = [_logprobs(entry) for entry in generation.prompt_logprobs]
    return result


def _print_whole(answers: list[dict[str, Any]], *, has_text: bool) -> None:
    for answer in answers:
        if len(answers) > 1:
            write_text(f"--- {answer['index'] + 1} of {len(answers)}\n")
        write_text((answer["text"] if has_text else " ".join(map(str, answer["token_ids"]))) + "\n")
