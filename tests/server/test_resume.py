"""Streams whose connection breaks: the rest is given to whom it belongs, while it is kept."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest
from starlette.applications import Starlette

from octavo.server.app import create_app
from octavo.server.feed import Outlet
from octavo.server.kept import KeepLimits, Streams, Wish, wish_of
from octavo.server.keys import Key, digest_of
from octavo.server.settings import ServerSettings
from tests.server.asgi import Exchange, Reply, call
from tests.server.fake_engine import FakeEngine, Faults

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "The owls"},
    "/v1/responses": {"input": "Hi"},
    "/v2/models/owl-1/generate_stream": {"text_input": "Hi"},
}
KEEP = {"X-Octavo-Resume": "30"}
EVENT = re.compile(rb"id: ([^\n]+):(\d+)\n(.*?\n)\n", re.DOTALL)


def begin(app: Starlette, path: str = "/v1/chat/completions", **headers: str) -> Exchange:
    body = json.dumps({**BODIES[path], "stream": True}).encode()
    return Exchange(app, "POST", path, body=body, headers={**KEEP, **headers})


async def leave(exchange: Exchange, events: int) -> bytes:
    """Breaks the connection after so many parts; what the client has of it."""
    await exchange.until_events(events)
    exchange.gone.set()
    await exchange.end()
    return exchange.reply.body


def last_of(data: bytes) -> str:
    return re.findall(rb"^id: (.*)$", data, re.MULTILINE)[-1].decode()


def numbers(data: bytes) -> list[int]:
    assert EVENT.sub(b"", data) == b"", "events and nothing else"
    return [int(number) for _, number, _ in EVENT.findall(data)]


async def rest(app: Starlette, last: str, **headers: str) -> Reply:
    id = last.split(":")[0]
    return await call(
        app, "GET", f"/v1/requests/{id}/stream", headers={"Last-Event-ID": last, **headers}
    )


@pytest.mark.parametrize("path", BODIES)
async def test_the_rest_joins_wherever_the_stream_was_cut(path: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    engine = FakeEngine()
    app = create_app(engine)
    plain = await call(app, "POST", path, {**BODIES[path], "stream": True})
    assert b"id: " not in plain.body
    for _ in range(6):
        exchange = begin(app, path)
        had = await leave(exchange, dice.randint(1, 12))
        assert exchange.reply.headers["x-octavo-resume"] == "30"
        # the client may have less than was sent, and half an event
        had = had[: dice.randint(had.index(b"\n\n") + 2, len(had))]
        whole = had[: had.rindex(b"\n\n") + 2]
        reply = await rest(app, last_of(whole))
        if reply.status == 204:
            reply.complete = True
        assert reply.complete
        joined = whole + reply.body
        assert numbers(joined) == list(range(1, len(numbers(joined)) + 1))
        name = last_of(joined).rpartition(":")[0]
        assert joined == (await rest(app, f"{name}:0")).body
        assert text_of(joined) == text_of(plain.body)
    assert engine.running == engine.aborted == 0


def text_of(data: bytes) -> list[str]:
    """The pieces of text in the events of any route."""
    texts = []
    for line in data.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "choices" in event:
            choice = event["choices"][0]
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        else:
            texts.append(event.get("delta") or event.get("text_output") or "")
    return [text for text in texts if isinstance(text, str) and text]


async def test_who_did_not_ask_is_ended_at_once() -> None:
    engine = FakeEngine(step_seconds=0.01)
    app = create_app(engine)
    body = json.dumps({**BODIES["/v1/completions"], "stream": True}).encode()
    exchange = Exchange(app, "POST", "/v1/completions", body=body)
    await leave(exchange, 3)
    await asyncio.sleep(0.05)
    assert (engine.running, engine.aborted) == (0, 1)
    assert b"id: " not in exchange.reply.body


async def test_a_broken_stream_runs_on_and_goes_on_live() -> None:
    engine = FakeEngine(step_seconds=0.01)
    app = create_app(engine)
    exchange = begin(app)
    had = await leave(exchange, 3)
    engine.gate.clear()
    await asyncio.sleep(0.05)
    assert engine.running == 1
    assert b"octavo:streams_held{" in engine.metrics.render()[0]
    assert held(engine) == 1
    id = last_of(had).split(":")[0]
    headers = {"Last-Event-ID": last_of(had)}
    second = Exchange(app, "GET", f"/v1/requests/{id}/stream", headers=headers)
    await second.until_events(1)
    before = len(second.reply.parts)
    assert held(engine) == 0
    engine.gate.set()
    reply = await second.end()
    assert len(reply.parts) > before + 1, "events that came after the new connection"
    assert numbers(had + reply.body) == list(range(1, len(numbers(had + reply.body)) + 1))
    assert reply.body.endswith(b"data: [DONE]\n\n")
    assert engine.aborted == 0


def held(engine: FakeEngine) -> float:
    text = engine.metrics.render()[0].decode()
    found = re.search(r"^octavo:streams_held{.*} (\S+)$", text, re.MULTILINE)
    assert found
    return float(found[1])


async def test_a_second_reader_takes_over() -> None:
    engine = FakeEngine(step_seconds=0.01)
    app = create_app(engine)
    first = begin(app)
    await first.until_events(3)
    id = last_of(first.reply.body).split(":")[0]
    reply = await call(app, "GET", f"/v1/requests/{id}/stream")
    ended = await first.end()
    assert not ended.complete, "it must not look like the end"
    assert numbers(reply.body)[0] == 1
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_a_post_may_be_sent_again() -> None:
    app = create_app(FakeEngine(step_seconds=0.005))
    had = await leave(begin(app, "/v1/completions"), 4)
    body = {**BODIES["/v1/completions"], "stream": True}
    headers = {**KEEP, "Last-Event-ID": last_of(had)}
    reply = await call(app, "POST", "/v1/completions", body, headers=headers)
    assert numbers(had + reply.body) == list(range(1, len(numbers(had + reply.body)) + 1))
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_a_stream_is_kept_from_the_first_moment() -> None:
    """Who left before the first token comes back with the id that it sent."""
    engine = FakeEngine()
    engine.gate.clear()
    app = create_app(engine)
    exchange = begin(app, **{"X-Request-Id": "mine"})
    await asyncio.sleep(0.02)
    exchange.gone.set()
    await exchange.end()
    assert engine.running == 1
    engine.gate.set()
    reply = await call(app, "GET", "/v1/requests/mine/stream")
    assert numbers(reply.body)[0] == 1
    assert reply.body.endswith(b"data: [DONE]\n\n")


async def test_nothing_is_left_after_the_end() -> None:
    app = create_app(FakeEngine())
    reply = await begin(app).end()
    again = await rest(app, last_of(reply.body))
    assert (again.status, again.body) == (204, b"")


async def test_errors_are_events_of_the_rest() -> None:
    engine = FakeEngine(step_seconds=0.01, faults=Faults(end_after=6, end_reason="timeout"))
    app = create_app(engine)
    had = await leave(begin(app), 2)
    reply = await rest(app, last_of(had))
    assert b'"code":504' in reply.body
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("fields", [{"faults": Faults(crash_after=0)}, {}])
async def test_an_error_before_the_first_event_keeps_nothing(fields: dict[str, Any]) -> None:
    engine = FakeEngine(**fields)
    if not fields:
        engine.set_health(ready=False)
    app = create_app(engine)
    reply = await begin(app, **{"X-Request-Id": "mine"}).end()
    assert reply.status in (500, 503)
    assert (await call(app, "GET", "/v1/requests/mine/stream")).status == 404
    assert app.state.serving.streams.size == 0


async def test_draining_servers_let_streams_go_on() -> None:
    engine = FakeEngine(step_seconds=0.01)
    app = create_app(engine)
    had = await leave(begin(app), 3)
    engine.set_health(ready=False, phase="draining")
    reply = await rest(app, last_of(had))
    assert reply.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("headers", "stream", "status", "words"),
    [
        ({"X-Octavo-Resume": "61"}, True, 400, "from 1 to 60"),
        ({"X-Octavo-Resume": "0"}, True, 400, "from 1 to 60"),
        ({"X-Octavo-Resume": "soon"}, True, 400, "= soon must be whole seconds"),
        ({"X-Octavo-Resume": "9"}, False, 400, "goes with stream = true"),
    ],
)
async def test_what_is_refused(
    headers: dict[str, str], stream: bool, status: int, words: str
) -> None:
    app = create_app(FakeEngine())
    body = {"prompt": "The owls", "stream": stream}
    reply = await call(app, "POST", "/v1/completions", body, headers=headers)
    assert reply.status == status
    assert words in reply.error["message"]
    assert reply.error["param"] == "X-Octavo-Resume"


async def test_a_server_that_keeps_nothing_says_so() -> None:
    app = create_app(FakeEngine(), ServerSettings(keep=KeepLimits(seconds=0)))
    reply = await begin(app).end()
    assert reply.status == 400
    assert "--max-resume-seconds" in reply.error["message"]


async def test_unknown_expired_and_foreign_streams() -> None:
    keys = (
        Key("crow", digest_of(b"sk-crow")),
        Key("heron", digest_of(b"sk-heron")),
    )
    app = create_app(FakeEngine(step_seconds=0.005), ServerSettings(keys=keys))
    crow, heron = ({"Authorization": f"Bearer sk-{name}"} for name in ("crow", "heron"))
    had = await leave(begin(app, **crow, **{"X-Octavo-Resume": "1"}), 3)
    last = last_of(had)
    assert (await rest(app, last)).status == 401
    foreign = await rest(app, last, **heron)
    assert (foreign.status, foreign.error["type"]) == (403, "PermissionDeniedError")
    unknown = await rest(app, "chatcmpl-nobody:abcdef:3", **crow)
    assert (unknown.status, unknown.error["type"]) == (404, "NotFoundError")
    other = await rest(app, last.replace(last.split(":")[1], "000000"), **crow)
    assert other.status == 404, "an id that was used again is another stream"
    beyond = await rest(app, f"{last.rpartition(':')[0]}:999", **crow)
    assert (beyond.status, beyond.error["param"]) == (400, "Last-Event-ID")
    again = await call(
        app, "POST", "/v1/completions", {"prompt": "x"}, headers={**crow, "Last-Event-ID": ""}
    )
    assert again.status == 200, "no event was named"
    for wrong in ("x", "a:b", "a:b:c", "other:aaaaaa:1"):
        id = last.split(":")[0]
        reply = await call(
            app, "GET", f"/v1/requests/{id}/stream", headers={**crow, "Last-Event-ID": wrong}
        )
        assert (reply.status, reply.error["param"]) == (400, "Last-Event-ID"), wrong
    await asyncio.sleep(1.1)
    gone = await rest(app, last, **crow)
    assert (gone.status, gone.error["type"]) == (410, "GoneError")
    assert (await rest(app, last, **heron)).status == 404, "what is gone is told to its own key"
    assert (
        b'streams_lost_total{model_name="owl-1",reason="expired"} 1.0'
        in (app.state.serving.engine.metrics.render()[0])
    )


async def test_an_id_in_use_is_refused() -> None:
    app = create_app(FakeEngine(step_seconds=0.01))
    await leave(begin(app, **{"X-Request-Id": "mine"}), 2)
    reply = await begin(app, **{"X-Request-Id": "mine"}).end()
    assert (reply.status, reply.error["type"]) == (409, "ConflictError")


async def test_only_so_many_are_held() -> None:
    engine = FakeEngine(step_seconds=0.02)
    app = create_app(engine, ServerSettings(keep=KeepLimits(count=2)))
    had = [await leave(begin(app), 2) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert (held(engine), engine.aborted) == (2, 1)
    assert [(await rest(app, last_of(one))).status for one in had] == [200, 200, 410]
    # those that have ended make room for those that run
    more = [await leave(begin(app), 2) for _ in range(2)]
    assert [(await rest(app, last_of(one))).status for one in more] == [200, 200]
    assert engine.aborted == 1


def event(size: int) -> bytes:
    return b"data: " + b"x" * size + b"\n\n"


class Ends:
    """Counts what is ended."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


async def test_bytes_are_bounded() -> None:
    engine = FakeEngine()
    streams = Streams(KeepLimits(size=16_000), engine.metrics.streams)
    outlet = Outlet()
    live = streams.keep("cmpl-live", "", 30, outlet)
    live.on_drop = Ends()
    for _ in range(50):
        live.put(event(100))
    assert live.size <= 1000
    assert len(numbers(outlet.take())) == 50, "the connection gets all"
    with pytest.raises(Exception, match="are not kept any more"):
        live.read(3)
    assert live.on_drop.count == 0
    left = live.read(45)
    assert numbers(left.take()) == [46, 47, 48, 49, 50]
    live.leave(left)
    live.put(event(100))  # nobody reads: nothing may be forgotten, so it is given up
    live.put(event(100))
    assert live.on_drop.count == 1
    assert streams.size == 0
    with pytest.raises(Exception, match="is not kept any more"):
        streams.find(Wish("cmpl-live", ""))


async def test_ended_streams_make_room_for_bytes() -> None:
    streams = Streams(KeepLimits(size=16_000), FakeEngine().metrics.streams)
    for number in range(40):
        outlet = Outlet()
        kept = streams.keep(f"cmpl-{number}", "", 30, outlet)
        kept.put(event(800))
        kept.finish()
        kept.leave(outlet)
        assert streams.size <= 16_000
    assert numbers(streams.find(Wish("39", "")).read(0).take()) == [1]
    with pytest.raises(Exception, match="not kept any more"):
        streams.find(Wish("cmpl-1", ""))


def test_ids_may_hold_colons() -> None:
    wish = wish_of("chatcmpl-a:b:1", "", "chatcmpl-a:b:1:00ff00:17")
    assert (wish.name, wish.after) == ("chatcmpl-a:b:1:00ff00", 17)
    assert replace(wish, id="") != wish
