"""The router over engines that are played: affinity, failover, refusals, streams that break."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from octavo.cli.main import main
from octavo.platform import route
from octavo.platform.route import Application, Backend, Router, beginning_of


@dataclass
class Engine:
    """Speaks just enough HTTP; `mode` says how it behaves."""

    name: str
    mode: str = "good"
    asked: list[bytes] = field(default_factory=list)
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                await self._answer(head.split(b" ")[1], body, writer)
                if self.mode == "dies":
                    break
        writer.close()

    async def _answer(self, path: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == b"/load":
            return _send(writer, 200, b'{"server_load": 0}')
        if path == b"/health/ready":
            return _send(writer, 200, b"{}")
        self.asked.append(body)
        if self.mode == "full":
            return _send(writer, 429, b'{"error": {}}', b"retry-after: 7\r\n")
        if self.mode == "dies":
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 99\r\n\r\n"
            )
            writer.write(head + b"data: 1\n\n")
            await writer.drain()
            return None
        return _send(writer, 200, self.name.encode())


def _send(writer: asyncio.StreamWriter, status: int, body: bytes, more: bytes = b"") -> None:
    head = b"HTTP/1.1 %d X\r\n%scontent-length: %d\r\n\r\n" % (status, more, len(body))
    writer.write(head + body)


@contextlib.asynccontextmanager
async def pool(*modes: str) -> AsyncIterator[tuple[httpx.AsyncClient, list[Engine], Application]]:
    engines = [Engine(f"engine-{number}", mode) for number, mode in enumerate(modes)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
            stack.callback(server.close)
            engine.port = server.sockets[0].getsockname()[1]
            if engine.mode == "gone":
                server.close()
        made = Application([Backend(f"http://127.0.0.1:{engine.port}") for engine in engines])
        await stack.enter_async_context(made.app.router.lifespan_context(made.app))
        transport = httpx.ASGITransport(app=made.app)
        client = httpx.AsyncClient(transport=transport, base_url="http://router")
        await stack.enter_async_context(client)
        for _ in range(100):
            if any(one.ready for one in made.router.backends):
                break
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        yield client, engines, made


def body(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


async def test_bodies_are_passed_on_as_they_are() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    sent = body("".join(chr(random.Random(seed).randint(32, 0x2FFF)) for _ in range(200)))
    async with pool("good") as (client, engines, _):
        answer = await client.post("/v1/chat/completions?x=1", content=sent)
        assert answer.content == b"engine-0"
        assert engines[0].asked == [sent]


async def test_a_beginning_goes_where_it_was() -> None:
    async with pool("good", "good", "good") as (client, _, _app):
        first = (await client.post("/v1/chat/completions", content=body("once " * 200))).content
        for number in range(4):
            more = body("once " * 200 + str(number))
            assert (await client.post("/v1/chat/completions", content=more)).content == first


async def test_what_one_refuses_or_is_gone_the_next_takes() -> None:
    async with pool("full", "gone", "good") as (client, engines, _):
        for number in range(6):
            answer = await client.post("/v1/completions", content=body(f"{number}"))
            assert (answer.status_code, answer.content) == (200, b"engine-2")
        assert engines[1].asked == []


async def test_if_all_refuse_the_client_hears_when_to_come_back() -> None:
    async with pool("full", "full") as (client, engines, made):
        answer = await client.post("/v1/completions", content=body("x"))
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        assert [len(engine.asked) for engine in engines] == [1, 1]
        assert [one.sent for one in made.router.backends] == [0, 0]


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async with pool("dies") as (client, _, made):
        answer = await client.post("/v1/completions", content=body("x"))
        assert answer.content.startswith(b"data: 1\n\n")
        assert b'"error"' in answer.content
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert made.router.backends[0].sent == 0


async def test_equals_take_turns() -> None:
    async with pool("good", "good") as (client, engines, _):
        for number in range(6):
            await client.post("/v1/completions", content=body(f"{number}"))
        assert [len(engine.asked) for engine in engines] == [3, 3]


def test_the_busier_one_is_left_even_by_its_own_beginnings() -> None:
    busy, idle = Backend("a", ready=True), Backend("b", ready=True)
    chosen = Router([busy, idle])
    chosen.remember(b"x", busy)
    busy.sent = route.EXTRA
    assert chosen.order(b"x")[0] is busy
    busy.sent += 1
    assert chosen.order(b"x")[0] is idle
    heavy = Backend("c", weight=3.0, ready=True, sent=2)
    light = Backend("d", ready=True, sent=1)
    assert Router([light, heavy]).order(b"")[0] is heavy


def test_beginnings_and_bad_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert beginning_of(b"not json") == beginning_of(b"[1]") == beginning_of(b"{}") == b""
    assert beginning_of(body("a" * 600 + "b")) == beginning_of(body("a" * 600 + "c"))
    assert main(["route", "--backend", "localhost:8000"]) == 1
    assert "write http://HOST:PORT" in capsys.readouterr().err
