"""Single parts, for what no request through the whole server can bring about at will."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from octavo.server import logprobs
from octavo.server.app import create_app
from octavo.server.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    prompt_logprobs_body,
)
from octavo.server.middleware import Edge
from octavo.server.protocol import LimitedProtocol
from octavo.server.settings import HttpLimits
from octavo.server.stream import gone
from octavo.text.assembler import Delta, TokenLogprob
from tests.server.asgi import call, chat, complete
from tests.server.fake_engine import FakeEngine


def entry(token: int, raw: bytes, top: list[tuple[int, float, str, bytes]]) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, raw.decode("utf-8", "replace"), raw, top)


@pytest.mark.parametrize("as_ids", [False, True])
def test_log_probs_of_chat_events_are_those_of_whole_answers(
    as_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though they are put together of parts; these are forgotten when there are too many."""
    monkeypatch.setattr(logprobs, "MAX_PARTS", 20)
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    raws = [dice.randbytes(dice.randint(0, 4)) for _ in range(25)]
    raws += [text.encode() for text in ("a", '"', "\\", "100%b %d", "\n", "🦉", "</s>", "\0", "é")]
    writer = ChatLogprobs(as_ids=as_ids)

    def one(count: int) -> TokenLogprob:
        tops = [(token, -20 * dice.random(), raws[token].decode("utf-8", "replace"), raws[token])
                for token in dice.choices(range(len(raws)), k=count)]  # fmt: skip
        token = dice.randrange(len(raws))
        made = entry(token, raws[token], tops)
        made.logprob = dice.choice([-9999.0, -0.0, 0.0, -1e-7, -12345.678, -20 * dice.random()])
        return made

    for _ in range(60):
        entries = [one(dice.randint(0, 6)) for _ in range(dice.randint(1, 3))]
        assert writer.write(entries) == msgspec.json.encode(chat_logprobs(entries, as_ids=as_ids))


def test_parts_of_characters_keep_their_bytes_in_completions() -> None:
    owl = "🦉".encode()
    top = [(1, -0.5, "\ufffd", owl[:2]), (2, -0.7, "\ufffd", owl[2:]), (3, -0.9, "a", b"a")]
    top += [(4, -2.0, "a", b"a")]  # another token of the same text: the better one stays
    writer = CompletionLogprobs(as_ids=False)
    lists = writer.write(writer.generated([entry(1, owl[:2], top), entry(3, b"a", [])]))
    assert lists["tokens"] == ["bytes:\\xf0\\x9f", "a"]
    assert lists["text_offset"] == [0, len("bytes:\\xf0\\x9f")]
    assert lists["top_logprobs"][0] == {
        "bytes:\\xf0\\x9f": -0.5,
        "bytes:\\xa6\\x89": -0.7,
        "a": -0.9,
    }
    assert list(lists["top_logprobs"][0].values()) == [-0.5, -0.7, -0.9]
    writer = CompletionLogprobs(as_ids=True)
    assert writer.write(writer.generated([entry(17, b"a", [])]))["tokens"] == ["token_id:17"]
    assert prompt_logprobs_body(None) is None


class Quiet(FakeEngine):
    """Its last delta has no token, and its stream is an iterator that cannot be closed."""

    def generate(self, *args: Any, **options: Any) -> AsyncIterator[Delta]:
        return Once([Delta(0, text="a", token_ids=[70]), Delta(0, finish_reason="stop")])


class Once:
    def __init__(self, deltas: list[Delta]) -> None:
        self._deltas = iter(deltas)

    def __aiter__(self) -> Once:
        return self

    async def __anext__(self) -> Delta:
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration


@pytest.mark.parametrize("ask", [chat, complete])
async def test_an_ending_without_a_token(ask: Any) -> None:
    app = create_app(Quiet())
    logprobs: Any = True if ask is chat else 1
    events = (await ask(app, stream=True, logprobs=logprobs)).events
    last = events[-2]["choices"][0]
    assert last["finish_reason"] == "stop"
    assert last["logprobs"] is None
    assert (await ask(app, logprobs=logprobs)).status == 200
    assert (await complete(app, ["a", "b"])).status == 200
    assert (await complete(app, max_tokens=0)).json["usage"]["completion_tokens"] == 0


async def test_other_scopes_pass_and_cut_answers_are_told_to_the_server() -> None:
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            raise ZeroDivisionError("a fault")

    edge = Edge(app, create_app(FakeEngine()).state.serving)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        seen.append(message["type"])

    await edge({"type": "lifespan"}, receive, send)
    scope = {"type": "http", "path": "/", "method": "GET", "headers": []}
    with pytest.raises(ZeroDivisionError):
        await edge(scope, receive, send)
    assert seen == ["lifespan", "http", "http.response.start"]


async def test_a_client_is_gone_only_when_it_says_so() -> None:
    messages: list[Message] = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    await gone(receive)
    assert messages == []


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def connect(app: Any, **limits: float) -> tuple[Any, Wire]:
    config = Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    protocol = LimitedProtocol(config, ServerState(), {}, limits=HttpLimits(**limits))  # type: ignore[arg-type]
    wire = Wire()
    protocol.connection_made(wire)
    return protocol, wire


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"


async def test_a_body_that_we_do_not_read_is_not_late() -> None:
    reading = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await reading.wait()
        while (await receive())["type"] != "http.disconnect":
            pass

    protocol, wire = await connect(app, idle_timeout=0.05)
    protocol.data_received(POST.replace(b"100", b"100000") + b"{" * 70_000)
    await asyncio.sleep(0.15)
    assert not wire.closed
    reading.set()
    await asyncio.sleep(0.15)
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 408")
    protocol.connection_lost(None)
    await asyncio.sleep(0.01)


async def test_an_answer_on_its_way_is_not_mixed_with_a_refusal() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        await receive()

    protocol, wire = await connect(app, idle_timeout=0.05)
    protocol.data_received(POST + b"{")
    await asyncio.sleep(0.15)
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 200")
    assert b"408" not in wire.written
    protocol.connection_lost(None)
    await asyncio.sleep(0.01)


async def test_a_body_that_nobody_waits_for_is_cut_without_a_word() -> None:
    protocol, wire = await connect(create_app(FakeEngine()), idle_timeout=0.05)
    protocol.data_received(POST.replace(b"Host", b"Content-Type: text/plain\r\nHost") + b"{")
    await asyncio.sleep(0.2)
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 400")
    assert wire.written.count(b"HTTP/1.1") == 1
    protocol.connection_lost(None)


async def test_half_a_pipelined_head_is_refused_after_the_answer_before_it() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await ended.wait()
        await send({"type": "http.response.body", "body": b"whole"})

    protocol, wire = await connect(app, head_timeout=0.05)
    protocol.data_received(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT")
    await asyncio.sleep(0.2)
    assert not wire.closed
    assert b"408" not in wire.written
    ended.set()
    await asyncio.sleep(0.05)
    assert wire.closed
    assert wire.written.startswith(b"HTTP/1.1 200")
    assert wire.written.index(b"whole") < wire.written.index(b"HTTP/1.1 408")
    protocol.connection_lost(None)


async def test_a_whole_request_has_no_timer_left() -> None:
    protocol, wire = await connect(create_app(FakeEngine()), idle_timeout=0.05, head_timeout=0.05)
    protocol.data_received(POST + b"{" + b" " * 98)
    protocol.data_received(b"}")
    protocol.data_received(b"\r\n")  # stray, as some clients send
    await asyncio.sleep(0.15)
    assert not wire.closed
    assert wire.written.startswith(b"HTTP/1.1 400")
    assert b"408" not in wire.written
    protocol.connection_lost(None)


async def test_bodies_of_tokenizer_routes_may_be_large() -> None:
    engine = FakeEngine()
    body = json.dumps({"tokens": [70] * 50_000}).encode()
    reply = await call(create_app(engine), "POST", "/detokenize", raw=body)
    assert len(reply.json["prompt"]) == 50_000 * len(engine.tokenizer.token_text(70))
