"""GET /v1/requests/{id}/stream: the rest of a stream whose connection broke.

`Last-Event-ID` says after which event; without it the stream begins anew, if all of it is kept. A
new reader takes over from one that is still connected. 204 says that there is nothing left, which
ends the attempts of an EventSource. A POST that is sent again with `Last-Event-ID` is answered in
the same way. With several API processes the stream may be kept by another one than is asked; then
this one fetches the events from it, a piece at a time, until its own client has them all.
Not for: what is kept and for how long (`kept.py`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Final

from msgspec import Struct
from msgspec.json import decode, encode
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import (
    ClientError,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    OctavoError,
)
from octavo.server.context import Everybody, Serving, serving_of
from octavo.server.exchange import exchange_of
from octavo.server.feed import Outlet
from octavo.server.kept import HEADER, LAST, Kept, Wish, wish_of
from octavo.server.stream import events_of

Handler = Callable[[Request], Awaitable[Response]]

QUESTION: Final = "stream "  # of one API process to another
WAIT_SECONDS: Final = 0.5  # that a process waits for news before it answers another
AWAY_SECONDS: Final = 5.0  # without a question, after which the other process is taken for gone
PATIENCE: Final = 8  # questions in a row that may stay without an answer
_PROBLEMS: Final[tuple[type[ClientError], ...]] = (Forbidden, Gone, InvalidRequest, NotFound)


class Ask(Struct, frozen=True):
    """What one process asks of another, again and again: the events after the wish's number."""

    reader: str  # the same in all questions for one client
    wish: Wish
    leaves: bool = False  # the client is gone or has all


class Told(Struct, frozen=True):
    """The answer: events, or why there are none."""

    process: int
    data: str = ""  # whole events
    last: int = 0  # the number of the last of them
    name: str = ""
    seconds: float = 0.0
    ended: bool = False  # these are the last events
    cut: bool = False  # another reader has taken over
    problem: str = ""
    kind: int = 0  # of the problem, in `_PROBLEMS`


async def show(request: Request) -> Response:
    """The rest of a stream whose connection broke, after the event Last-Event-ID."""
    return await resume(request, request.path_params["id"])


async def resume(request: Request, id: str = "") -> Response:
    """The rest of the stream `id`, or of the one that `Last-Event-ID` names.

    Raises InvalidRequest, Forbidden, NotFound or Gone.
    """
    serving = serving_of(request)
    exchange = exchange_of(request.scope)
    key = None if exchange is None else exchange.key
    tenant = "" if key is None else key.name
    wish = wish_of(id, tenant, request.headers.get(LAST))
    try:
        kept = serving.streams.find(wish)
    except ClientError as problem:
        if serving.everybody is None:
            raise
        return await _from_another(serving, serving.everybody, wish, problem)
    if kept.has_nothing_after(wish.after):
        return Response(status_code=204)
    outlet = kept.read(wish.after)
    response = events_of(serving.settings, outlet, lambda: kept.leave(outlet))
    response.headers[HEADER] = f"{kept.seconds:g}"
    return response


def resumable(handler: Handler) -> Handler:
    """The same route, to which a client may also send its request again with `Last-Event-ID`."""

    @wraps(handler)
    async def answer(request: Request) -> Response:
        return await (resume(request) if request.headers.get(LAST) else handler(request))

    return answer


# The side that has the client


async def _from_another(
    serving: Serving, everybody: Everybody, wish: Wish, problem: ClientError
) -> Response:
    """The rest of a stream that another process keeps; raises the gravest of all problems."""
    reader = secrets.token_hex(8)
    answers = await everybody(QUESTION + encode(Ask(reader, wish)).decode())
    told = [decode(answer, type=Told) for answer in answers]
    found = next((one for one in told if not one.problem), None)
    if found is None:
        kinds = [(one.kind, one.problem) for one in told]
        kinds.append((_PROBLEMS.index(type(problem)), problem.message))
        kind, message = min(kinds)
        raise _PROBLEMS[kind](message)
    if found.ended and not found.data:
        return Response(status_code=204)
    outlet = Outlet()
    client = _Client(everybody, Ask(reader, wish), outlet)
    client.take(found)
    response = events_of(serving.settings, outlet, client.leave)
    response.headers[HEADER] = f"{found.seconds:g}"
    return response


class _Client:
    """A client of this process that reads a stream of another one."""

    def __init__(self, everybody: Everybody, ask: Ask, outlet: Outlet) -> None:
        self._everybody = everybody
        self._ask = ask
        self._outlet = outlet
        self._to = 0
        self._task = asyncio.ensure_future(self._fetch())
        self._goodbye: asyncio.Task[list[bytes]] | None = None

    def take(self, told: Told) -> None:
        """Events of the other process."""
        self._to = told.process
        wish = self._ask.wish
        wish = Wish(wish.id, wish.tenant, told.name or wish.name, max(told.last, wish.after))
        self._ask = Ask(self._ask.reader, wish)
        if told.data:
            self._outlet.put(told.data.encode())
        if told.ended:
            self._outlet.finish()
        elif told.cut or told.problem:
            self._outlet.cut()

    def leave(self) -> None:
        """The client is gone, or has all."""
        self._task.cancel()
        ask = Ask(self._ask.reader, self._ask.wish, leaves=True)
        self._goodbye = asyncio.ensure_future(self._question(ask))
        self._goodbye.add_done_callback(_ignore)

    async def _fetch(self) -> None:
        silent = 0
        while not self._outlet.ended:
            try:
                answers = await self._question(self._ask)
            except (TimeoutError, OctavoError):
                answers = []
            if answers:
                silent = 0
                self.take(decode(answers[0], type=Told))
                continue
            silent += 1
            if silent > PATIENCE:
                self._outlet.cut()  # the client may ask again
            await asyncio.sleep(0.1)

    async def _question(self, ask: Ask) -> list[bytes]:
        return await self._everybody(QUESTION + encode(ask).decode(), self._to)


def _ignore(task: asyncio.Task[list[bytes]]) -> None:
    if not task.cancelled():
        task.exception()


# The side that keeps the stream


class Afar:
    """Readers of this process's streams that are connected to other processes."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._readers: dict[str, _Reader] = {}

    async def answer(self, question: str) -> bytes:
        """What this process has to say to another that asks for a stream."""
        ask = decode(question.removeprefix(QUESTION), type=Ask)
        reader = self._readers.get(ask.reader)
        if ask.leaves:
            if reader is not None:
                self._end(ask.reader)
            return b""
        process = self._serving.index
        try:
            if reader is None:
                reader = self._begin(ask)
                told = reader.tell(process, ask.wish.after)
            else:
                reader.stays(self, ask.reader)
                told = await reader.wait(process, ask.wish.after)
        except _PROBLEMS as problem:
            kind = _PROBLEMS.index(type(problem))
            return encode(Told(process, problem=problem.message, kind=kind))
        return encode(told)

    def _begin(self, ask: Ask) -> _Reader:
        kept = self._serving.streams.find(ask.wish)
        if kept.has_nothing_after(ask.wish.after):
            return _Reader(kept, None)
        reader = _Reader(kept, kept.read(ask.wish.after))
        self._readers[ask.reader] = reader
        reader.stays(self, ask.reader)
        return reader

    def _end(self, name: str) -> None:
        self._readers.pop(name).leave()

    def is_away(self, name: str) -> None:
        """The process of a reader does not ask any more."""
        if name in self._readers:
            self._end(name)


class _Reader:
    """One of them. Its outlet only says that there is news; the events are taken by number."""

    def __init__(self, kept: Kept, outlet: Outlet | None) -> None:
        self._kept = kept
        self._outlet = outlet
        self._timer: asyncio.TimerHandle | None = None

    def stays(self, afar: Afar, name: str) -> None:
        """It has asked just now."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(AWAY_SECONDS, afar.is_away, name)

    def leave(self) -> None:
        """It asks no more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._outlet is not None:
            self._kept.leave(self._outlet)

    async def wait(self, process: int, after: int) -> Told:
        """The events after number `after`, as soon as there are any, or none after a while."""
        outlet = self._outlet
        if outlet is not None and self._kept.last <= after:
            outlet.take()
            await outlet.wait(None, WAIT_SECONDS)
        return self.tell(process, after)

    def tell(self, process: int, after: int) -> Told:
        """The events after number `after` that there are now."""
        kept, outlet = self._kept, self._outlet
        if outlet is not None:
            outlet.take()
            if outlet.was_cut:
                return Told(process, cut=True)
        data, last = kept.events(after)
        return Told(process, data.decode(), last, kept.name, kept.seconds, ended=kept.ended)
