"""The ordered channel between the core and one rank, and the one for proof of life.

On one machine these are sockets in a folder that only this user may enter. Between machines they
are TCP ports on one interface, encrypted, and nobody without the keys of this start can speak.
Not for: what is said (`records.py`). Next file: `remote.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from octavo.errors import EngineDead
from octavo.executor.records import Keys, RankSettings

T = TypeVar("T")
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


def encode(message: msgspec.Struct) -> bytes:
    """One record as bytes."""
    return msgspec.msgpack.encode(message)


class Binder:
    """Opens the core's ends and says where they are."""

    def __init__(self, context: Context, *, folder: Path | None = None, host: str = "") -> None:
        """Either sockets in `folder`, or encrypted ports of the interface with address `host`."""
        self._context = context
        self._folder = folder
        self._host = host
        self._public = self._secret = b""
        if folder is None:
            if not zmq.has("curve"):
                raise EngineDead(
                    "this pyzmq cannot encrypt (no CURVE), so workers on other machines cannot be "
                    "reached safely; install pyzmq's own wheel"
                )
            self._public, self._secret = zmq.curve_keypair()

    def bind(self, kind: int, name: str) -> tuple[Socket, str]:
        """A socket of that kind, and its address."""
        socket = open_socket(self._context, kind)
        if self._folder is not None:
            address = f"ipc://{self._folder}/{name}"
            socket.bind(address)
            return socket, address
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.bind(f"tcp://{self._host}:*")
        where = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(where, bytes)
        return socket, where.decode().rstrip("\0")

    def keys(self) -> Keys | None:
        """Of one more peer; None where the folder's owner is the only one who can connect."""
        if self._folder is not None:
            return None
        public, secret = zmq.curve_keypair()
        return Keys(self._public.decode(), public.decode(), secret.decode())


def open_socket(context: Context, kind: int) -> Socket:
    """A socket that never blocks its sender and never holds up an exit."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    return socket


def connect(context: Context, kind: int, address: str, settings: RankSettings) -> Socket:
    """A rank's end."""
    socket = open_socket(context, kind)
    if settings.keys is not None:
        socket.curve_serverkey = settings.keys.core.encode()
        socket.curve_publickey = settings.keys.public.encode()
        socket.curve_secretkey = settings.keys.secret.encode()
    socket.connect(address)
    return socket
