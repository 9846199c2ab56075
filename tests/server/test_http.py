"""The server on a real socket: OpenAI's own client, raw bytes, limits, and the start."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.run import Listen, bind, serve
from octavo.server.settings import HttpLimits, ServerSettings
from tests.server.fake_engine import ANSWER, FakeEngine, strict_loads

QUICK = HttpLimits(head_timeout=0.4, idle_timeout=0.4, keep_alive=0.4)


@contextlib.asynccontextmanager
async def served(
    engine: FakeEngine,
    *,
    settings: ServerSettings | None = None,
    limits: HttpLimits | None = None,
    **listen: Any,
) -> AsyncIterator[str]:
    """The address of a running server, which has ended afterwards."""
    stop = asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(
        serve(
            create_app(engine, settings),
            listen=Listen(**{"host": "127.0.0.1", "port": 0, **listen}),
            stop=stop,
            limits=limits,
            on_started=started.set_result,
            close_timeout=2,
        )
    )
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    if not started.done():
        task.result()
    try:
        yield started.result()
    finally:
        stop.set()
        await asyncio.wait_for(task, 10)


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def raw(address: str, *pieces: bytes, wait: float = 5.0) -> tuple[int, bytes]:
    """Send bytes, read to the end; the status (0 if the server only closed) and the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    data = b""
    try:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            data = await asyncio.wait_for(reader.read(), wait)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def client_of(address: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


async def test_openai_client_chat_and_completions() -> None:
    engine = FakeEngine(num_cached=2)
    settings = ServerSettings(api_keys=("sk-right",))
    async with served(engine, settings=settings) as address, client_of(address, "sk-right") as ai:
        assert [model.id async for model in ai.models.list()] == ["owl-1", "owl/alias"]
        messages: Any = [{"role": "user", "content": "Hi"}]
        answer = await ai.chat.completions.create(
            model="owl-1", messages=messages, logprobs=True, top_logprobs=2, n=2
        )
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[1].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 2
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content[0].top_logprobs) == 2
        stream = await ai.chat.completions.create(
            model="owl-1",
            messages=messages,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"top_k": 5, "return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
        assert text == ANSWER
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        completion = await ai.completions.create(
            model="owl-1", prompt=["The owls", "hoot"], echo=True, logprobs=1, max_tokens=3
        )
        assert completion.choices[1].text.startswith("hoot")
        assert completion.choices[0].logprobs is not None
        parts = await ai.completions.create(model="owl-1", prompt="x", stream=True, max_tokens=5)
        assert "".join([part.choices[0].text async for part in parts]) in ANSWER


async def test_openai_client_understands_the_errors() -> None:
    engine = FakeEngine()
    messages: Any = [{"role": "user", "content": "Hi"}]
    settings = ServerSettings(api_keys=("sk-right",), max_body_bytes=20_000)
    async with served(engine, settings=settings) as address:
        async with client_of(address, "sk-wrong") as ai:
            with pytest.raises(openai.AuthenticationError, match="wrong"):
                await ai.models.list()
        async with client_of(address, "sk-right") as ai:
            create = ai.chat.completions.create
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await create(model="no", messages=messages)
            with pytest.raises(openai.BadRequestError) as caught:
                await create(model="owl-1", messages=messages, temperature=-1)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.APIStatusError) as refused:
                await create(model="owl-1", messages=messages, user="u" * 30_000)
            assert refused.value.status_code == 413
            engine.faults.die_after = 4
            stream = await create(model="owl-1", messages=messages, stream=True)
            with pytest.raises(openai.APIError, match="gone"):
                async for _ in stream:
                    pass
            with pytest.raises(openai.InternalServerError):
                await create(model="owl-1", messages=messages)


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n"
MB = b"a" * 2**20


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        ([GET, b"X-A: ", MB, b"\r\n\r\n"], {431, 0}),
        ([GET, b"X-A: ", b"a" * 70_000, b"\r\n\r\n"], {431}),
        ([GET, *(b"X-%d: 1\r\n" % number for number in range(10_000)), b"\r\n"], {431, 0}),
        ([GET, b"".join(b"X-%d: 1\r\n" % number for number in range(140)), b"\r\n"], {431}),
        ([b"GET /", MB, b" HTTP/1.1\r\nHost: x\r\n\r\n"], {414, 0}),
        ([b"GET /", b"a" * 17_000, b" HTTP/1.1\r\nHost: x\r\n\r\n"], {414}),
        ([POST + b"Content-Length: 1073741824\r\n\r\n{"], {413}),
        ([POST + b"Content-Length: 209715200\r\n\r\n", *[MB] * 40], {413, 0}),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"100000\r\n" + MB + b"\r\n"] * 40],
         {413, 0}),
        ([POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"], {400}),
        ([POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], {400}),
        ([POST + b"Content-Length: -5\r\n\r\n"], {400}),
        ([POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n"], {400}),
        ([b"nonsense\r\n\r\n"], {400}),
        ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], {400}),
        ([b"GET /version HTTP/3.7\r\nHost: x\r\n\r\n"], {400}),
        ([b"BREW /version HTTP/1.1\r\nHost: x\r\n\r\n"], {400}),
        ([b"GET /version HTTP/1.1\r\nHo st: x\r\n\r\n"], {400}),
        ([b"GET /version HTTP/2.0\r\nHost: x\r\n\r\n"], {505}),
        ([b"GET /version HTTP/1.1\r\n\r\n"], {400}),
        ([GET + b"Host: y\r\n\r\n"], {400}),
        ([GET + b"X-A: b\0c\r\n\r\n"], {400}),
        ([b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n"], {400, 405}),
    ],
)  # fmt: skip
async def test_limits_of_the_parser(pieces: list[bytes], statuses: set[int]) -> None:
    engine = FakeEngine()
    async with served(engine) as address:
        status, body = await raw(address, *pieces)
        assert status in statuses
        if status:
            assert strict_loads(body)["error"]["code"] == status  # type: ignore[index]
        status, body = await raw(address, GET + b"Connection: close\r\n\r\n")
        assert status == 200
        assert engine.seen == []


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n", "method"),
        (GET + b"X-A: b\0c\r\n\r\n", "header value"),
        (POST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", "Content-Length"),
        (GET + b"Host: y\r\n\r\n", "2 Host headers"),
        (b"GET / HTTP/1.1\r\n\r\n", "0 Host headers"),
    ],
)
async def test_refusals_of_the_parser_say_why(request_: bytes, says: str) -> None:
    async with served(FakeEngine()) as address:
        status, body = await raw(address, request_)
        assert status == 400
        assert says in strict_loads(body)["error"]["message"]  # type: ignore[index]


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
BODY = json.dumps({"prompt": "The owls", "max_tokens": 3}).encode()


@pytest.mark.parametrize("pieces", [1, 2, 7, 200])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_upgrade_that_is_offered_is_not_taken(pieces: int, chunked: bool) -> None:
    """Some clients offer h2c with every first request; it is answered as if they did not."""
    length = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(BODY)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    post = POST + H2C + length + b"\r\n" + body
    data = post + GET + H2C + b"\r\n" + post.replace(H2C, b"Connection: close\r\n")
    size = -(-len(data) // pieces)
    async with served(FakeEngine()) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            await asyncio.sleep(0)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
    assert answer.count(b"HTTP/1.1 200 ") == 3
    assert answer.count(b"HTTP/1.1 ") == 3
    assert answer.count(b'"completion_tokens":3') == 2
    assert b'"version"' in answer


async def test_auth_is_not_skipped_by_odd_requests() -> None:
    settings = ServerSettings(api_keys=("sk",))
    async with served(FakeEngine(), settings=settings) as address:
        for line in (
            b"GET http://x/v1/models HTTP/1.1\r\nHost: x\r\n",
            b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: x/health\r\n",
            b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y\r\n",
            b"GET /v1/models?/health HTTP/1.1\r\nHost: x\r\n",
            b"GET /%76%31/models HTTP/1.1\r\nHost: x\r\n",
            b"GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: x\r\n",
            b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n",
        ):
            status, _ = await raw(address, line + b"Connection: close\r\n\r\n")
            assert status in (400, 401), line


async def test_half_requests_are_cut_and_others_served() -> None:
    engine = FakeEngine()
    async with served(engine, limits=QUICK) as address:
        halves = [
            [],
            [b"POST /v1/compl"],
            [POST],
            [POST + b"Content-Length: 500\r\n\r\n" + b"{"],
            [GET + b"\r\n"],  # a whole one, then nothing: the connection is closed
            [GET + b"\r\n", GET],
        ]
        started = time.monotonic()
        tasks = [asyncio.ensure_future(raw(address, *half)) for half in halves]
        async with client_of(address) as ai:
            await ai.models.list()
        statuses = [(await task)[0] for task in tasks]
        assert statuses == [408, 408, 408, 408, 200, 200]
        assert time.monotonic() - started < 4
        assert engine.seen == []


async def test_a_slow_head_does_not_get_more_time_by_trickling() -> None:
    async with served(FakeEngine(), limits=QUICK) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        answer = asyncio.ensure_future(reader.readline())
        sent = 0
        while not answer.done() and sent < 100:
            writer.write(GET[sent % 20 : sent % 20 + 1])
            sent += 1
            await asyncio.sleep(0.05)
        assert b"408" in await answer
        writer.close()


async def test_a_slow_but_steady_body_is_waited_for() -> None:
    async with served(FakeEngine(), limits=QUICK) as address:
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 5):
            writer.write(body[at : at + 5])
            await asyncio.sleep(0.15)
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_long_answer_is_not_taken_for_silence() -> None:
    engine = FakeEngine(step_seconds=0.1)
    async with served(engine, limits=QUICK) as address, client_of(address) as ai:
        answer = await ai.completions.create(model="owl-1", prompt="x", max_tokens=10)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 10


async def test_pipelined_requests_are_answered_in_turn() -> None:
    async with served(FakeEngine()) as address:
        pair = GET + b"\r\n" + GET + b"Connection: close\r\n\r\n"
        status, body = await raw(address, pair)
        assert status == 200
        assert body.count(b'{"version":"0.1.0"}') == 2


ASKED = b'{"prompt":"x","max_tokens":5}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n%b" % (len(ASKED), ASKED)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("behind", "status"),
    [
        (b"\x00\x01 nonsense\r\n\r\n", b"400"),
        (b"GET /version HTTP/1.1\r\n\r\n", b"400"),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"400"),
        (GET + b"X-A: " + b"a" * 70_000 + b"\r\n\r\n", b"431"),
        (GET, b"408"),
    ],
)
async def test_what_is_refused_waits_for_the_answers_before_it(
    behind: bytes, status: bytes, split: bool
) -> None:
    engine = FakeEngine(step_seconds=0.15)
    async with served(engine, limits=QUICK) as address:
        pieces = [WHOLE, WHOLE + behind] if split else [WHOLE + WHOLE + behind]
        first, rest = await raw(address, *pieces)
        assert first == 200
        answers = rest.split(b"HTTP/1.1 ")
        assert [one[:3] for one in answers[1:]] == [b"200", status]
        assert [b'"completion_tokens":5' in one for one in answers] == [True, True, False]


async def one_is_aborted(engine: FakeEngine) -> None:
    """Waits until nothing runs, a second at most."""
    for _ in range(200):
        if not engine.running:
            break
        await asyncio.sleep(0.005)
    assert (engine.running, engine.aborted) == (0, 1)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_closed_socket_ends_the_request(streamed: bool) -> None:
    engine = FakeEngine(step_seconds=0.005)
    async with served(engine) as address:
        body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": streamed}
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        writer.write(POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        while not engine.running:
            await asyncio.sleep(0.005)
        if streamed:
            assert await reader.readline()
        writer.close()
        await one_is_aborted(engine)


async def test_a_closed_socket_ends_the_request_with_others_behind_it() -> None:
    engine = FakeEngine(step_seconds=0.005)
    async with served(engine) as address:
        data = json.dumps({"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True})
        asked = POST + b"Content-Length: %d\r\n\r\n" % len(data) + data.encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
        writer.write(asked + asked)
        assert await reader.readline()
        writer.close()
        await one_is_aborted(engine)


async def test_a_reader_that_stops_is_dropped_with_its_buffers() -> None:
    engine = FakeEngine()
    settings = ServerSettings(slow_reader_limit=0.3)
    engine.limits = engine.limits.__class__(10**6, engine.limits.vocab_size)
    async with served(engine, settings=settings) as address:
        body = {"prompt": "x", "max_tokens": 10**5, "ignore_eos": True, "stream": True, "n": 8}
        data = json.dumps(body).encode()
        quiet = socket.socket()
        quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        quiet.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(quiet, ("127.0.0.1", port_of(address)))
        await loop.sock_sendall(quiet, POST + b"Content-Length: %d\r\n\r\n" % len(data) + data)
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if engine.aborted:
                break
        assert (engine.running, engine.aborted) == (0, 8)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.wait_for(loop.sock_recv(quiet, 2**20), 5):
                received += part
        assert b"[DONE]" not in received
        assert len(received) < 2**23
        quiet.close()


async def test_stop_lets_open_answers_end() -> None:
    engine = FakeEngine(step_seconds=0.02)
    async with served(engine) as address:
        ai = client_of(address)
        answer = asyncio.ensure_future(
            ai.completions.create(model="owl-1", prompt="x", max_tokens=9, timeout=10)
        )
        while not engine.running:
            await asyncio.sleep(0.005)
    result = await answer
    assert result.choices[0].finish_reason == "length"
    await ai.close()


async def test_a_taken_port_is_an_error_that_says_what_to_do() -> None:
    async with served(FakeEngine()) as address:
        port = port_of(address)
        with pytest.raises(ConfigError, match=f"--port {port} is taken") as caught:
            await serve(
                create_app(FakeEngine()),
                listen=Listen(host="127.0.0.1", port=port),
                stop=asyncio.Event(),
            )
        assert caught.value.option == "port"


def test_addresses_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--host no"):
        bind(Listen(host="no.such.host.invalid"))
    with pytest.raises(ConfigError, match="--host 192"):
        bind(Listen(host="192.0.2.1", port=0))
    taken = tmp_path / "file"
    taken.write_text("mine")
    with pytest.raises(ConfigError, match="--uds"):
        bind(Listen(uds=str(taken)))
    assert taken.read_text() == "mine"
    with pytest.raises(ConfigError, match="--uds"):
        bind(Listen(uds=str(tmp_path / ("x" * 200))))


def test_a_privileged_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match="needs privileges"):
        bind(Listen(host="127.0.0.1", port=80))


async def test_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "octavo.sock")
    left = socket.socket(socket.AF_UNIX)
    left.bind(path)
    left.close()  # the file stays behind, as after a crash
    async with served(FakeEngine(), uds=path) as address:
        assert address == f"unix:{path}"
        with pytest.raises(ConfigError, match="in use"):
            bind(Listen(uds=path))
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(GET + b"Connection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()
    assert not Path(path).exists()


async def test_ipv6_and_all_interfaces() -> None:
    async with served(FakeEngine(), host=None) as address:
        assert address.startswith("http://0.0.0.0:")
    try:
        async with served(FakeEngine(), host="::1") as address:
            assert address.startswith("http://[::1]:")
    except ConfigError:
        pytest.skip("no IPv6 here")


async def test_a_broken_certificate_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("not a certificate")
    for file in (str(path), str(tmp_path / "absent.pem")):
        with pytest.raises(ConfigError, match="--ssl-certfile"):
            async with served(FakeEngine(), ssl_certfile=file, ssl_keyfile=file):
                pass


async def test_a_prefix_removed_by_a_proxy() -> None:
    settings = ServerSettings(api_keys=("sk",))
    async with served(FakeEngine(), settings=settings, root_path="/api") as address:
        status, _ = await raw(
            address, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        )
        assert status == 200
        status, _ = await raw(address, GET + b"Connection: close\r\n\r\n")
        assert status == 401


async def test_large_bodies_do_not_stop_the_loop() -> None:
    engine = FakeEngine()
    words = "some ordinary words of a large document " * (27 * 26_214)
    body = json.dumps({"messages": [{"role": "user", "content": words}]}).encode()
    async with served(engine) as address:
        done = asyncio.Event()
        gaps: list[float] = []

        async def watch() -> None:
            last = time.monotonic()
            while not done.is_set():
                await asyncio.sleep(0.005)
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        task = asyncio.ensure_future(watch())
        head = POST.replace(b"completions", b"chat/completions")
        status, answer = await raw(
            address, head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body), body
        )
        done.set()
        await task
        assert status == 400
        assert b"maximum context length" in answer
        # No time is asserted: this one is here to be read when it is slow.
        print("largest gap of the loop", max(gaps))
