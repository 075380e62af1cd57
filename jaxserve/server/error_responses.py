"""Every error as an HTTP answer in OpenAI's form: {"error": {"message", "type", "param", "code"}}.

`describe` is the one place that maps errors to a status. No message carries a stack trace.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jaxserve.errors import (
    EngineDied,
    InvalidRequest,
    JaxserveError,
    ModelNotFound,
    Overloaded,
    PromptTooLong,
    ShuttingDown,
)

SHUTDOWN_RETRY_AFTER_SECONDS = 5
CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it, it only shows in logs and metrics


class BodyTooLarge(InvalidRequest):
    """The request body exceeds ServerOptions.max_body_bytes (HTTP 413)."""


class UnsupportedBody(InvalidRequest):
    """The request body is declared as something other than JSON (HTTP 415)."""


class WrongApiKey(JaxserveError):
    """The request has no API key or one this server does not know (HTTP 401)."""


class GenerationFailed(JaxserveError):
    """The engine ended one request with finish_reason "error" while it goes on serving others (HTTP 500)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorAnswer:
    """An error as it goes over the wire."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_seconds: int | None = None

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Retry-After and WWW-Authenticate where the status asks for them."""
        if self.retry_after_seconds is not None:
            return {"Retry-After": str(self.retry_after_seconds)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def describe(error: BaseException) -> ErrorAnswer:
    """Status, type and code for any error. What is not one of ours is a 500 that says nothing of the inside."""
    for kind, status, type_name, code in _ANSWERS:
        if isinstance(error, kind):
            retry = getattr(error, "retry_after_seconds", None)
            if isinstance(error, ShuttingDown):
                retry = SHUTDOWN_RETRY_AFTER_SECONDS
            message, param = _first_line(error), getattr(error, "param", None)
            param = "model" if isinstance(error, ModelNotFound) else param
            return ErrorAnswer(
                status=status, type=type_name, message=message, param=param, code=code, retry_after_seconds=retry
            )
    return ErrorAnswer(
        status=500, type="server_error", message="internal error; the server's log has the details", code="internal"
    )


_ANSWERS: tuple[tuple[type[JaxserveError], int, str, str | None], ...] = (
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (UnsupportedBody, 415, "invalid_request_error", "unsupported_media_type"),
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidRequest, 400, "invalid_request_error", None),
    (WrongApiKey, 401, "authentication_error", "invalid_api_key"),
    (ModelNotFound, 404, "not_found_error", "model_not_found"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (ShuttingDown, 503, "service_unavailable_error", "shutting_down"),
    (EngineDied, 500, "server_error", "engine_died"),
    (GenerationFailed, 500, "server_error", "generation_failed"),
)


def install_error_answers(app: FastAPI) -> None:
    """Makes every error of this app answer in OpenAI's form."""
    app.add_exception_handler(JaxserveError, answer_error)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(ClientDisconnect, answer_disconnected)
    app.add_exception_handler(Exception, answer_error)


async def answer_error(request: Request, error: Exception) -> Response:
    """The answer for one of our errors, or the 500 for a defect (uvicorn logs its trace)."""
    answer = describe(error)
    return JSONResponse(answer.body(), status_code=answer.status, headers=answer.headers())


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the same form."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"no such path: {request.url.path}",
        405: f"{request.method} is not allowed on {request.url.path}",
    }.get(error.status_code, HTTPStatus(error.status_code).phrase)
    answer = ErrorAnswer(status=error.status_code, type="invalid_request_error", message=message)
    return JSONResponse(answer.body(), status_code=answer.status, headers=error.headers)


async def answer_disconnected(request: Request, error: Exception) -> Response:
    """An empty answer to nobody."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _first_line(error: BaseException) -> str:
    """The first line of a message: causes of an engine's death may carry XLA dumps."""
    return (str(error).splitlines() or [type(error).__name__])[0][:1000]
