"""Framing of streams, endings in the middle, and clients that leave or do not read."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from octavo.errors import DeadlineExceeded, Draining, EngineDead, Overloaded
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.stream import ABORT_KEY
from tests.server.asgi import Exchange, Reply, call, chat, complete
from tests.server.fake_engine import FakeEngine, Faults

ASKS = {"chat": chat, "completions": complete}


def accept(reply: Reply, *, is_chat: bool, choices: int, usage: bool) -> None:
    """A state machine: opening, content, one finish reason a choice, usage, [DONE], end."""
    assert reply.status == 200
    assert reply.complete
    events = reply.events
    assert events.pop() == "[DONE]"
    if usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] > 0
    states = ["new"] * choices
    for event in events:
        assert event["object"] == ("chat.completion.chunk" if is_chat else "text_completion")
        assert "usage" not in event
        (choice,) = event["choices"]
        index = choice["index"]
        assert states[index] != "finished"
        if is_chat and states[index] == "new":
            assert choice["delta"] == {"role": "assistant", "content": ""}
            assert choice["finish_reason"] is None
            states[index] = "open"
            continue
        if is_chat:
            assert set(choice["delta"]) <= {"content"}
        states[index] = "finished" if choice["finish_reason"] else "open"
    assert states == ["finished"] * choices


@pytest.mark.parametrize("route", ASKS)
async def test_random_streams_are_framed(route: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    engine = FakeEngine()
    app = create_app(engine)

    async def one() -> None:
        number = dice.randint(1, 4)
        usage = dice.random() < 0.5
        fields: dict[str, Any] = {"n": number, "max_tokens": dice.randint(1, 40)}
        if dice.random() < 0.5:
            fields["stop"] = dice.choice(["hoot", "本", "zzz", "1"])
        if usage:
            fields["stream_options"] = {"include_usage": True}
        reply = await ASKS[route](app, stream=True, **fields)
        accept(reply, is_chat=route == "chat", choices=number, usage=usage)

    for _ in range(10):
        await asyncio.gather(*(one() for _ in range(8)))
    assert engine.running == engine.aborted == 0


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
async def test_usage_comes_only_when_it_is_asked_for(options: dict[str, Any] | None) -> None:
    app = create_app(FakeEngine())
    reply = await chat(app, stream=True, stream_options=options, max_tokens=3)
    accept(reply, is_chat=True, choices=1, usage=False)
    forced = create_app(FakeEngine(), ServerSettings(force_include_usage=True))
    reply = await chat(forced, stream=True, stream_options=options, max_tokens=3)
    accept(reply, is_chat=True, choices=1, usage=True)


@pytest.mark.parametrize("tools", [False, True])
async def test_the_roles_of_all_choices_come_first_and_in_order(tools: bool) -> None:
    """`openai` folds a stream into a list that grows as choices come, and begins with the first."""
    engine = FakeEngine()
    app = create_app(engine, ServerSettings(enable_auto_tool_choice=True))
    function = {"name": "f", "parameters": {"type": "object"}}
    more = {"tools": [{"type": "function", "function": function}], "tool_choice": "none"}
    for _ in range(5):
        reply = await chat(app, stream=True, n=5, max_tokens=3, **(more if tools else {}))
        heads = reply.events[:5]
        assert [event["choices"][0]["index"] for event in heads] == [0, 1, 2, 3, 4]
        assert all("role" in event["choices"][0]["delta"] for event in heads)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_comes_after_its_deadline_is_no_answer(streamed: bool) -> None:
    """Though it was made in a step that began in time."""
    engine = FakeEngine(step_seconds=0.05)
    reply = await complete(create_app(engine), max_tokens=3, timeout=0.12, stream=streamed)
    if streamed:
        error, done = reply.events[-2:]
        assert done == "[DONE]"
        assert error["error"]["code"] == 504
        assert not any(event["choices"][0]["finish_reason"] for event in reply.events[:-2])
    else:
        assert reply.status == 504
        assert reply.error["type"] == "TimeoutError"


async def test_a_list_of_prompts_streams_each_choice() -> None:
    app = create_app(FakeEngine())
    reply = await complete(app, ["The owls", "hoot"], n=2, stream=True)
    accept(reply, is_chat=False, choices=4, usage=False)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompts", ["The owls", ["The owls", "hoot"]])
@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (Overloaded("busy", 2.2), 429, "3"),
        (EngineDead("gone"), 503, "1"),
        (Draining("closing"), 503, "1"),
        (DeadlineExceeded("late"), 504, None),
    ],
)
async def test_errors_before_the_first_delta_have_their_own_status(
    streamed: bool, prompts: Any, error: Any, status: int, retry: str | None
) -> None:
    engine = FakeEngine(faults=Faults(refuse=error))
    reply = await complete(create_app(engine), prompts, stream=streamed)
    assert reply.status == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers.get("retry-after") == retry
    assert reply.error["message"] == error.message
    assert engine.running == 0


ENDINGS = [
    (Faults(end_after=1, end_reason="timeout"), 504),
    (Faults(end_after=1, end_reason="error"), 500),
    (Faults(end_after=1, end_reason="abort"), 503),
    (Faults(die_after=0), 503),
    (Faults(crash_after=0), 500),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("faults", "status"), ENDINGS)
async def test_no_ending_without_an_answer_looks_like_one(
    faults: Faults, status: int, streamed: bool
) -> None:
    engine = FakeEngine(faults=faults)
    reply = await chat(create_app(engine), stream=streamed)
    assert reply.status == status
    assert reply.error["code"] == status
    assert "a fault" not in reply.error["message"]
    assert engine.running == 0


@pytest.mark.parametrize("prompts", ["The owls", ["The owls", "hoot", "at"]])
@pytest.mark.parametrize(
    ("faults", "status"),
    [
        (Faults(end_after=5, end_reason="timeout"), 504),
        (Faults(end_after=5, end_reason="error"), 500),
        (Faults(end_after=5, end_reason="abort"), 503),
        (Faults(die_after=5), 503),
        (Faults(crash_after=5), 500),
    ],
)
async def test_errors_in_the_middle_are_an_event_and_then_the_end(
    faults: Faults, status: int, prompts: Any
) -> None:
    engine = FakeEngine(faults=faults)
    app = create_app(engine)
    reply = await complete(app, prompts, stream=True, n=2)
    assert reply.status == 200
    assert reply.complete
    *news, error, done = reply.events
    assert done == "[DONE]"
    assert error["error"]["code"] == status
    assert "a fault" not in error["error"]["message"]
    assert news
    assert not any(choice["finish_reason"] for event in news for choice in event["choices"])
    assert engine.running == 0
    assert (await complete(app, prompts, n=2)).status == status


def start(
    app: Any, fields: dict[str, Any], path: str = "/v1/completions", **options: Any
) -> Exchange:
    body = {"prompt": "The owls", "max_tokens": 200, "ignore_eos": True, **fields}
    if path == "/v1/chat/completions":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "Hi"}]
    return Exchange(app, "POST", path, body=json.dumps(body).encode(), **options)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("fields", [{}, {"n": 4}, {"prompt": ["a", "b", "c", "d"]}])
@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_its_request(
    path: str, fields: dict[str, Any], streamed: bool
) -> None:
    if path == "/v1/chat/completions":
        fields = {name: value for name, value in fields.items() if name != "prompt"}
    engine = FakeEngine(step_seconds=0.001)
    exchange = start(create_app(engine), {**fields, "stream": streamed}, path)
    if streamed:
        await exchange.until_events(5)
    else:
        while not engine.running:
            await asyncio.sleep(0.001)
    wanted = engine.running
    assert wanted in (1, 4)
    exchange.gone.set()
    reply = await exchange.end()
    assert engine.running == 0
    assert engine.aborted == wanted
    assert not reply.complete
    body, _ = engine.metrics.render()
    assert b'finished_reason="abort",model_name="owl-1"} %.1f' % wanted in body
    assert b"vllm:num_requests_running" in body


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_before_the_first_token(streamed: bool) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    exchange = start(create_app(engine), {"stream": streamed})
    while not engine.running:
        await asyncio.sleep(0.001)
    exchange.gone.set()
    reply = await exchange.end()
    assert reply.status == 0
    assert engine.running == 0
    assert engine.aborted == 1
    assert b'status="4xx"' in engine.metrics.render()[0]


async def test_a_client_that_leaves_within_its_body() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    exchange = Exchange(app, "POST", "/v1/completions", body=b'{"prompt": "x"}', pieces=2)
    exchange._incoming.pop()
    exchange.gone.set()
    assert (await exchange.end()).status == 0
    assert engine.seen == []


async def test_a_server_that_is_cancelled_ends_its_requests() -> None:
    engine = FakeEngine(step_seconds=0.001)
    for streamed in (False, True):
        exchange = start(create_app(engine), {"stream": streamed})
        while not engine.running:
            await asyncio.sleep(0.001)
        exchange.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await exchange.task
        assert engine.running == 0


async def test_a_client_that_does_not_read_is_cut_and_nobody_waits_for_it() -> None:
    engine = FakeEngine(step_seconds=0.01)
    app = create_app(engine, ServerSettings(slow_reader_limit=0.2))
    dropped = []
    slow = start(app, {"stream": True}, state={ABORT_KEY: lambda: dropped.append(True)})
    await slow.until_events(3)
    slow.reads.clear()
    other = await chat(app, stream=True, max_tokens=5)
    accept(other, is_chat=True, choices=1, usage=False)
    await slow.end()
    assert dropped == [True]
    assert engine.running == 0
    assert engine.aborted == 1
    slow = start(app, {"stream": True})  # a server without the means to drop
    await slow.until_events(3)
    slow.reads.clear()
    await slow.end()
    assert engine.running == 0


async def test_keep_alive_comments_fill_the_silence() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings(keep_alive_interval=0.05))
    engine.gate.clear()
    exchange = start(app, {"stream": True, "max_tokens": 3})
    await exchange.until_events(2)
    assert exchange.reply.parts[:2] == [b": keep-alive\n\n"] * 2
    engine.gate.set()
    reply = await exchange.end()
    accept(reply, is_chat=False, choices=1, usage=False)
    engine.gate.clear()
    exchange = start(app, {"stream": True})
    await exchange.until_events(1)
    exchange.gone.set()
    await exchange.end()
    assert engine.running == 0
    quick = create_app(FakeEngine(), ServerSettings(keep_alive_interval=5))
    accept(await chat(quick, stream=True), is_chat=True, choices=1, usage=False)


async def test_overlapping_requests_with_one_id_get_their_own_answers() -> None:
    engine = FakeEngine(script=lambda ids, index: [*ids[-1:], 2], step_seconds=0.001)
    app = create_app(engine)
    headers = {"X-Request-Id": "twin-1"}
    replies = await asyncio.gather(
        *(
            call(app, "POST", "/v1/completions", {"prompt": [5, token]}, headers=headers)
            for token in range(70, 90)
        )
    )
    for token, reply in zip(range(70, 90), replies, strict=True):
        assert reply.json["choices"][0]["text"] == engine.tokenizer.token_text(token)
        assert reply.headers["x-request-id"] == "twin-1"
        assert reply.json["id"] == "cmpl-twin-1"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_deadline_holds_even_if_the_engine_does_not_move(streamed: bool) -> None:
    engine = FakeEngine()
    engine.gate.clear()
    exchange = start(create_app(engine), {"stream": streamed, "timeout": 0.05})
    reply = await exchange.end()
    assert reply.status == 504
    assert reply.error["type"] == "TimeoutError"
    assert (engine.running, engine.aborted) == (0, 1)
