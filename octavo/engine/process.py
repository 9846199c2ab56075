"""The engine core's process: sockets, an input thread, a heartbeat, and the loop around the core.

Not for: deciding anything (that is `scheduler.py`) or building the worker (`octavo/core.py`).
Next file: `client.py`, the other end.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable

import msgspec
import zmq

from octavo.engine.channel import Addresses, encode, open_socket
from octavo.engine.core import EngineCore
from octavo.types import (
    AddRequest,
    Control,
    ControlReply,
    Died,
    FromCore,
    Progress,
    Ready,
    ToCore,
    WorkerInfo,
)

HEARTBEAT_SECONDS = 0.5

Report = Callable[[str], None]


class Inbox:
    """A thread that takes messages off the socket, so that a long step never delays the client."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.messages: queue.SimpleQueue[ToCore | msgspec.MsgspecError] = queue.SimpleQueue()
        self._socket = open_socket(context, zmq.PULL)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        threading.Thread(target=self._receive, name="inbox", daemon=True).start()

    def _receive(self) -> None:
        while True:
            try:
                self.messages.put(self._decoder.decode(self._socket.recv()))
            except zmq.ContextTerminated:
                return
            except msgspec.MsgspecError as error:
                # Only our own client can connect. A request that is lost would never be answered.
                self.messages.put(error)

    def drain(self, patience: float) -> list[ToCore]:
        """All messages that are there, after at most `patience` seconds for the first of them."""
        found: list[ToCore] = []
        try:
            message = self.messages.get(patience > 0, patience)
            while True:
                if isinstance(message, msgspec.MsgspecError):
                    raise message
                found.append(message)
                message = self.messages.get_nowait()
        except queue.Empty:
            return found


class Outbox:
    """The way back to the client."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = open_socket(context, zmq.PUSH)
        self._socket.linger = 1000  # a last message must get out before the process ends
        self._socket.connect(address)

    def send(self, message: FromCore) -> None:
        """Hands the message to the socket's own thread."""
        self._socket.send(encode(message))


class Heartbeat:
    """A thread that tells the client that this process lives, what it does, and when it moved.

    It also ends the process when its parent is gone, so that no core is ever left behind.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, parent: int) -> None:
        self.phase = "loading"
        self.detail = ""
        self.last_step = time.monotonic()
        self.pending = 0
        self._context = context
        self._address = address
        self._parent = parent
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        outbox = Outbox(self._context, self._address)
        while os.getppid() == self._parent:
            now = time.monotonic()
            outbox.send(Progress(now, self.phase, self.last_step, self.pending, self.detail))
            time.sleep(HEARTBEAT_SECONDS)
        os._exit(1)


def run(
    addresses: Addresses,
    parent: int,
    build: Callable[[Report], tuple[EngineCore, WorkerInfo]],
) -> int:
    """Builds the core, then serves until a `stop` arrives; the exit code.

    The process ends by itself once `parent`, a process id, is no longer its parent.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, addresses.from_core)
    heartbeat = Heartbeat(context, addresses.from_core, parent)

    def report(detail: str) -> None:
        heartbeat.detail = detail

    try:
        # Requests may be waiting in the socket already; it is read once there is a core for them.
        core, info = build(report)
        inbox = Inbox(context, addresses.to_core)
        outbox.send(Ready(info))
        heartbeat.phase, heartbeat.detail = "idle", ""
        _serve(core, inbox, outbox, heartbeat)
    except Exception as error:
        outbox.send(Died(f"{error}", type(error).__name__))
        raise
    return 0


def _serve(
    core: EngineCore,
    inbox: Inbox,
    outbox: Outbox,
    heartbeat: Heartbeat,
) -> None:
    pending: set[str] = set()
    while True:
        for message in inbox.drain(core.patience() if core.has_work() else HEARTBEAT_SECONDS):
            if isinstance(message, AddRequest):
                pending.add(message.id)
                core.add(message)
            elif isinstance(message, Control):
                if message.op == "stop":
                    return
                outbox.send(_control(core, message))
            else:
                core.abort(message.ids)
        if not core.has_work():
            heartbeat.phase = "idle"
            continue
        if core.patience() > 0:
            continue  # more may come before the next plan is due
        if heartbeat.phase == "idle":
            heartbeat.phase, heartbeat.last_step = "running", time.monotonic()
        heartbeat.pending = len(pending)
        if (outputs := core.step()) is not None:
            pending.difference_update(o.id for o in outputs.outputs if o.reason is not None)
            outbox.send(outputs)
        heartbeat.last_step = time.monotonic()
        heartbeat.pending = len(pending)


def _control(core: EngineCore, message: Control) -> ControlReply:
    try:
        return ControlReply(message.id, core.control(message.op, message.args))
    except Exception as error:  # an operation that fails must not end the engine
        return ControlReply(message.id, error=f"{type(error).__name__}: {error}")
