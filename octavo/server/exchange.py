"""One request and its answer as seen from the edge: what handlers and middleware tell each other.

Not for: the request's content.
"""

from __future__ import annotations

import time

from starlette.types import Message, Scope, Send

from octavo.obs.timeline import Timeline
from octavo.server.keys import Key

EXCHANGE_KEY = "octavo.exchange"  # in scope["state"]


class Exchange:
    """Watches one answer go out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.began = time.monotonic()
        self.request_id = b""
        self.status = 0
        self.size = 0
        self.key: Key | None = None  # None where no key is asked for
        self.timeline: Timeline | None = None  # of a request that generates

    async def send(self, message: Message) -> None:
        """Passes a message on; the first one gets the request id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.request_id:
                extra = (b"x-request-id", self.request_id)
                message = {**message, "headers": [*message.get("headers", []), extra]}
        else:
            self.size += len(message.get("body", b""))
        if self.timeline is None:
            await self._send(message)
            return
        began = time.monotonic()
        await self._send(message)
        self.timeline.flush += time.monotonic() - began


def exchange_of(scope: Scope) -> Exchange | None:
    """The exchange that the edge has begun for a request."""
    found = scope.get("state", {}).get(EXCHANGE_KEY)
    return found if isinstance(found, Exchange) else None


def route_path(scope: Scope) -> str:
    """The path without the prefix that a proxy in front has removed."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
