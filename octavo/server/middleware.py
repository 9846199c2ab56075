"""What every request passes: request id, counting, timeline and log, last-resort errors.

Plain ASGI, so that nothing stands between a stream and its socket but one check of the message
type. Not for: errors that have a status (`errors.py`).
"""

from __future__ import annotations

import secrets
import time

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import InvalidRequest
from octavo.log import Log
from octavo.obs.timeline import log_fields
from octavo.server.auth import OPEN_PATHS
from octavo.server.context import Serving, request_id_of
from octavo.server.errors import ClientGone, error_response
from octavo.server.exchange import EXCHANGE_KEY, Exchange, route_path
from octavo.server.stream import PIECES_KEY

# Counted by /load while they last.
GENERATING = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
        *("/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/invocations"),
    }
)
GENERATING_BELOW = (
    ("/v2/models/", ("/generate", "/generate_stream", "/infer")),
    ("/v1/requests/", ("/stream",)),
)
# Asked for all the time and telling nothing: left out of the HTTP metrics.
UNCOUNTED = OPEN_PATHS | {"/metrics", "/load", "/version", "/server_info"}

log = Log(__name__)


def _generates(path: str) -> bool:
    return path in GENERATING or any(
        path.startswith(first) and path.endswith(last) for first, last in GENERATING_BELOW
    )


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
        scope.setdefault("state", {})[EXCHANGE_KEY] = exchange
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
            self._count(scope, exchange, time.monotonic() - exchange.began)
            if generates:
                self._write_down(scope, exchange)

    def _write_down(self, scope: Scope, exchange: Exchange) -> None:
        """Ends the timeline of a request that generates, and logs it where that is asked for."""
        timeline = exchange.timeline
        if timeline is not None:
            timeline.status = exchange.status or 499
            timeline.finished = time.monotonic()
        if not self._serving.settings.log_requests:
            return
        if timeline is not None:
            log.info("request", **log_fields(timeline))
            return
        seconds = time.monotonic() - exchange.began
        log.info(
            "request",
            id=exchange.request_id.decode() or "-",
            route=route_path(scope)[:200],
            tenant="-" if exchange.key is None else exchange.key.name,
            status=exchange.status or 499,
            total_ms=round(1000 * seconds, 3),
        )

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
