"""What every request passes: request id, counting, last-resort errors, keys, other origins.

Plain ASGI, so that nothing stands between a stream and its socket but one check of the message
type. Not for: errors that have a status (`errors.py`).
"""

from __future__ import annotations

import hmac
import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidRequest, OctavoError, Unauthorized
from octavo.log import Log
from octavo.server.context import Serving, request_id_of
from octavo.server.errors import ClientGone, error_response
from octavo.server.stream import PIECES_KEY

# Probes of orchestrators carry no key. Everything else is closed when a key is set.
OPEN_PATHS = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/health/progress", "/ping"),
        *("/v2/health/live", "/v2/health/ready"),
    }
)
# Counted by /load while they last.
GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/invocations"})
GENERATING_BELOW = "/v2/models/", ("/generate", "/generate_stream", "/infer")
# Asked for all the time and telling nothing: left out of the HTTP metrics.
UNCOUNTED = OPEN_PATHS | {"/metrics", "/load", "/version", "/server_info"}

log = Log(__name__)


def route_path(scope: Scope) -> str:
    """The path without the prefix that a proxy in front has removed."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _generates(path: str) -> bool:
    first, last = GENERATING_BELOW
    return path in GENERATING or (path.startswith(first) and path.endswith(last))


class Edge:
    """Outermost: gives each answer its request id, counts it, and catches what nobody foresaw."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(send)
        started = time.monotonic()
        generates = _generates(route_path(scope))
        self._serving.in_flight += generates
        try:
            limit = self._serving.settings.max_request_id_chars
            try:
                name = request_id_of(Headers(scope=scope), limit)
            except InvalidRequest as error:
                await error_response(error)(scope, receive, exchange.send)
                return
            exchange.request_id = (name or secrets.token_hex(16)).encode()
            await self._app(scope, receive, exchange.send)
        except ClientGone:
            pass  # nobody is there to read an answer
        except Exception as error:
            log.error("unexpected_error", path=scope["path"][:200], error=repr(error))
            if exchange.status:
                raise  # the server closes the connection, so the client sees that it was cut
            await error_response(error)(scope, receive, exchange.send)
        finally:
            self._serving.in_flight -= generates
            self._count(scope, exchange, time.monotonic() - started)

    def _count(self, scope: Scope, exchange: Exchange, seconds: float) -> None:
        route = scope.get("route")
        handler = route.path if route is not None else "none"
        if handler in UNCOUNTED:
            return
        pieces = scope.get("state", {}).get(PIECES_KEY)  # what a stream sent past this place
        declared = Headers(scope=scope).get("content-length", "")
        size = int(declared) if declared.isascii() and declared.isdigit() else 0
        self._serving.engine.metrics.http.count(
            method=scope["method"] if handler != "none" else "any",
            status=exchange.status or 499,  # the client went away before an answer
            handler=handler,
            seconds=seconds,
            request_bytes=size,
            response_bytes=exchange.size + (0 if pieces is None else pieces.sent),
        )


class Exchange:
    """Watches one answer go out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.request_id = b""
        self.status = 0
        self.size = 0

    async def send(self, message: Message) -> None:
        """Passes a message on; the first one gets the request id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.request_id:
                extra = (b"x-request-id", self.request_id)
                message = {**message, "headers": [*message.get("headers", []), extra]}
        else:
            self.size += len(message.get("body", b""))
        await self._send(message)


class Auth:
    """Closes all routes but the probes when keys are set. Bearer keys, compared in equal time."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and route_path(scope) not in OPEN_PATHS:
            try:
                self._check(Headers(scope=scope))
            except OctavoError as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, headers: Headers) -> None:
        sent = headers.getlist("authorization")
        if len(sent) != 1:
            raise Unauthorized("Send one header `Authorization: Bearer KEY`.")
        scheme, _, key = sent[0].partition(" ")
        given = key.strip().encode("latin-1")
        matches = [hmac.compare_digest(given, one) for one in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("The API key is wrong.")
