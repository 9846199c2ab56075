"""News to server-sent events, and the watch over whoever receives them.

The order: for each choice an opening (chat: the role), its content, and its finish reason with the
last content; then the usage if asked for; then `data: [DONE]`. An error before the first delta is
an ordinary error answer; after it, it is an error event and then `[DONE]`. A client that goes away
or takes no byte for the written limit ends the request in the engine. Not for: the JSON of
chunks (`chat.py`, `completions.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import DeadlineExceeded, OctavoError
from octavo.log import Log
from octavo.server.answer import Call, finish
from octavo.server.errors import ClientGone, describe
from octavo.server.generation import Choice, Following, Job, Usage, fold
from octavo.text.assembler import Delta

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
DEADLINE_GRACE = 1.0  # seconds after a deadline in which the engine should have ended the request
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
# In scope["state"]: what drops a connection with its buffers, and the `Pieces` of its answer.
ABORT_KEY = "octavo.abort_connection"
PIECES_KEY = "octavo.pieces"

log = Log(__name__)


class Pieces(Protocol):
    """Writes pieces of an answer's body to the socket, past the middleware."""

    sent: int  # bytes so far

    def write(self, data: bytes) -> bool:
        """False where one has to wait, or nobody listens."""
        ...


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


async def until_gone(request: Request, task: asyncio.Future[T], deadline: float) -> T:
    """The result of `task`, which is cancelled if the client goes away (ClientGone).

    The engine itself ends what is past its deadline; DeadlineExceeded is raised here only if it
    has not done so, because it does not move at all.
    """
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


@dataclass(frozen=True, slots=True)
class Framing:
    """What differs between the protocols that stream events."""

    done: bytes  # the closing event
    error: Callable[[Exception], bytes]  # an error as an event


def error_event(error: Exception) -> bytes:
    """An error as an event. What nobody foresaw goes to the log, not to the client."""
    if not isinstance(error, OctavoError):
        log.error("stream_failed", error=repr(error))
    return b"data: " + msgspec.json.encode(describe(error)) + b"\n\n"


OPENAI = Framing(DONE, error_event)


async def stream(
    request: Request, call: Call, job: Job, chunks: Chunks, framing: Framing = OPENAI
) -> Response:
    """The answer as events, once its first news is there; what goes wrong before that is raised.

    With keep-alive comments on, the stream begins without news after their interval.
    """
    settings = call.serving.settings
    await call.serving.engine.compile(job.params)
    feed = Feed(chunks, framing)
    following = Following(call.serving.engine, job, feed)
    try:
        if settings.keep_alive_interval:
            await _settled(request, feed.begun, settings.keep_alive_interval)
        else:
            await until_gone(request, feed.begun, call.deadline)
        feed.begin()
    except BaseException:
        following.close()
        raise
    response = EventStream(
        feed,
        following,
        slow_limit=settings.slow_reader_limit,
        keep_alive=settings.keep_alive_interval,
    )
    return finish(response, call)


async def whole(request: Request, call: Call, job: Job) -> tuple[list[Choice], Usage]:
    """The answer in one piece."""
    await call.serving.engine.compile(job.params)
    work = asyncio.ensure_future(fold(call.serving.engine, job))
    return await until_gone(request, work, call.deadline)


class Feed:
    """The bytes of a stream, between the engine's news and the socket.

    As long as the socket takes all, news is written within the call that brings it. What the
    socket does not take collects here, and goes out in one piece when it can.
    """

    def __init__(self, chunks: Chunks, framing: Framing) -> None:
        self._chunks = chunks
        self._framing = framing
        self._pending: list[bytes] = []
        self._write: Callable[[bytes], bool] | None = None  # while nobody else is writing
        self._news = asyncio.Event()  # something is pending, or the end has come
        self._has_begun = False
        self._error: Exception | None = None  # instead of a stream
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = False

    def news(self, index: int, delta: Delta) -> None:
        """What is new of one choice."""
        data = self._chunks.write(index, delta)
        if data:
            self._put(data)
        if not self._has_begun:
            self._open()

    def end(self, error: Exception | None) -> None:
        """The last events; an error before anything else is kept for `begin`."""
        self.ended = True
        self._news.set()
        if error is not None and not self._has_begun:
            self._error = error
            self._open()
            return
        try:
            last = self._chunks.usage() if error is None else self._framing.error(error)
        except Exception as problem:
            last = self._framing.error(problem)
        self._put(last + self._framing.done)

    def _open(self) -> None:
        self._has_begun = True
        if not self.begun.done():
            self.begun.set_result(None)

    def begin(self) -> None:
        """From now on errors are events. Raises the one that came before."""
        if self._error is not None:
            raise self._error
        self._has_begun = True

    def take(self) -> bytes:
        """All that is pending; the caller writes from now on."""
        self._write = None
        self._news.clear()
        data = b"".join(self._pending)
        self._pending.clear()
        return data

    async def wait(self, write: Callable[[bytes], bool] | None, patience: float) -> bool:
        """Waits for something to take, while news goes through `write`; False after `patience`."""
        if self._pending or self.ended:
            return True
        self._write = write
        if not patience:
            await self._news.wait()
            return True
        try:
            async with asyncio.timeout(patience):
                await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _put(self, data: bytes) -> None:
        if self._write is not None and self._write(data):
            return
        self._write = None
        self._pending.append(data)
        self._news.set()


class EventStream(Response):
    """Sends the events of a feed; ends early if the client is gone or does not read."""

    media_type = "text/event-stream"

    def __init__(
        self, feed: Feed, following: Following, *, slow_limit: float, keep_alive: float
    ) -> None:
        super().__init__(None, headers=HEADERS)
        del self.headers["content-length"]
        self._feed = feed
        self._following = following
        self._slow_limit = slow_limit
        self._keep_alive = keep_alive
        self._sending = 0.0  # since when a send has been waiting; 0 if none is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        pieces: Pieces | None = state.get(PIECES_KEY)
        write = None if pieces is None else pieces.write
        tasks = [
            asyncio.ensure_future(self._send_all(send, write)),
            asyncio.ensure_future(gone(receive)),
            asyncio.ensure_future(self._stuck()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                tasks[0].result()
            elif tasks[2] in done:
                log.warning("slow_reader_cut", seconds=self._slow_limit)
                drop = state.get(ABORT_KEY)
                if drop is not None:
                    drop()
        finally:
            self._following.close()
            for task in tasks:
                await _cancel(task)

    async def _send_all(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        loop, feed = asyncio.get_running_loop(), self._feed
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while True:
            data = feed.take()
            if not data:
                if feed.ended:
                    break
                if await feed.wait(write, self._keep_alive):
                    continue
                data = KEEP_ALIVE
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
