"""The HTTP/1.1 protocol with limits: uvicorn's, which has none of its own for these things.

Request line over the limit: 414. Headers over the limit in bytes or number: 431. A head that is
not complete in time, or a body that stops coming: 408. Not exactly one Host, or what the parser
cannot read: 400. Each closes the connection, once the requests sent before have their answers. An
upgrade that is offered (h2c, which some clients
always offer) is not taken, and the request answered as if it were not there (RFC 9110 7.8). Also
lends each request a way to drop its connection with all that is still buffered, for readers that
do not read. Not for: bodies' size (`body.py`).
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from octavo.server.errors import error_body
from octavo.server.settings import HttpLimits
from octavo.server.stream import ABORT_KEY, PIECES_KEY

_TEXTS = {
    400: "The request is not HTTP/1.1.",
    408: "The request was not sent in time.",
    414: "The request line is longer than the limit.",
    431: "The headers are more or longer than the limit.",
    505: "The request is not HTTP/1.1 or HTTP/1.0.",
}
_BODY_HEADERS = (b"content-length", b"transfer-encoding")


class _Refused(Exception):
    """Stops the parser."""


class Pieces:
    """Writes pieces of one answer's body without a task, as long as the socket takes them."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self.sent = 0  # bytes

    def write(self, data: bytes) -> bool:
        """True if the piece is on its way; False where one has to wait, or nobody listens."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or not cycle.response_started:
            return False
        if cycle.chunked_encoding:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._transport.write(data)
        self.sent += len(data)
        return True


class LimitedProtocol(HttpToolsProtocol):
    """One connection. uvicorn's `http` setting takes it with the limits bound to it."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: HttpLimits,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._in_head = True
        self._head_bytes = 0  # received while the head was not complete
        self._header_bytes = 0
        self._status = 400  # of a refusal
        self._reason = ""
        self._owed: tuple[int, str] | None = None  # a refusal that waits for answers before it
        self._in_body = False  # of the request that `cycle` answers
        self._replaying = False  # a head is parsed a second time
        self._running: RequestResponseCycle | None = None  # the request that is being answered
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._wait(self._limits.head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)  # tells the newest request only
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._owed is not None:
            return  # nothing after the refused request is read
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(self._status, self._reason or _reason_of(error))
            return
        if self.transport.is_closing():
            return
        if not self._in_head:
            if self._timer is not None:
                self._wait(self._limits.idle_timeout)
            return
        # Counted here as well, because the parser keeps an unfinished header to itself.
        self._head_bytes += len(data)
        if self._head_bytes > self._limits.max_target_bytes + self._limits.max_header_bytes:
            self._refuse(431 if self.headers else 414)

    def _decline(self, rest: bytes) -> None:
        """Goes on with a request that offered an upgrade; the parser has stopped after its head."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] in _BODY_HEADERS]
        self._replaying = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(lines) + b"\r\n")
        self._replaying = False
        if rest:
            self.data_received(rest)

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        super().on_message_begin()
        self.scope["state"][ABORT_KEY] = self.transport.abort
        self._in_head, self._head_bytes, self._header_bytes = True, 0, 0
        self._wait(self._limits.head_timeout)

    def on_url(self, url: bytes) -> None:
        if self._replaying:
            return
        super().on_url(url)
        if len(self.url) > self._limits.max_target_bytes:
            self._stop_parser(414)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying:
            return
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        too_many = len(self.headers) > self._limits.max_headers
        if too_many or self._header_bytes > self._limits.max_header_bytes:
            self._stop_parser(431)

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._stop_parser(505)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            self._stop_parser(400, f"The request has {hosts} Host headers; send one.")
        self._in_head = False
        self._wait(self._limits.idle_timeout)
        super().on_headers_complete()
        self._in_body = True
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope:
            self.scope["state"][PIECES_KEY] = Pieces(cycle)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # the parser has not looked for a body; see `_decline`
        self._in_body = False
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        was_last = not self.pipeline
        super().on_response_complete()
        if was_last and self._owed is not None and not self.transport.is_closing():
            self._tell(*self._owed)
            self.transport.close()

    def _stop_parser(self, status: int, reason: str = "") -> None:
        self._status, self._reason = status, reason
        raise _Refused

    def _refuse(self, status: int, reason: str = "") -> None:
        """Answer in the API's own form and close, when the requests before have their answers."""
        cycle, in_body = self.cycle, self._in_body
        if in_body and self.pipeline:
            self.pipeline.popleft()  # the refused request itself, which has not begun
            self._owe(status, reason)
            return
        if not in_body and cycle is not None and not cycle.response_complete:
            self._owe(status, reason)
            return
        if not in_body or not cycle.response_started:
            self._tell(status, reason)
        self.transport.close()

    def _owe(self, status: int, reason: str) -> None:
        self._stop_waiting()
        self._owed = status, reason

    def _tell(self, status: int, reason: str) -> None:
        told = error_body(reason or _TEXTS[status], kind="BadRequestError", status=status)
        body = msgspec.json.encode(told)
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: "
            + b"%d\r\n\r\n" % len(body)
            + body
        )

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # it is we who do not read
            self._wait(self._limits.idle_timeout)
        else:
            self._refuse(408)


def _reason_of(error: Exception) -> str:
    """What the parser did not like; empty if it was a refusal of ours."""
    if isinstance(error.__context__, _Refused):
        return ""
    said = str(error).strip().rstrip(".")[:200]
    return f"The request is no valid HTTP: {said}." if said else ""
