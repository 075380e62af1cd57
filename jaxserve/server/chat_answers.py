"""The answers of POST /v1/chat/completions: the whole object, and the chunks of a stream."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.outputs import TextDelta
from jaxserve.server.generation_group import Choice, GenerationGroup
from jaxserve.server.logprob_shapes import TokenSpelling, chat_logprobs, prompt_logprobs_shape
from jaxserve.server.protocol import StreamOptions
from jaxserve.server.streaming import DONE, encode_event


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """What all parts of one answer share. num_top_logprobs None: no logprobs were asked for."""

    id: str
    created: int
    model: str
    spelling: TokenSpelling
    num_top_logprobs: int | None
    with_prompt_logprobs: bool
    with_token_ids: bool

    def whole(self, group: GenerationGroup, choices: Sequence[Choice]) -> dict[str, Any]:
        """The `chat.completion` object."""
        answer = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole_choice(i, choice) for i, choice in enumerate(choices)],
            "usage": group.usage(sum(len(choice.token_ids) for choice in choices)),
        }
        generation = group.generations[0]
        if self.with_prompt_logprobs and generation.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_shape(self.spelling, generation.prompt_logprobs)
        if self.with_token_ids:
            answer["prompt_token_ids"] = generation.prompt_token_ids
        return answer

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shape = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.with_token_ids:
            shape["token_ids"] = choice.token_ids
        return shape

    def delta_choice(self, delta: TextDelta) -> dict[str, Any]:
        """The `choices` entry of one chunk."""
        shape = {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text or delta.token_ids else {},
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs or ()) if delta.token_ids else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            shape["stop_reason"] = delta.stop_reason
        if self.with_token_ids:
            shape["token_ids"] = delta.token_ids
        return shape

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """One `chat.completion.chunk` object."""
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence) -> dict[str, Any] | None:
        if self.num_top_logprobs is None:
            return None
        return chat_logprobs(self.spelling, token_ids, logprobs, self.num_top_logprobs)


async def chat_events(
    group: GenerationGroup, answer: ChatAnswer, options: StreamOptions | None
) -> AsyncGenerator[bytes]:
    """The stream: a role chunk per choice, a chunk per delta, the usage if asked for, [DONE]."""
    with_usage = bool(options and options.include_usage)
    running_usage = bool(options and options.continuous_usage_stats)
    num_tokens = 0
    for index in range(group.n):
        chunk = _role_chunk(answer, group, index)
        if with_usage or running_usage:
            chunk["usage"] = group.usage(0, with_details=False) if running_usage else None
        yield encode_event(chunk)
    async for _, delta in group.deltas():
        num_tokens += len(delta.token_ids)
        if not (delta.text or delta.finish_reason or _tells_tokens(answer, delta)):
            continue
        chunk = answer.chunk([answer.delta_choice(delta)])
        if running_usage:
            chunk["usage"] = group.usage(num_tokens, with_details=False)
        elif with_usage:
            chunk["usage"] = None
        yield encode_event(chunk)
    if with_usage:
        yield encode_event({**answer.chunk([]), "usage": group.usage(num_tokens)})
    yield DONE


def _role_chunk(answer: ChatAnswer, group: GenerationGroup, index: int) -> dict[str, Any]:
    delta = {"role": "assistant", "content": ""}
    chunk = answer.chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
    if answer.with_token_ids:
        chunk["prompt_token_ids"] = group.generations[0].prompt_token_ids
    return chunk


def _tells_tokens(answer: ChatAnswer, delta: TextDelta) -> bool:
    """True when a delta without text still carries something the caller asked for."""
    return bool(delta.token_ids) and (answer.num_top_logprobs is not None or answer.with_token_ids)
