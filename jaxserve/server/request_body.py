"""A request's JSON body, read with a size limit and checked against its model, with errors that name the field."""

import reprlib
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from jaxserve.errors import InvalidRequest
from jaxserve.server.error_responses import BodyTooLarge, UnsupportedBody
from jaxserve.server.serving import serving_of


async def read_request[T: BaseModel](request: Request, model: type[T]) -> T:
    """The validated body. Raises InvalidRequest (wrong JSON, type or field), BodyTooLarge or UnsupportedBody."""
    return validated(await read_json(request), model)


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object. NaN, Infinity, lone surrogates and very deep nesting are refused.

    Only application/json is taken: browsers may send other types to a local server from any page without asking.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        found = repr(content_type) if content_type else "missing"
        raise UnsupportedBody(f"content type is {found}; send 'Content-Type: application/json'")
    body = await read_bytes(request, serving_of(request).options.max_body_bytes)
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {reprlib.repr(value)}")
    return value


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The whole body; stops at the limit, announced by Content-Length or counted while chunks arrive."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise BodyTooLarge(f"the body has {announced} bytes; this server accepts {max_bytes}")
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes, which is what this server accepts")
        chunks.append(chunk)
    return b"".join(chunks)


def validated[T: BaseModel](value: dict[str, Any], model: type[T]) -> T:
    """`value` as `model`. Raises InvalidRequest for the first wrong field, naming it in message and param."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _invalid_field(error.errors(include_url=False)[0]) from None


def _invalid_field(detail: ErrorDetails) -> InvalidRequest:
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown or unsupported field {where!r}", param=where)
    if detail["type"] == "missing":
        return InvalidRequest(f"field {where!r} is required", param=where)
    if detail["type"] == "too_short":
        return InvalidRequest(f"{where} must not be empty", param=where)
    expected = detail["msg"].removeprefix("Input should be ")
    return InvalidRequest(f"{where} must be {expected}, got {reprlib.repr(detail['input'])}", param=where)
