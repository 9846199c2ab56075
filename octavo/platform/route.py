"""A small router over engines: by their load and by the beginnings of prompts that they have seen.

Requests and answers are passed on as bytes. What an engine refuses or does not answer goes to the
next one, as long as nothing was sent to the client. Not for: keys, limits or other models' servers
(LiteLLM's proxy, `gateway.py`), resuming streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import blake2b

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ASK_SECONDS = 0.5
BEGINNING = 512  # bytes of a prompt by which it is known
REMEMBERED = 20_000  # beginnings
EXTRA = 4  # requests more than the least loaded has, up to which a known beginning wins
PASSED_BY = ("host", "content-length", "connection", "accept-encoding", "transfer-encoding")
HELD_BACK = ("content-length", "connection", "transfer-encoding", "date", "server")
TRY_NEXT = (429, 502, 503)
BROKEN = {"message": "the engine ended before the answer did", "type": "server_error"}


@dataclass(slots=True)
class Backend:
    """One engine, as it was when it was last asked."""

    url: str
    weight: float = 1.0
    ready: bool = False
    load: int = 0  # requests that it serves, of all clients
    sent: int = 0  # of ours that have not ended
    told: int = 0  # of ours when `load` was told
    taken: int = 0  # of ours in all, by which equals take turns

    @property
    def work(self) -> float:
        """What it has to do, by its weight."""
        return max(self.load + self.sent - self.told, self.sent) / self.weight


@dataclass(slots=True)
class Router:
    """Which engine gets a request."""

    backends: list[Backend]
    seen: OrderedDict[bytes, Backend] = field(default_factory=OrderedDict)

    def order(self, beginning: bytes) -> list[Backend]:
        """The engines to try: the one that knows the beginning if it is not much busier, then by
        load. Those that are not ready come last, in case they are again."""
        ranked = sorted(self.backends, key=lambda one: (not one.ready, one.work, one.taken))
        known = self.seen.get(beginning)
        if known is not None and known.ready and known.work <= ranked[0].work + EXTRA:
            ranked.remove(known)
            ranked.insert(0, known)
        return ranked

    def remember(self, beginning: bytes, backend: Backend) -> None:
        """Its cache holds the beginning now."""
        self.seen[beginning] = backend
        self.seen.move_to_end(beginning)
        if len(self.seen) > REMEMBERED:
            self.seen.popitem(last=False)


def beginning_of(body: bytes) -> bytes:
    """The first bytes of a request's prompt or messages, hashed; of other bodies, empty."""
    try:
        tree = json.loads(body)
    except ValueError:
        return b""
    prompt = tree.get("messages") or tree.get("prompt") if isinstance(tree, dict) else None
    if not prompt:
        return b""
    text = json.dumps(prompt, ensure_ascii=False)[:BEGINNING]
    return blake2b(text.encode(), digest_size=16).digest()


class Application:
    """The ASGI application: everything is passed on, but the router's own health."""

    def __init__(self, backends: list[Backend]) -> None:
        self.router = Router(backends)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        patience = httpx.Timeout(None, connect=3.0)
        self._client = httpx.AsyncClient(limits=limits, timeout=patience)
        methods = ["GET", "POST"]
        self.app = Starlette(
            routes=[
                Route("/health/ready", self.ready),
                Route("/health/backends", self.show),
                Route("/{path:path}", self.forward, methods=methods),
            ],
            lifespan=self._live,
        )

    @contextlib.asynccontextmanager
    async def _live(self, _: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask(one)) for one in self.router.backends]
        yield
        for task in tasks:
            task.cancel()
        await self._client.aclose()

    async def _ask(self, backend: Backend) -> None:
        """Asks one engine for its state, for ever."""
        while True:
            started = time.monotonic()
            try:
                sent = backend.sent
                answer = await self._client.get(f"{backend.url}/health/ready", timeout=3.0)
                backend.ready = answer.status_code == 200
                load = await self._client.get(f"{backend.url}/load", timeout=3.0)
                if load.status_code == 200:  # with a key it is closed: then our own count serves
                    backend.load, backend.told = int(load.json()["server_load"]), sent
            except (httpx.HTTPError, ValueError, KeyError):
                backend.ready = False
            await asyncio.sleep(max(0.05, ASK_SECONDS - (time.monotonic() - started)))

    async def ready(self, _: Request) -> Response:
        """200 if any engine is."""
        any_ready = any(one.ready for one in self.router.backends)
        return JSONResponse({"ready": any_ready}, 200 if any_ready else 503)

    async def show(self, _: Request) -> Response:
        """What is known of each."""
        return JSONResponse(
            [
                {"url": one.url, "ready": one.ready, "load": one.load, "sent": one.sent}
                for one in self.router.backends
            ]
        )

    async def forward(self, request: Request) -> Response:
        """Gives a request to the first engine that takes it."""
        body = await request.body()
        beginning = beginning_of(body)
        refused: list[httpx.Response] = []
        for backend in self.router.order(beginning):
            backend.sent += 1
            answer = await self._try(backend, request, body)
            if answer is None:
                backend.sent -= 1
                backend.ready = False
                continue
            if answer.status_code in TRY_NEXT:
                backend.sent -= 1
                await answer.aread()
                refused.append(answer)
                continue
            backend.taken += 1
            if beginning:
                self.router.remember(beginning, backend)
            return self._pass_on(answer, backend)
        return _refusal(refused)

    async def _try(self, backend: Backend, request: Request, body: bytes) -> httpx.Response | None:
        """An answer whose body is still to be read; None if there was none."""
        headers = [(k, v) for k, v in request.headers.items() if k not in PASSED_BY]
        target = httpx.URL(backend.url + request.url.path, query=request.url.query.encode())
        made = self._client.build_request(request.method, target, headers=headers, content=body)
        try:
            return await self._client.send(made, stream=True)
        except httpx.HTTPError:
            return None
        except asyncio.CancelledError:  # the client is gone
            backend.sent -= 1
            raise

    def _pass_on(self, answer: httpx.Response, backend: Backend) -> Response:
        headers = {k: v for k, v in answer.headers.items() if k not in HELD_BACK}
        return StreamingResponse(self._bytes(answer, backend), answer.status_code, headers)

    async def _bytes(self, answer: httpx.Response, backend: Backend) -> AsyncIterator[bytes]:
        """The body; what breaks off in a stream of events is ended by an error event."""
        events = answer.headers.get("content-type", "").startswith("text/event-stream")
        try:
            async for piece in answer.aiter_raw():
                yield piece
        except httpx.HTTPError:
            backend.ready = False
            if not events:
                raise ClientDisconnect from None  # a body that is cut must not look whole
            yield b"\n\ndata: " + json.dumps({"error": BROKEN}).encode() + b"\n\ndata: [DONE]\n\n"
        finally:
            backend.sent -= 1
            await answer.aclose()


def _refusal(refused: list[httpx.Response]) -> Response:
    """The last engine's, with the shortest wait of all; 503 if none answered."""
    if not refused:
        error = {"message": "no engine answers", "type": "server_error", "code": 503}
        return JSONResponse({"error": error}, 503, {"Retry-After": "1"})
    waits = [int(one.headers.get("retry-after", "1")) for one in refused]
    last = refused[-1]
    headers = {k: v for k, v in last.headers.items() if k not in HELD_BACK}
    headers["retry-after"] = str(min(waits))
    return Response(last.content, last.status_code, headers)
