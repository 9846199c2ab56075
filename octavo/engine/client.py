"""The API process's end of the ring: submit, abort, token news for listeners, health.

Tokens only; text is made by `octavo/text_engine.py`. All methods belong to one event loop, which
watches the socket itself: news is handled in the call that finds it, without a task or a future.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq

from octavo.engine.channel import Addresses, encode, open_socket
from octavo.errors import EngineDead, RequestFailed, ServerError
from octavo.types import (
    Abort,
    AddRequest,
    Control,
    ControlReply,
    Died,
    FromCore,
    Progress,
    Ready,
    SequenceOutput,
    StepOutputs,
    StepStats,
    WorkerInfo,
)

TURNS_TO_BEGIN = 2  # turns of the event loop from the first news of a stream to its first byte
RETRY_SECONDS = 0.05  # until a message is offered again to a core that has not connected

logger = logging.getLogger("octavo.engine.client")


@dataclass(slots=True)
class Pulse:
    """What the core last said of itself."""

    phase: str = "loading"
    detail: str = ""
    heard_at: float = field(default_factory=time.monotonic)
    last_step: float = field(default_factory=time.monotonic)
    pending: int = 0
    allowed: float = 0.0  # seconds that the step under way may take because of its size


class Listener(Protocol):
    """Who hears the news of some sequences. Called in the event loop, in order; never raises."""

    def push(self, output: SequenceOutput) -> None:
        """What is new of one sequence."""
        ...

    def fail(self, error: Exception) -> None:
        """No more news will come."""
        ...


class EngineClient:
    """One engine core as seen from the API process."""

    def __init__(
        self,
        addresses: Addresses,
        on_stats: Callable[[StepStats], None] | None = None,
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        """`on_stats` gets each step's figures; `on_broken` is called if this side cannot go on."""
        self.pulse = Pulse()
        self.info: WorkerInfo | None = None
        self.stats = StepStats()
        self.dead: EngineDead | None = None
        self.died: Died | None = None  # the core's last word, if it had one
        self.ready = asyncio.Event()
        self._on_stats = on_stats
        self._on_broken = on_broken
        self._streams: dict[str, Listener] = {}
        self._replies: dict[int, asyncio.Future[dict[str, str]]] = {}
        self._numbers = itertools.count()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._later: Sequence[SequenceOutput] = ()  # news that first tokens go before
        self._unsent: deque[bytes] = deque()  # while nobody is at the other end
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._to_core = open_socket(context, zmq.PUSH)
        self._from_core = open_socket(context, zmq.PULL)
        self._to_core.bind(addresses.to_core)
        self._from_core.bind(addresses.from_core)
        self._loop = asyncio.get_running_loop()
        self._watched = int(self._from_core.getsockopt(zmq.FD))
        self._loop.add_reader(self._watched, self._read)

    @property
    def num_open(self) -> int:
        """Sequences that have been submitted and not ended."""
        return len(self._streams)

    def welcome(self, info: WorkerInfo) -> None:
        """The core takes requests; said here to a client that came after the core said it."""
        if self.info is None:
            self._handle(Ready(info))

    def submit(self, requests: Sequence[AddRequest], listener: Listener) -> None:
        """Sends the sequences of one request; their ids must be unique."""
        if self.dead is not None:
            raise self.dead
        messages = [encode(request) for request in requests]  # all or none is sent
        for request, message in zip(requests, messages, strict=True):
            self._streams[request.id] = listener
            self._put(message)

    def abort(self, ids: Sequence[str]) -> None:
        """Ends sequences that are still open and forgets them; no further news comes."""
        open_ids = [i for i in ids if self._streams.pop(i, None) is not None]
        if open_ids and self.dead is None:
            self._send(Abort(open_ids))

    async def control(self, op: str, **args: str) -> dict[str, str]:
        """Runs an operation on the whole engine and waits for its result."""
        if self.dead is not None:
            raise self.dead
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._send(Control(number, op, args))
        try:
            return await reply
        finally:
            self._replies.pop(number, None)

    def stop(self) -> None:
        """Asks the core's process to end."""
        if self.dead is None:
            self._send(Control(next(self._numbers), "stop"))

    def fail(self, error: EngineDead) -> None:
        """The core is gone: every open stream and call ends with `error`."""
        if self.dead is not None:
            return
        self.dead = error
        self.pulse.phase = "dead"
        self.stats = StepStats(blocks_total=self.stats.blocks_total)
        self._end_streams(error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def cut(self, error: ServerError) -> None:
        """Ends every open stream with `error`; the core lives on, with nothing to do."""
        if self._streams and self.dead is None:
            self._send(Abort(list(self._streams)))
        self._end_streams(error)

    def _end_streams(self, error: ServerError) -> None:
        self._push_later()
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)

    def close(self) -> None:
        """Frees the sockets; the client cannot be used afterwards."""
        self._stop_reading()
        self._to_core.close()
        self._from_core.close()

    def _send(self, message: AddRequest | Abort | Control) -> None:
        self._put(encode(message))

    def _put(self, message: bytes) -> None:
        """Gives it to the socket's own thread: at once, or when the core has connected."""
        self._unsent.append(message)
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent and self._watched >= 0:
                self._to_core.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:  # only while nobody is connected: there is no other bound
            self._loop.call_later(RETRY_SECONDS, self._flush)

    def _read(self) -> None:
        """Takes all there is: the socket tells once when it begins to hold something."""
        try:
            while self._watched >= 0:
                self._handle(self._decoder.decode(self._from_core.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return
        except Exception as error:  # a fault on this side must not leave streams waiting
            logger.exception("event=client_broken")
            self._stop_reading()
            self.fail(EngineDead(f"the engine's news cannot be read: {error}"))
            if self._on_broken is not None:
                self._on_broken()

    def _stop_reading(self) -> None:
        if self._watched >= 0:
            self._loop.remove_reader(self._watched)
            self._watched = -1

    def _handle(self, message: FromCore) -> None:
        self._push_later()
        if isinstance(message, StepOutputs):
            self._deliver(message)
        elif isinstance(message, Progress):
            if message.phase == "loading" and self.ready.is_set():
                return  # it was on its way when the core became ready
            self.pulse = Pulse(
                message.phase,
                message.detail,
                time.monotonic(),
                message.last_step,
                message.pending,
                message.allowed,
            )
        elif isinstance(message, ControlReply):
            self._answer(message)
        elif isinstance(message, Ready):
            self.info = message.info
            self.pulse = Pulse("idle")
            self.ready.set()
        elif isinstance(message, Died):
            self.died = message
            self.fail(EngineDead(message.error))

    def _deliver(self, message: StepOutputs) -> None:
        self.stats = message.stats
        if self._on_stats is not None:
            self._on_stats(message.stats)
        outputs = message.outputs
        firsts = next((n for n, o in enumerate(outputs) if not o.scheduled_at), len(outputs))
        if 0 < firsts < len(outputs):
            # First tokens are on their way to the socket before others are looked at: their
            # answers begin, which takes some turns of the loop.
            self._push(outputs[:firsts])
            self._later = outputs[firsts:]
            self._loop.call_soon(self._after, TURNS_TO_BEGIN, self._later)
        else:
            self._push(outputs)

    def _after(self, turns: int, outputs: Sequence[SequenceOutput]) -> None:
        """Pushes `outputs` after so many more turns of the loop, unless newer news has done it."""
        if outputs is not self._later:
            return
        if turns:
            self._loop.call_soon(self._after, turns - 1, outputs)
        else:
            self._push_later()

    def _push_later(self) -> None:
        later, self._later = self._later, ()
        self._push(later)

    def _push(self, outputs: Sequence[SequenceOutput]) -> None:
        streams = self._streams
        for output in outputs:
            if output.reason is None:
                stream = streams.get(output.id)
            else:
                stream = streams.pop(output.id, None)
            if stream is not None:
                stream.push(output)

    def _answer(self, message: ControlReply) -> None:
        reply = self._replies.get(message.id)
        if reply is None or reply.done():
            return
        if message.error:
            reply.set_exception(RequestFailed(message.error))
        else:
            reply.set_result(message.result)
