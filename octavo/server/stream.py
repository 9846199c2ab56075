"""News to server-sent events, and the watch over whoever receives them.

The order: for each choice an opening (chat: the role), its content, and its finish reason with the
last content; then the usage if asked for; then `data: [DONE]`. An error before the first delta is
an ordinary error answer; after it, it is an error event and then `[DONE]`. A client that goes away
or takes no byte for the written limit ends the request in the engine. Not for: the JSON of
chunks (`chat.py`, `completions.py`), streams that outlive their connection (`kept.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import DeadlineExceeded, InvalidRequest, OctavoError
from octavo.log import Log
from octavo.server.answer import Call, finish
from octavo.server.errors import ClientGone, describe
from octavo.server.feed import Chunks, Feed, Framing, Outlet
from octavo.server.generation import Choice, Following, Job, Usage, fold
from octavo.server.kept import HEADER
from octavo.server.settings import ServerSettings

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
        raise DeadlineExceeded(
            "The request's deadline passed and the engine is still busy with another step."
        )
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
        watch.cancel()  # and not waited for: the answer would wait as well
        watch.add_done_callback(_forget)


def _forget(task: asyncio.Future[None]) -> None:
    """What a watch ended with that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


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
    serving, outlet = call.serving, Outlet()
    await serving.engine.compile(job.params)
    kept = None
    if call.resume:
        kept = serving.streams.keep(call.id, call.tenant, call.resume, outlet)
    feed = Feed(chunks, framing, kept or outlet)
    try:
        following = Following(serving.engine, job, feed)
    except BaseException:
        if kept is not None:
            kept.drop()
        raise
    if kept is not None:
        kept.on_drop = following.close
    close = following.close if kept is None else kept.drop
    try:
        await _begin(request, call, feed)
    except ClientGone:
        if kept is None or feed.failed:
            close()
        else:
            feed.begin()
            kept.leave(outlet)
        raise
    except BaseException:
        close()
        raise
    leave = following.close if kept is None else partial(kept.leave, outlet)
    return finish(events_of(serving.settings, outlet, leave), call)


async def _begin(request: Request, call: Call, feed: Feed) -> None:
    """Returns when events may be sent. Raises what came instead of them."""
    interval = call.serving.settings.keep_alive_interval
    if interval:
        await _settled(request, feed.begun, interval)
    else:
        await until_gone(request, feed.begun, call.deadline)
    feed.begin()


async def whole(request: Request, call: Call, job: Job) -> tuple[list[Choice], Usage]:
    """The answer in one piece."""
    if call.resume:
        raise InvalidRequest(f"{HEADER} goes with stream = true only.", HEADER)
    await call.serving.engine.compile(job.params)
    work = asyncio.ensure_future(fold(call.serving.engine, job))
    return await until_gone(request, work, call.deadline)


def events_of(settings: ServerSettings, outlet: Outlet, leave: Callable[[], None]) -> EventStream:
    """The answer that sends what an outlet is given."""
    return EventStream(
        outlet,
        leave,
        slow_limit=settings.slow_reader_limit,
        keep_alive=settings.keep_alive_interval,
    )


class EventStream(Response):
    """Sends the events of an outlet; ends early if the client is gone or does not read.

    `leave` is called when nothing more is sent, for whatever reason.
    """

    media_type = "text/event-stream"

    def __init__(
        self, outlet: Outlet, leave: Callable[[], None], *, slow_limit: float, keep_alive: float
    ) -> None:
        super().__init__(None, headers=HEADERS)
        del self.headers["content-length"]
        self._outlet = outlet
        self._leave = leave
        self._slow_limit = slow_limit
        self._keep_alive = keep_alive
        self._sending = 0.0  # since when a send has been waiting; 0 if none is

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        pieces: Pieces | None = state.get(PIECES_KEY)
        write = None if pieces is None else pieces.write
        tasks: list[asyncio.Future[None]] = []
        try:
            # What is there is sent before there are tasks, which would not begin at once.
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if data := self._outlet.take():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            tasks += [
                asyncio.ensure_future(self._send_all(send, write)),
                asyncio.ensure_future(gone(receive)),
                asyncio.ensure_future(self._stuck()),
            ]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                tasks[0].result()
            elif tasks[2] in done:
                log.warning("slow_reader_cut", seconds=self._slow_limit)
            if tasks[2] in done or self._outlet.was_cut:
                drop = state.get(ABORT_KEY)
                if drop is not None:
                    drop()
        finally:
            self._leave()
            for task in tasks:
                await _cancel(task)

    async def _send_all(self, send: Send, write: Callable[[bytes], bool] | None) -> None:
        loop, outlet = asyncio.get_running_loop(), self._outlet
        while True:
            data = outlet.take()
            if not data:
                if outlet.ended:
                    break
                if await outlet.wait(write, self._keep_alive):
                    continue
                data = KEEP_ALIVE
            self._sending = loop.time()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending = 0.0
        if not outlet.was_cut:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stuck(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._slow_limit / 4)
            if self._sending and loop.time() - self._sending > self._slow_limit:
                return
