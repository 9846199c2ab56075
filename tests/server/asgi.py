"""Drives an ASGI application in process, with a client that can leave or stop reading."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from tests.server.fake_engine import strict_loads


@dataclass
class Reply:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return strict_loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after a check of its shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["code"] == self.status
        assert error["message"]
        assert error["type"]
        return error  # type: ignore[no-any-return]

    @property
    def events(self) -> list[Any]:
        """Parsed events; the closing one is the text `[DONE]`. Comments are left out."""
        assert self.headers["content-type"].startswith("text/event-stream")
        text = self.body.decode()
        assert text.endswith("\n\n")
        found = []
        for block in text.split("\n\n")[:-1]:
            if block.startswith(":"):
                continue
            assert block.startswith("data: ")
            assert "\n" not in block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else strict_loads(data))
        return found


class Exchange:
    """One request and its answer."""

    def __init__(
        self,
        app: ASGIApp,
        method: str,
        path: str,
        *,
        body: bytes = b"",
        headers: dict[str, str] | list[tuple[str, str]] | None = None,
        pieces: int = 1,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.reply = Reply()
        self.gone = asyncio.Event()
        self.reads = asyncio.Event()  # cleared: the client reads nothing more
        self.reads.set()
        self.news = asyncio.Event()
        size = max(1, -(-len(body) // pieces))
        cuts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        self._incoming = [
            {"type": "http.request", "body": cut, "more_body": place + 1 < len(cuts)}
            for place, cut in enumerate(cuts)
        ]
        pairs = headers.items() if isinstance(headers, dict) else headers or []
        target, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": target,
            "raw_path": target.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": state or {},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._incoming:
            return self._incoming.pop(0)
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.reads.wait()
        reply = self.reply
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            reply.parts.append(message.get("body", b""))
            reply.complete = not message.get("more_body", False)
        self.news.set()

    async def until_events(self, count: int) -> None:
        """Waits until so many parts have come."""
        while len(self.reply.parts) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 5)

    async def end(self) -> Reply:
        """The whole answer."""
        await asyncio.wait_for(self.task, 20)
        return self.reply


async def call(
    app: ASGIApp,
    method: str,
    path: str,
    payload: Any = None,
    *,
    raw: bytes | None = None,
    headers: dict[str, str] | list[tuple[str, str]] | None = None,
    pieces: int = 1,
) -> Reply:
    """Send and wait for the whole answer; `payload` goes as JSON unless `raw` is given."""
    body = raw if raw is not None else b"" if payload is None else json.dumps(payload).encode()
    exchange = Exchange(app, method, path, body=body, headers=headers, pieces=pieces)
    return await exchange.end()


async def chat(app: ASGIApp, content: str = "Hi", **fields: Any) -> Reply:
    """A chat request with one user message."""
    body = {"messages": [{"role": "user", "content": content}], **fields}
    return await call(app, "POST", "/v1/chat/completions", body)


async def complete(app: ASGIApp, prompt: Any = "The owls", **fields: Any) -> Reply:
    """A completion request."""
    return await call(app, "POST", "/v1/completions", {"prompt": prompt, **fields})
