"""Closes every route when keys are set, and asks each key for the scope of the route.

Closed by default: a path that no rule here knows needs the scope `admin`, so a route that somebody
adds and forgets is shut and not open. The path is the one of the request line, never the Host.
Not for: where keys come from (`keys.py`).
"""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import Forbidden, OctavoError, Unauthorized
from octavo.server.errors import error_response
from octavo.server.exchange import exchange_of, route_path
from octavo.server.keys import Key, find

# Probes of orchestrators carry no key.
OPEN_PATHS: Final = frozenset(
    {
        *("/health", "/health/live", "/health/ready", "/health/progress", "/ping"),
        *("/v2/health/live", "/v2/health/ready"),
    }
)
ANY = ""  # any key will do
_EXACT: Final = {
    "/version": ANY,
    "/docs": ANY,
    "/openapi.json": ANY,
    "/metrics": "metrics",
    "/load": "metrics",
    "/v2/models/stats": "metrics",
    "/invocations": "inference",
    "/score": "inference",
    "/rerank": "inference",
    "/v2/rerank": "inference",
    "/tokenize": "inference",
    "/detokenize": "inference",
    "/v2": "inference",
    "/v2/repository/index": "inference",
}
_BELOW: Final = (("/v1/", "inference"), ("/v2/models/", "inference"))


def scope_of(path: str) -> str:
    """The scope that a path needs."""
    if path in _EXACT:
        return _EXACT[path]
    if path.startswith("/v2/models/") and path.endswith("/stats"):
        return "metrics"
    for start, scope in _BELOW:
        if path.startswith(start):
            return scope
    return "admin"


class Auth:
    """Lets through what carries `Authorization: Bearer KEY` with a key of the right scope."""

    def __init__(self, app: ASGIApp, keys: tuple[Key, ...]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if scope["type"] == "http" and path not in OPEN_PATHS:
            try:
                key = self._key(Headers(scope=scope))
                if not key.may(wanted := scope_of(path)):
                    raise Forbidden(f"The key lacks the scope {wanted}, needed by {path[:200]}.")
            except OctavoError as error:
                await error_response(error)(scope, receive, send)
                return
            exchange = exchange_of(scope)
            if exchange is not None:
                exchange.key = key
        await self._app(scope, receive, send)

    def _key(self, headers: Headers) -> Key:
        sent = headers.getlist("authorization")
        if len(sent) != 1:
            raise Unauthorized("Send one header `Authorization: Bearer KEY`.")
        scheme, _, text = sent[0].partition(" ")
        key = find(self._keys, text.strip().encode("latin-1"))
        if scheme.lower() != "bearer" or key is None:
            raise Unauthorized("The API key is wrong.")
        return key
