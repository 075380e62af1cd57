"""`ChatTemplate`: messages to the prompt text a model was trained on, by the Jinja template it ships.

A template is code from a model file: it runs in Jinja's immutable sandbox, with limits on loops, repetition and output.
Its conventions (trimmed blocks, `tojson` without HTML escapes, `raise_exception`, `{% generation %}`) are those of the
transformers library, for which templates are written.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, final

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import ChatTemplateError

MAX_RENDERED_CHARS = 64 * 1024 * 1024
MAX_RANGE_ITEMS = 1_000_000  # over one rendering, all loops together
MAX_REPEATED_ITEMS = 1_000_000  # of `"x" * n` and `[x] * n`
NONCHARACTERS = tuple(chr(c) for c in range(0xFDD0, 0xFDF0))  # never part of real text


@final
class ChatTemplate:
    """A compiled chat template. Raises ChatTemplateError for a source that is not valid Jinja.

    bos_token and eos_token are the texts the template may print; pass "" for a model without one.
    """

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self.uses_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except Exception as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {_one_line(error)}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of messages.

        add_generation_prompt ends it with the header of the assistant's turn. continue_final_message leaves the last
        message open instead, so that the model goes on writing it, and implies no generation prompt. Further keywords
        reach the template as variables. Raises ChatTemplateError, in one line, for whatever goes wrong.
        """
        messages = _checked(messages)
        variables = {**kwargs, **self._tokens, "tools": tools, "documents": kwargs.get("documents")}
        if not continue_final_message:
            return self._run({**variables, "messages": messages, "add_generation_prompt": add_generation_prompt})
        cursor = unused_character(messages, tools, kwargs)
        marked, trailing = _with_cursor(messages, cursor)
        text = self._run({**variables, "messages": marked, "add_generation_prompt": False})
        return _cut_at(text, cursor, trailing)

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return _join_bounded(self._template.generate(variables, range=_RangeBudget()))
        except TemplateError as error:
            raise ChatTemplateError(f"the chat template refused the messages: {_one_line(error)}") from error
        except Exception as error:
            detail = f"{type(error).__name__}: {_one_line(error)}"
            raise ChatTemplateError(f"the chat template failed on these messages: {detail}") from error


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """messages as templates expect them, which is how the transformers library hands them over.

    Without `content: null` (an assistant turn of tool calls only), and with `reasoning_content`, the name clients use,
    also under the name `thinking`, which some templates use.
    """
    if not messages:
        raise ChatTemplateError("messages is empty; send at least one message", param="messages")
    if not all(isinstance(message, dict) for message in messages):
        raise ChatTemplateError("every message must be an object with a role and content", param="messages")
    checked = [{key: v for key, v in message.items() if key != "content" or v is not None} for message in messages]
    return [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in checked]


def unused_character(*values: object) -> str:
    """A Unicode noncharacter that occurs in none of the strings inside values, to mark positions in them."""
    used: set[str] = set()
    for text in strings_in(values):
        used.update(char for char in NONCHARACTERS if char in text)
    free = next((char for char in NONCHARACTERS if char not in used), None)
    if free is None:
        raise ChatTemplateError("messages contain all noncharacters U+FDD0 to U+FDEF; remove one", param="messages")
    return free


def strings_in(value: object) -> Iterator[str]:
    """Every string inside nested lists, tuples and dicts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _with_cursor(messages: list[dict[str, Any]], cursor: str) -> tuple[list[dict[str, Any]], str]:
    """messages with a cursor after the last visible character of the last one, and the blanks that follow it there."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        text, trailing = _put_cursor(content, cursor)
        return [*messages[:-1], {**last, "content": text}], trailing
    parts = list(content) if isinstance(content, list | tuple) else []
    for n in reversed(range(len(parts))):
        if isinstance(parts[n], dict) and isinstance(parts[n].get("text"), str):
            text, trailing = _put_cursor(parts[n]["text"], cursor)
            parts[n] = {**parts[n], "text": text}
            return [*messages[:-1], {**last, "content": parts}], trailing
    raise ChatTemplateError("continue_final_message needs text in the last message", param="messages")


def _put_cursor(text: str, cursor: str) -> tuple[str, str]:
    body = text.rstrip()
    return body + cursor + text[len(body) :], text[len(body) :]


def _cut_at(text: str, cursor: str, trailing: str) -> str:
    """text up to the cursor, with the blanks after it if the template kept them."""
    body, found, rest = text.rpartition(cursor)
    if not found:
        raise ChatTemplateError("continue_final_message: this chat template drops the last message", param="messages")
    return body.replace(cursor, "") + (trailing if rest.startswith(trailing) else "")


def _join_bounded(chunks: Iterator[str]) -> str:
    parts: list[str] = []
    num_chars = 0
    for chunk in chunks:
        parts.append(chunk)
        num_chars += len(chunk)
        if num_chars > MAX_RENDERED_CHARS:
            raise SecurityError(f"the prompt exceeds {MAX_RENDERED_CHARS:,} characters")
    return "".join(parts)


class _RangeBudget:
    """`range` for one rendering; all its loops together may run over MAX_RANGE_ITEMS items."""

    def __init__(self) -> None:
        self._left = MAX_RANGE_ITEMS

    def __call__(self, *bounds: int) -> range:
        items = range(*bounds)
        self._left -= len(items)
        if self._left < 0:
            raise SecurityError(f"range() over more than {MAX_RANGE_ITEMS:,} items")
        return items


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with repetition bounded: `"x" * 10**12` would otherwise take all memory."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if abs(right) > 1024 or abs(left) > 2**64:
                raise SecurityError("power with a large operand")
            return left**right
        for items, times in ((left, right), (right, left)):
            if isinstance(items, str | list | tuple) and isinstance(times, int):
                _check_repetition(len(items), times)
        return left * right


def _check_repetition(num_items: int, times: int) -> None:
    if num_items * times > MAX_REPEATED_ITEMS:
        raise SecurityError(f"repetition to more than {MAX_REPEATED_ITEMS:,} items")


class _GenerationBlock(Extension):
    """`{% generation %}`: marks the assistant's tokens for training masks; here its body is simply printed."""

    tags = {"generation"}  # noqa: RUF012  (the name and type are Jinja's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # prints as much nonsense as it is told to
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
