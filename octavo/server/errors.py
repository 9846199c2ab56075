"""Errors as OpenAI's clients expect them: `{"error": {message, type, param, code}}`.

`code` is the HTTP status as a number. Not for: deciding what is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import (
    ClientError,
    InvalidRequest,
    NotFound,
    OctavoError,
    Overloaded,
    ServerError,
    TooLarge,
)
from octavo.foreign import ROUTES
from octavo.log import Log

log = Log(__name__)

LIST_PART = 2**15  # items of a long list that are encoded at a time
RETRY_SECONDS = 1.0  # for refusals that have no estimate of their own


class UnavailableError(ServerError):
    """503: the engine cannot take requests now, for instance because the model is loading."""

    status = 503
    kind = "ServiceUnavailableError"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ClientGone(Exception):
    """The client closed the connection or stopped reading; there is nobody to answer."""


def error_body(
    message: str, *, kind: str, status: int, param: str | None = None
) -> dict[str, object]:
    """The body of an error answer, also the payload of an error event in a stream."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def describe(error: Exception) -> dict[str, object]:
    """The error body of any exception; the text of an unforeseen one stays in the log."""
    if isinstance(error, OctavoError):
        param = error.param if isinstance(error, ClientError) else None
        return error_body(error.message, kind=error.kind, status=error.status, param=param)
    return error_body("Internal server error.", kind="InternalServerError", status=500)


@contextmanager
def named_as_sent(names: Mapping[str, str]) -> Iterator[None]:
    """Within it, InvalidRequest speaks of fields by the client's names; `names`: ours to theirs."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message
        for ours, theirs in names.items():
            message = re.sub(rf"\b{ours}\b", theirs, message)
        raise InvalidRequest(message, names.get(error.param or "", error.param)) from None


def retry_header(seconds: float) -> dict[str, str]:
    """Whole seconds, at least 1: clients read no fractions."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def error_response(error: Exception) -> Response:
    """The answer to a request that failed before its first byte."""
    status = error.status if isinstance(error, OctavoError) else 500
    headers: dict[str, str] = {}
    if isinstance(error, (Overloaded, UnavailableError)):
        headers = retry_header(error.retry_after)
    elif status == 503:
        headers = retry_header(RETRY_SECONDS)
    elif status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    elif isinstance(error, TooLarge):
        headers = {"Connection": "close"}  # the rest of the body is not read
    return json_response(describe(error), status=status, headers=headers)


def json_response(
    content: object, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON answer. Numbers that JSON does not have become null."""
    body = msgspec.json.encode(content)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def json_list(items: Sequence[object]) -> msgspec.Raw:
    """A long list as JSON, in parts: a thread that makes it lets others have their turn."""
    parts = [
        msgspec.json.encode(list(items[start : start + LIST_PART]))[1:-1]
        for start in range(0, len(items), LIST_PART)
    ]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


async def on_octavo_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    assert isinstance(error, OctavoError)
    if error.status >= 500:
        log.warning("request_failed", path=request.url.path, error=error.message)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler for what the router refuses: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path[:200], request.method
    if error.status_code == 404 and path in ROUTES:
        return error_response(NotFound(f"{path} is not served here: {ROUTES[path]}."))
    if error.status_code == 404:
        return error_response(NotFound(f"There is no route {path}. GET /docs lists all."))
    message = f"{error.detail}: {method} {path}"
    body = error_body(message, kind="BadRequestError", status=error.status_code)
    return json_response(body, status=error.status_code, headers=dict(error.headers or {}))
