"""From the prompt forms of a request (messages, texts, token ids) to token ids.

Tokenizer calls run outside the event loop: a long prompt must not stall the streams of others.
"""

import json
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool

from jaxserve.errors import InvalidRequest
from jaxserve.server.protocol import ChatMessage, TemplateFields
from jaxserve.server.serving import ServedFrontend

_PROMPT_FORMS = "must be a string, a list of token ids, or a non-empty list of either"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt of a completion request; text is what the caller sent, None when it sent token ids."""

    text: str | None
    token_ids: list[int]


async def chat_prompt(frontend: ServedFrontend, body: TemplateFields, *, with_tools: bool = True) -> list[int]:
    """The token ids of a chat. Raises InvalidRequest or ChatTemplateError."""
    kwargs = dict(body.chat_template_kwargs or {})
    kwargs["add_generation_prompt"] = (
        not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    )
    if body.continue_final_message:
        kwargs["continue_final_message"] = True
    if body.tools and with_tools:
        kwargs["tools"] = body.tools
    messages = [template_message(message) for message in body.messages]
    return await run_in_threadpool(frontend.encode_chat, messages, **kwargs)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: arguments of tool calls as objects, where OpenAI sends JSON text."""
    plain = {"role": message.role, "content": message.content, **(message.model_extra or {})}
    if plain.get("tool_calls"):
        plain["tool_calls"] = [_with_parsed_arguments(call) for call in _list_of_dicts(plain["tool_calls"])]
    return plain


async def completion_prompts(
    frontend: ServedFrontend, prompt: object, add_special: bool, *, field: str = "prompt"
) -> list[Prompt]:
    """The prompts of a request, in order. Raises InvalidRequest for any other form. field: where they stood."""
    given = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    return [await _one_prompt(frontend, item, add_special, field) for item in given]


async def _one_prompt(frontend: ServedFrontend, item: object, add_special: bool, field: str) -> Prompt:
    if isinstance(item, str):
        return Prompt(text=item, token_ids=await encode_text(frontend, item, add_special))
    if isinstance(item, list) and any(isinstance(value, int) and value < 0 for value in item):
        raise InvalidRequest(f"{field}: token ids are 0 or more, got {min(item)}", param=field)
    if not isinstance(item, list) or not item or not all(map(_is_id, item)):
        raise InvalidRequest(f"{field} {_PROMPT_FORMS}; got {item!r:.100}", param=field)
    return Prompt(text=None, token_ids=item)


async def encode_text(frontend: ServedFrontend, text: str, add_special: bool) -> list[int]:
    """Token ids of a text, with or without the tokens the tokenizer adds by itself."""
    if add_special or frontend.tokenizer is None:
        return await run_in_threadpool(frontend.encode_prompt, text)
    return await run_in_threadpool(frontend.tokenizer.encode, text, add_special=False)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _list_of_dicts(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest("tool_calls must be a list of objects", param="messages")
    return calls


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequest("tool_calls: function.arguments is not valid JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
