"""How the server's process and its API processes talk: records in frames over one Unix socket.

Each record is msgspec in msgpack behind its length in four bytes. Either side may ask the other
a question and gets a list of bytes. Not for: requests and tokens, which go to the core directly
(`engine/channel.py`). Next file: `fleet.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from octavo.engine.channel import Addresses
from octavo.errors import EngineDead
from octavo.types import WorkerInfo

MAX_FRAME = 2**28  # bytes
BEAT = "beat"  # the question whether a process still moves

logger = logging.getLogger("octavo.hub")


class ApiSettings(Struct, frozen=True):
    """All that an API process is told when it starts. The options are complete, with sources."""

    index: int  # from 1
    count: int
    hub: str
    port: int
    engine: dict[str, Any]
    engine_sources: dict[str, str]
    server: dict[str, Any]
    server_sources: dict[str, str]


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """API process `index`, from 1, is there."""

    index: int


class Listening(Struct, frozen=True, array_like=True, tag="listening"):
    """It takes connections."""

    address: str


class Drained(Struct, frozen=True, array_like=True, tag="drained"):
    """It has nothing left to do; `cut` requests were cut off."""

    cut: int


class CoreStarted(Struct, frozen=True, array_like=True, tag="core"):
    """A core is being started; `info` is set if it takes requests already."""

    addresses: Addresses
    info: WorkerInfo | None = None


class CoreDied(Struct, frozen=True, array_like=True, tag="died"):
    """The core is gone."""

    error: str


class Drain(Struct, frozen=True, array_like=True, tag="drain"):
    """Take nothing new, finish what runs within `timeout` seconds, then end."""

    timeout: float


class Hurry(Struct, frozen=True, array_like=True, tag="hurry"):
    """Do not wait any longer."""


class Question(Struct, frozen=True, array_like=True, tag="question"):
    """Something to be answered by a `Reply` of the same number."""

    number: int
    op: str
    to: int = 0  # the API process that is to answer; 0 is all


class Reply(Struct, frozen=True, array_like=True, tag="reply"):
    """Answer to a `Question`."""

    number: int
    data: list[bytes]


Message: TypeAlias = (
    Hello | Listening | Drained | CoreStarted | CoreDied | Drain | Hurry | Question | Reply
)
Answerer: TypeAlias = Callable[[str, int], Awaitable[list[bytes]]]


class Link:
    """One end of a connection. `messages` must be read for questions to be answered."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Answerer,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[list[bytes]]] = {}
        self._answering: set[asyncio.Task[None]] = set()

    def send(self, message: Message) -> None:
        """Sends a record; it is lost if the other end is gone."""
        data = msgspec.msgpack.encode(message)
        self._writer.write(len(data).to_bytes(4, "little") + data)

    async def ask(self, op: str, patience: float, to: int = 0) -> list[bytes]:
        """The other end's answer, empty if it failed to make one.

        Raises TimeoutError, or EngineDead if the other end is gone.
        """
        number = next(self._numbers)
        reply: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self.send(Question(number, op, to))
            async with asyncio.timeout(patience):
                return await reply
        finally:
            del self._replies[number]

    async def messages(self) -> AsyncIterator[Message]:
        """All records but questions and replies, until the other end is gone."""
        decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
        try:
            while True:
                size = int.from_bytes(await self._reader.readexactly(4), "little")
                message = decoder.decode(await self._reader.readexactly(min(size, MAX_FRAME)))
                if isinstance(message, Reply):
                    reply = self._replies.get(message.number)
                    if reply is not None and not reply.done():
                        reply.set_result(message.data)
                elif isinstance(message, Question):
                    task = asyncio.ensure_future(self._reply(message))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
                else:
                    yield message
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(EngineDead("the other process is gone"))

    async def _reply(self, question: Question) -> None:
        try:
            answer = await self._answer(question.op, question.to)
        except Exception:  # who asks must not wait for an answer that does not come
            logger.exception("event=question_failed op=%s", question.op[:100])
            answer = []
        self.send(Reply(question.number, answer))

    def close(self) -> None:
        """Ends the connection."""
        for task in self._answering:
            task.cancel()
        self._writer.close()
