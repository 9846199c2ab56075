"""From the engine's news to the bytes of a stream, up to the connection that sends them.

A `Feed` hears the news of a request and writes events; an `Outlet` holds the bytes that one
connection has not taken yet. Between them stands whoever keeps events for a client that comes back
(`kept.py`), or nobody. Not for: connections (`stream.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from octavo.text.assembler import Delta


class Chunks(Protocol):
    """Writes the events of one answer."""

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta, the choice's opening before its first; empty if there is no news."""
        ...

    def usage(self) -> bytes:
        """The event with the counts, empty if it was not asked for."""
        ...


@dataclass(frozen=True, slots=True)
class Framing:
    """What differs between the protocols that stream events."""

    done: bytes  # the closing event
    error: Callable[[Exception], bytes]  # an error as an event


class Sink(Protocol):
    """Takes the bytes of a stream: whole events, in order."""

    def put(self, data: bytes) -> None:
        """One event or several."""
        ...

    def finish(self) -> None:
        """Nothing more will come."""
        ...


class Outlet:
    """The bytes of a stream that one connection sends.

    As long as the socket takes all, they are written within the call that brings them. What the
    socket does not take collects here, and goes out in one piece when it can.
    """

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._write: Callable[[bytes], bool] | None = None  # while nobody else is writing
        self._news = asyncio.Event()  # something is pending, or the end has come
        self.ended = False
        self.was_cut = False  # the end came before the stream's own

    def put(self, data: bytes) -> None:
        """Sends it, or keeps it until it can be sent."""
        if self._write is not None and self._write(data):
            return
        self._write = None
        self._pending.append(data)
        self._news.set()

    def finish(self) -> None:
        """Nothing more comes."""
        self.ended = True
        self._news.set()

    def cut(self) -> None:
        """Nothing more comes, and the connection must not look as if that were the end."""
        self.was_cut = True
        self.finish()

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


class Feed:
    """Hears the news of a request and makes events of it."""

    def __init__(self, chunks: Chunks, framing: Framing, sink: Sink) -> None:
        self._chunks = chunks
        self._framing = framing
        self._sink = sink
        self._has_begun = False
        self._error: Exception | None = None  # instead of a stream
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def news(self, index: int, delta: Delta) -> None:
        """What is new of one choice."""
        data = self._chunks.write(index, delta)
        if data:
            self._sink.put(data)
        if not self._has_begun:
            self._open()

    def end(self, error: Exception | None) -> None:
        """The last events; an error before anything else is kept for `begin`."""
        if error is not None and not self._has_begun:
            self._error = error
            self._open()
            return
        try:
            last = self._chunks.usage() if error is None else self._framing.error(error)
        except Exception as problem:
            last = self._framing.error(problem)
        if last := last + self._framing.done:
            self._sink.put(last)
        self._sink.finish()

    def _open(self) -> None:
        self._has_begun = True
        if not self.begun.done():
            self.begun.set_result(None)

    @property
    def failed(self) -> bool:
        """True if an error came instead of a stream."""
        return self._error is not None

    def begin(self) -> None:
        """From now on errors are events. Raises the one that came before."""
        if self._error is not None:
            raise self._error
        self._has_begun = True
