"""The engine core's process: sockets, a heartbeat, and the loop around the core.

Not for: deciding anything (that is `scheduler.py`) or building the worker (`octavo/core.py`).
Next file: `client.py`, the other end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence

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
    SequenceOutput,
    StepOutputs,
    ToCore,
    WorkerInfo,
)

HEARTBEAT_SECONDS = 0.5
FORGET = "forget"  # a Control of the server: a client is gone, its sequences are to be ended
STDERR = 2
SELECTABLE = 1024  # numbers of files below it can be waited for by select(2)

Report = Callable[[str], None]


class Inbox:
    """Takes messages off the sockets. Their own threads receive meanwhile, also in a long step."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[Addresses]
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._sockets = [open_socket(context, zmq.PULL) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.connect(address.to_core)
        self._watched = [int(socket.getsockopt(zmq.FD)) for socket in self._sockets]

    def drain(self, patience: float) -> list[tuple[int, ToCore]]:
        """(client, message) of all that are there, after at most `patience` seconds for one.

        Raises MsgspecError: only our own clients can connect, and a request that is lost would
        never be answered.
        """
        found = self._take()
        if not found and patience > 0:
            self._wait(patience)
            found = self._take()
        return found

    def _wait(self, patience: float) -> None:
        if max(self._watched) < SELECTABLE:
            select.select(self._watched, (), (), patience)
            return
        poll = select.poll()  # waits for whole milliseconds
        for number in self._watched:
            poll.register(number, select.POLLIN)
        poll.poll(1000 * patience)

    def _take(self) -> list[tuple[int, ToCore]]:
        """All that is there: a socket tells once when it begins to hold something."""
        found: list[tuple[int, ToCore]] = []
        for client, socket in enumerate(self._sockets):
            with contextlib.suppress(zmq.Again):
                while True:
                    found.append((client, self._decoder.decode(socket.recv(zmq.NOBLOCK))))
        return found


class Outbox:
    """The way back to the clients."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[Addresses]
    ) -> None:
        self._sockets = [open_socket(context, zmq.PUSH) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.linger = 1000  # a last message must get out before the process ends
            socket.connect(address.from_core)

    def send(self, message: FromCore, client: int = 0) -> None:
        """Hands the message to the socket's own thread."""
        self._sockets[client].send(encode(message))

    def send_all(self, message: FromCore) -> None:
        """The same to every client."""
        data = encode(message)
        for socket in self._sockets:
            socket.send(data)


class Owners:
    """Which client each open sequence belongs to, and with that where its news goes.

    With several clients the first is the server's own: it gets the figures of every step and no
    sequences, the others get their sequences and the figures of the steps that brought them news.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._clients: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, name: str, client: int) -> None:
        """A new sequence."""
        self._clients[name] = client

    def forget(self, client: int) -> list[str]:
        """The sequences of a client that is gone; their news goes nowhere from now on."""
        names = [name for name, owner in self._clients.items() if owner == client]
        for name in names:
            del self._clients[name]
        return names

    def send(self, message: StepOutputs) -> None:
        """Sends the news of a step to those whom it concerns."""
        clients = self._clients
        by_client: dict[int, list[SequenceOutput]] = {0: []}
        for output in message.outputs:
            client = clients.get(output.id)
            if client is None:
                continue  # of a client that is gone
            by_client.setdefault(client, []).append(output)
            if output.reason is not None:
                del clients[output.id]
        self._outbox.send(StepOutputs(by_client.pop(0), message.stats))
        for client, outputs in by_client.items():
            self._outbox.send(StepOutputs(outputs, message.stats), client)


class Heartbeat:
    """A thread that tells all clients that this process lives, what it does, and when it moved.

    It also ends the process when its parent is gone, so that no core is ever left behind.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], addresses: Sequence[Addresses], parent: int
    ) -> None:
        self.phase = "loading"
        self.detail = ""
        self.last_step = time.monotonic()
        self.pending = 0
        self.core: EngineCore | None = None  # once there is one
        self._context = context
        self._addresses = addresses
        self._parent = parent
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        outbox = Outbox(self._context, self._addresses)
        while os.getppid() == self._parent:
            now = time.monotonic()
            allowed = 0.0 if self.core is None else self.core.allowance
            outbox.send_all(
                Progress(now, self.phase, self.last_step, self.pending, self.detail, allowed)
            )
            time.sleep(HEARTBEAT_SECONDS)
        os._exit(1)


def run(
    addresses: Addresses | Sequence[Addresses],
    parent: int,
    build: Callable[[Report], tuple[EngineCore, WorkerInfo]],
) -> int:
    """Builds the core, then serves until a `stop` arrives; the exit code. SIGUSR1 shows stacks.

    `addresses` are those of its clients. The process ends by itself once `parent`, a process id,
    is no longer its parent.
    """
    clients = [addresses] if isinstance(addresses, Addresses) else addresses
    # Written by the signal handler itself, so a thread that holds the interpreter is seen too.
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, clients)
    heartbeat = Heartbeat(context, clients, parent)

    def report(detail: str) -> None:
        heartbeat.detail = detail

    try:
        # Requests may be waiting in the sockets already; they are read once there is a core.
        core, info = build(report)
        gc.freeze()  # what is there now stays: looking through it takes longer than a step
        inbox = Inbox(context, clients)
        outbox.send_all(Ready(info))
        heartbeat.core, heartbeat.phase, heartbeat.detail = core, "idle", ""
        try:
            _serve(core, inbox, outbox, heartbeat)
        finally:
            core.close()
    except Exception as error:
        outbox.send_all(Died(f"{error}", type(error).__name__))
        raise
    return 0


def _serve(core: EngineCore, inbox: Inbox, outbox: Outbox, heartbeat: Heartbeat) -> None:
    pending = Owners(outbox)
    while True:
        for client, message in inbox.drain(
            core.patience() if core.has_work() else HEARTBEAT_SECONDS
        ):
            if isinstance(message, AddRequest):
                pending.add(message.id, client)
                core.add(message)
            elif isinstance(message, Control):
                if message.op == "stop":
                    return
                if message.op == FORGET:
                    core.abort(pending.forget(int(message.args["client"])))
                    outbox.send(ControlReply(message.id), client)
                    continue
                outbox.send(_control(core, message), client)
            else:
                core.abort(message.ids)
        if not core.has_work():
            core.check()
            heartbeat.phase = "idle"
            continue
        if core.patience() > 0:
            continue  # more may come before the next plan is due
        if heartbeat.phase == "idle":
            heartbeat.phase, heartbeat.last_step = "running", time.monotonic()
        heartbeat.pending = len(pending)
        if (outputs := core.step()) is not None:
            pending.send(outputs)
            heartbeat.last_step = time.monotonic()
        heartbeat.pending = len(pending)


def _control(core: EngineCore, message: Control) -> ControlReply:
    try:
        return ControlReply(message.id, core.control(message.op, message.args))
    except Exception as error:  # an operation that fails must not end the engine
        return ControlReply(message.id, error=f"{type(error).__name__}: {error}")
