"""The answers of POST /v1/completions: the whole object, and the chunks of a stream.

Choices are numbered as OpenAI does: prompt_index * n + i.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.outputs import TextDelta
from jaxserve.server.generation_group import Choice, GenerationGroup
from jaxserve.server.logprob_shapes import TokenSpelling, completion_logprobs, prompt_logprobs_shape
from jaxserve.server.prompts import Prompt
from jaxserve.server.protocol import StreamOptions
from jaxserve.server.serving import ServedGeneration
from jaxserve.server.streaming import DONE, encode_event

type Logprobs = dict[str, list]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionAnswer:
    """What all parts of one answer share. is_scoring: echo with max_tokens 0, so that nothing sampled is shown."""

    id: str
    created: int
    model: str
    prompts: Sequence[Prompt]
    spelling: TokenSpelling
    num_top_logprobs: int | None
    with_echo: bool
    with_prompt_logprobs: bool
    with_token_ids: bool
    is_scoring: bool

    def whole(self, group: GenerationGroup, choices: Sequence[Sequence[Choice]]) -> dict[str, Any]:
        """The `text_completion` object."""
        shapes = [
            self._whole_choice(group, prompt_index, i, choice)
            for prompt_index, of_prompt in enumerate(choices)
            for i, choice in enumerate(of_prompt)
        ]
        num_tokens = 0 if self.is_scoring else sum(len(c.token_ids) for of_prompt in choices for c in of_prompt)
        return {**self.chunk(shapes), "usage": group.usage(num_tokens)}

    def _whole_choice(self, group: GenerationGroup, prompt_index: int, i: int, choice: Choice) -> dict[str, Any]:
        generation = group.generations[prompt_index]
        shown = Choice(finish_reason="length") if self.is_scoring else choice
        echo_logprobs, offset = self._echo_logprobs(prompt_index, generation)
        logprobs, _ = self._logprobs(shown.token_ids, shown.logprobs, offset)
        shape = {
            "index": prompt_index * group.n + i,
            "text": self.echo_text(prompt_index) + shown.text,
            "logprobs": _joined(echo_logprobs, logprobs),
            "finish_reason": shown.finish_reason,
            "stop_reason": shown.stop_reason,
        }
        if self.with_prompt_logprobs and generation.prompt_logprobs is not None:
            shape["prompt_logprobs"] = prompt_logprobs_shape(self.spelling, generation.prompt_logprobs)
        if self.with_token_ids:
            shape["token_ids"] = shown.token_ids
            shape["prompt_token_ids"] = generation.prompt_token_ids
        return shape

    def echo_text(self, prompt_index: int) -> str:
        """The prompt as the caller wrote it, or decoded where it sent token ids; empty without echo."""
        if not self.with_echo:
            return ""
        prompt = self.prompts[prompt_index]
        if prompt.text is not None or self.spelling.tokenizer is None:
            return prompt.text or ""
        return self.spelling.tokenizer.decode(prompt.token_ids, skip_special=False)

    def echo_choice(self, group: GenerationGroup, prompt_index: int, i: int) -> tuple[dict[str, Any], int]:
        """The chunk entry that opens an echoing choice, and the text offset behind the prompt."""
        logprobs, offset = self._echo_logprobs(prompt_index, group.generations[prompt_index])
        shape = {
            "index": prompt_index * group.n + i,
            "text": self.echo_text(prompt_index),
            "logprobs": logprobs,
            "finish_reason": None,
        }
        return shape, offset

    def delta_choice(self, index: int, delta: TextDelta, offset: int) -> tuple[dict[str, Any], int]:
        """The chunk entry of one delta, and the text offset behind it."""
        logprobs, offset = self._logprobs(delta.token_ids, delta.logprobs or (), offset)
        shape = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            shape["stop_reason"] = delta.stop_reason
        if self.with_token_ids:
            shape["token_ids"] = delta.token_ids
        return shape, offset

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One `text_completion` object without usage."""
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence, offset: int) -> tuple[Logprobs | None, int]:
        if self.num_top_logprobs is None:
            return None, offset
        return completion_logprobs(self.spelling, token_ids, logprobs, self.num_top_logprobs, offset=offset)

    def _echo_logprobs(self, prompt_index: int, generation: ServedGeneration) -> tuple[Logprobs | None, int]:
        if self.num_top_logprobs is None or not self.with_echo or generation.prompt_logprobs is None:
            return None, 0
        ids = generation.prompt_token_ids
        starts_written = self._starts_with(self.echo_text(prompt_index), ids[0])
        return completion_logprobs(
            self.spelling,
            ids,
            generation.prompt_logprobs,
            self.num_top_logprobs,
            num_unwritten=0 if starts_written else 1,
        )

    def _starts_with(self, text: str, token_id: int) -> bool:
        """False for a BOS that encoding put in front of the caller's text."""
        tokenizer = self.spelling.tokenizer
        if tokenizer is None:
            return False
        is_special = not tokenizer.decode([token_id], skip_special=True)
        return not is_special or text.startswith(tokenizer.token_text(token_id))


async def completion_events(
    group: GenerationGroup, answer: CompletionAnswer, options: StreamOptions | None
) -> AsyncGenerator[bytes]:
    """The stream: the echo if asked for, a chunk per delta, the usage if asked for, [DONE]."""
    with_usage = bool(options and options.include_usage)
    running_usage = bool(options and options.continuous_usage_stats)
    num_tokens = 0
    offsets: dict[int, int] = {}  # by choice; a choice enters with its first delta
    async for prompt_index, delta in group.deltas():
        index = prompt_index * group.n + delta.index
        entries = []
        if index not in offsets:
            entries += _opening(group, answer, prompt_index, delta.index, offsets)
        num_tokens += len(delta.token_ids)
        if delta.text or delta.finish_reason or _tells_tokens(answer, delta):
            entry, offsets[index] = answer.delta_choice(index, delta, offsets[index])
            entries.append(entry)
        for entry in entries:
            chunk = answer.chunk([entry])
            if running_usage:
                chunk["usage"] = group.usage(num_tokens, with_details=False)
            elif with_usage:
                chunk["usage"] = None
            yield encode_event(chunk)
    if with_usage:
        yield encode_event({**answer.chunk([]), "usage": group.usage(num_tokens)})
    yield DONE


def _opening(
    group: GenerationGroup, answer: CompletionAnswer, prompt_index: int, i: int, offsets: dict[int, int]
) -> list[dict[str, Any]]:
    """The entry that comes before a choice's first delta, if any: the echo, the prompt's token ids."""
    index = prompt_index * group.n + i
    offsets[index] = 0
    if not answer.with_echo and not answer.with_token_ids:
        return []
    entry, offsets[index] = answer.echo_choice(group, prompt_index, i)
    if answer.with_token_ids:
        entry["prompt_token_ids"] = group.generations[prompt_index].prompt_token_ids
    return [entry]


def _tells_tokens(answer: CompletionAnswer, delta: TextDelta) -> bool:
    return bool(delta.token_ids) and (answer.num_top_logprobs is not None or answer.with_token_ids)


def _joined(first: Logprobs | None, second: Logprobs | None) -> Logprobs | None:
    if first is None or second is None:
        return second if first is None else first
    return {name: first[name] + second[name] for name in first}
