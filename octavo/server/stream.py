"""Deltas to server-sent events, and the watch over whoever receives them.

Framing: for each choice an opening (chat: the role), its content, and its finish reason with the
last content; then the usage if asked for; then `data: [DONE]`. An error before the first delta is
an ordinary error answer; after it, it is an error event and then `[DONE]`. A client that goes away
or takes no byte for the written limit ends the request in the engine. Not for: the JSON of
chunks (`chat.py`, `completions.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import DeadlineExceeded, OctavoError
from octavo.log import Log
from octavo.server.answer import Call, finish
from octavo.server.errors import ClientGone, describe
from octavo.server.generation import Choice, Job, Usage, deltas, fold
from octavo.text.assembler import Delta

T = TypeVar("T")
Source = AsyncGenerator[tuple[int, Delta], None]

DONE = b"data: [DONE]\n\n"
DEADLINE_GRACE = 1.0  # seconds after a deadline in which the engine should have ended the request
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
ABORT_KEY = "octavo.abort_connection"  # in scope["state"]: drops a connection with its buffers

log = Log(__name__)


class Chunks(Protocol):
    """Writes the events of one answer."""

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta, the choice's opening before its first; empty if there is no news."""
        ...

    def usage(self) -> bytes:
        """The event with the counts, empty if it was not asked for."""
        ...


async def gone(receive: Receive) -> None:
    """Returns when the client has closed the connection. The body has been read by then."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_gone(request: Request, work: Coroutine[Any, Any, T], deadline: float) -> T:
    """The result of `work`, which is cancelled if the client goes away (ClientGone).

    The engine itself ends what is past its deadline; DeadlineExceeded is raised here only if it
    has not done so, because it does not move at all.
    """
    task = asyncio.ensure_future(work)
    if not await _settled(request, task, _patience(deadline)):
        await _cancel(task)
        raise DeadlineExceeded("The request's deadline passed and the engine does not answer.")
    return task.result()


def _patience(deadline: float) -> float | None:
    """Seconds to wait for an engine that should end the request by `deadline`, 0 for none."""
    return max(0.0, deadline - time.monotonic()) + DEADLINE_GRACE if deadline else None


async def _settled(request: Request, task: asyncio.Future[Any], patience: float | None) -> bool:
    """Waits for `task`; False if `patience` ended first. Cancels it if the client goes away."""
    watch = asyncio.ensure_future(gone(request.receive))
    finished = False
    try:
        done, _ = await asyncio.wait(
            {task, watch}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
        )
        finished = task in done
        if not finished and watch in done:
            raise ClientGone
        return finished
    except BaseException:
        await _cancel(task)
        raise
    finally:
        await _cancel(watch)


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def stream(request: Request, call: Call, job: Job, chunks: Chunks) -> Response:
    """The answer as events."""
    source = deltas(call.serving.engine, job)
    return finish(await open_stream(request, source, chunks, call), call)


async def whole(request: Request, call: Call, job: Job) -> tuple[list[Choice], Usage]:
    """The answer in one piece."""
    source = deltas(call.serving.engine, job)
    return await until_gone(request, fold(source, job), call.deadline)


async def open_stream(request: Request, source: Source, chunks: Chunks, call: Call) -> Response:
    """The stream, once its first delta is there; what goes wrong before that is raised.

    With keep-alive comments on, the stream begins without a delta after their interval.
    """
    settings = call.serving.settings
    keep_alive = settings.keep_alive_interval
    first = asyncio.ensure_future(anext(source))
    try:
        if keep_alive:
            if await _settled(request, first, keep_alive):
                first.result()
        else:
            await until_gone(request, _result(first), call.deadline)
    except BaseException:
        await source.aclose()
        raise
    return EventStream(events(first, source, chunks, keep_alive), settings.slow_reader_limit)


async def _result(future: asyncio.Future[T]) -> T:
    return await future


async def events(
    first: asyncio.Future[tuple[int, Delta]], source: Source, chunks: Chunks, keep_alive: float
) -> AsyncGenerator[bytes, None]:
    """All events of an answer, the closing one included, whatever happens."""
    upcoming: Awaitable[tuple[int, Delta]] = first
    async with aclosing(source):
        try:
            while True:
                if keep_alive:
                    task = asyncio.ensure_future(upcoming)
                    try:
                        while not (await asyncio.wait({task}, timeout=keep_alive))[0]:
                            yield KEEP_ALIVE
                    finally:
                        if not task.done():
                            await _cancel(task)
                    upcoming = task
                index, delta = await upcoming
                if data := chunks.write(index, delta):
                    yield data
                upcoming = anext(source)
        except StopAsyncIteration:
            if data := chunks.usage():
                yield data
        except Exception as error:
            yield error_event(error)
    yield DONE


def error_event(error: Exception) -> bytes:
    """An error as an event. What nobody foresaw goes to the log, not to the client."""
    if not isinstance(error, OctavoError):
        log.error("stream_failed", error=repr(error))
    return b"data: " + msgspec.json.encode(describe(error)) + b"\n\n"


class EventStream(Response):
    """Sends events one by one; ends early if the client is gone or does not read."""

    media_type = "text/event-stream"

    def __init__(self, source: AsyncGenerator[bytes, None], slow_limit: float) -> None:
        super().__init__(None, headers=HEADERS)
        del self.headers["content-length"]
        self._source = source
        self._slow_limit = slow_limit
        self._sending = 0.0  # since when a send has been waiting; 0 if none is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tasks = [
            asyncio.ensure_future(self._send_all(send)),
            asyncio.ensure_future(gone(receive)),
            asyncio.ensure_future(self._stuck()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                tasks[0].result()
            elif tasks[2] in done:
                log.warning("slow_reader_cut", seconds=self._slow_limit)
                drop = scope.get("state", {}).get(ABORT_KEY)
                if drop is not None:
                    drop()
        finally:
            for task in tasks:
                await _cancel(task)
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._source) as source:
            async for data in source:
                self._sending = loop.time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._sending = 0.0
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stuck(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._slow_limit / 4)
            if self._sending and loop.time() - self._sending > self._slow_limit:
                return
