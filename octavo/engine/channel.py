"""The two one-way channels between an API process and the engine core, over local sockets.

Messages are msgspec records of `types.py` and nothing else is ever decoded (no pickle). The
server owns a private folder with the sockets. Each API process has two of its own and binds them;
the core connects to all, and so knows whose message it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from octavo.types import FromCore, ToCore


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the channels of one engine core are."""

    to_core: str
    from_core: str

    @classmethod
    def in_folder(cls, folder: Path, number: int = 0) -> Addresses:
        """Two sockets of client `number` inside a folder that only this user may enter."""
        return cls(f"ipc://{folder}/to-core-{number}", f"ipc://{folder}/from-core-{number}")

    @property
    def folder(self) -> Path:
        """The folder that the sockets are in."""
        return Path(self.to_core.removeprefix("ipc://")).parent


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket that never blocks the sender and never holds up an exit."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.linger = 0
    return socket


def encode(message: ToCore | FromCore) -> bytes:
    """One record as bytes."""
    return msgspec.msgpack.encode(message)
