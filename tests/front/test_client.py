"""The API process's end of the ring, with the test as the core at the other end of the sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import zmq

from octavo.engine.channel import Addresses
from octavo.engine.client import EngineClient
from octavo.errors import EngineDead
from octavo.types import (
    AddRequest,
    Died,
    FromCore,
    SequenceOutput,
    StepOutputs,
    StepStats,
    ToCore,
    TokenParams,
)


class Heard:
    """Hears the news of one sequence and notes its place among that of all."""

    def __init__(self, name: str, order: list[str]) -> None:
        self.name, self.order = name, order
        self.error: Exception | None = None

    def push(self, output: SequenceOutput) -> None:
        self.order.append(f"{self.name}{output.new_ids[0]}")

    def fail(self, error: Exception) -> None:
        self.error = error


class Ring:
    """A client, and the sockets of a core that may connect late."""

    def __init__(self, folder: Path) -> None:
        self.addresses = Addresses.in_folder(folder)
        self.client = EngineClient(self.addresses)
        self.order: list[str] = []
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.inbox, self.outbox = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)

    def connect(self) -> None:
        self.inbox.connect(self.addresses.to_core)
        self.outbox.connect(self.addresses.from_core)

    def submit(self, name: str) -> Heard:
        heard = Heard(name, self.order)
        self.client.submit([AddRequest(name, [1], TokenParams(4), 0.0)], heard)
        return heard

    def tell(self, *outputs: tuple[str, int, bool]) -> None:
        """News of a step: (name, token, whether it is the first)."""
        news = [
            SequenceOutput(name, [token], scheduled_at=1.0 if first else 0.0)
            for name, token, first in outputs
        ]
        self.send(StepOutputs(news, StepStats()))

    def send(self, message: FromCore) -> None:
        self.outbox.send(msgspec.msgpack.encode(message))

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.order) < count:  # looks at every turn of the loop
                await asyncio.sleep(0)

    def close(self) -> None:
        self.client.close()
        self.context.destroy(0)


async def test_messages_wait_for_a_core_that_connects_late(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    for name in "abc":
        ring.submit(name)
    await asyncio.sleep(0.2)
    ring.connect()
    loop = asyncio.get_running_loop()
    decoder = msgspec.msgpack.Decoder(ToCore)
    names = []
    async with asyncio.timeout(20):
        for _ in range(3):
            message = decoder.decode(await loop.run_in_executor(None, ring.inbox.recv))
            assert isinstance(message, AddRequest)
            names.append(message.id)
    assert names == ["a", "b", "c"]
    ring.close()


async def test_others_wait_for_a_stream_that_begins(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.connect()
    for name in "abc":
        ring.submit(name)
    turns: list[str] = ring.order
    ring.tell(("c", 1, True), ("a", 1, False), ("b", 1, False))
    await ring.until(1)
    assert turns == ["c1"]
    await asyncio.sleep(0)
    assert turns == ["c1"]
    await ring.until(3)
    assert turns == ["c1", "a1", "b1"]
    # Each sequence's news keeps its order, however fast steps follow each other.
    ring.tell(("c", 2, True), ("a", 2, False), ("b", 2, False))
    ring.tell(("a", 3, False), ("b", 3, False), ("c", 3, False))
    await ring.until(9)
    assert turns[3:] == ["c2", "a2", "b2", "a3", "b3", "c3"]
    ring.close()


async def test_news_that_waits_is_not_lost_with_the_core(tmp_path: Path) -> None:
    ring = Ring(tmp_path)
    ring.connect()
    heard = [ring.submit(name) for name in "ab"]
    ring.tell(("b", 1, True), ("a", 1, False))
    ring.send(Died("no more", "RuntimeError"))
    await ring.until(2)
    async with asyncio.timeout(20):
        while heard[0].error is None:
            await asyncio.sleep(0.002)
    assert ring.order == ["b1", "a1"]
    assert all(isinstance(each.error, EngineDead) for each in heard)
    ring.close()
