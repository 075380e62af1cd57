"""One streamed completion from an OpenAI-compatible server, timed as its client sees it."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from jaxserve.bench.timing import RequestTiming
from jaxserve.bench.workload import Planned


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a request gave no full answer, in few words, so that equal failures can be counted."""

    reason: str


class _BrokenStream(Exception):
    """The answer began and did not end as it should."""


@dataclass(slots=True)
class _Seen:
    """What a stream told so far. `usage` is what the server counted, None where it does not say."""

    arrivals: list[float]
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None


def open_client(base_url: str, *, api_key: str | None, timeout_seconds: float) -> httpx.AsyncClient:
    """A client without a limit on connections. Proxies named in the environment are not used."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.AsyncClient(
        base_url=base_url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=timeout_seconds,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )


async def complete(client: httpx.AsyncClient, model: str, request: Planned) -> RequestTiming | Failure:
    """Sends one request and reads its stream to the end. Never raises for what the server or the network does."""
    body = request_body(model, request)
    sent = time.perf_counter()
    seen = _Seen([])
    try:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return Failure(reason=f"HTTP {response.status_code} {_error_word(await response.aread())}".strip())
            await _read(response.aiter_lines(), seen)
    except httpx.TimeoutException:
        return Failure(reason="timeout")
    except httpx.HTTPError as error:
        return Failure(reason=f"connection: {type(error).__name__}")
    except _BrokenStream as error:
        return Failure(reason=str(error))
    return _timing(sent, seen, request)


def request_body(model: str, request: Planned) -> dict[str, Any]:
    """The completion to post: token ids or text in, exactly output_len tokens out, streamed."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_token_ids if request.text is None else request.text,
        "max_tokens": request.output_len,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if request.banned_token_ids:
        body["logit_bias"] = {str(token_id): -100 for token_id in request.banned_token_ids}
    return body


async def first_model(client: httpx.AsyncClient) -> str:
    """The first model the server lists. Raises httpx.HTTPError, or ValueError for an answer without one."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    return response.json()["data"][0]["id"]


async def _read(lines: AsyncIterator[str], seen: _Seen) -> None:
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        _note_event(_parsed(data), seen)
    raise _BrokenStream("stream ended without [DONE]")


def _parsed(data: str) -> Mapping[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise _BrokenStream("event is no JSON") from None
    if not isinstance(event, dict):
        raise _BrokenStream("event is no JSON object")
    return event


def _note_event(event: Mapping[str, Any], seen: _Seen) -> None:
    if event.get("error"):
        raise _BrokenStream(f"error event {_word(event['error'])}".strip())
    if event.get("usage"):
        seen.usage = event["usage"]
    if event.get("choices"):
        seen.finish_reason = event["choices"][0].get("finish_reason") or seen.finish_reason
    # A chunk without text brings no token a reader sees, except that an answer may be all special tokens.
    if event.get("choices") and (event["choices"][0].get("text") or not seen.arrivals):
        seen.arrivals.append(time.perf_counter())


def _timing(sent: float, seen: _Seen, request: Planned) -> RequestTiming | Failure:
    if not seen.arrivals:
        return Failure(reason="answer without a token")
    usage = seen.usage or {}
    # A server that does not count says at least that the limit ended the answer; increments may hold several tokens.
    counted = request.output_len if seen.finish_reason == "length" else len(seen.arrivals)
    return RequestTiming(
        sent=sent,
        arrivals=tuple(seen.arrivals),
        num_prompt_tokens=usage.get("prompt_tokens", len(request.prompt_token_ids)),
        num_output_tokens=usage.get("completion_tokens", counted),
    )


def _error_word(body: bytes) -> str:
    """The code or type in an OpenAI error body, or nothing."""
    try:
        return _word(json.loads(body).get("error"))
    except (ValueError, AttributeError):
        return ""


def _word(error: object) -> str:
    if not isinstance(error, dict):
        return ""
    return str(error.get("code") or error.get("type") or "")[:60]
