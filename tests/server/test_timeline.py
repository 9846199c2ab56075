"""Timelines over HTTP: who may see which, the header, the event, the log line, the ring."""

from __future__ import annotations

import json
import logging
import random
import re
import time
from typing import Any

import pytest

from octavo.obs.stats import RequestTimes
from octavo.obs.timeline import LACKS, MAX_SEQUENCES, Timeline, Timelines, Viewer, log_fields
from octavo.server.app import create_app
from octavo.server.keys import Key, digest_of
from octavo.server.settings import ServerSettings
from octavo.types import TraceEvent
from tests.server.asgi import call, chat, complete
from tests.server.fake_engine import FakeEngine, Faults

KEYS = tuple(
    Key(name, digest_of(f"sk-{name}".encode()), frozenset({scope}))
    for name, scope in (("crow", "inference"), ("heron", "inference"), ("boss", "admin"))
)
TIMING = re.compile(
    r'[a-z]+;dur=\d+\.\d{3}(;desc="[a-z]+")?(, [a-z]+;dur=\d+\.\d{3}(;desc="[a-z]+")?)*'
)


async def timeline(app: Any, id: str, key: str = "") -> Any:
    headers = {"Authorization": f"Bearer sk-{key}"} if key else None
    return await call(app, "GET", f"/v1/requests/{id}/timeline", headers=headers)


async def test_a_request_is_found_by_both_of_its_names() -> None:
    app = create_app(FakeEngine())
    name = f"mine-{random.randrange(10**9)}"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    reply = await call(app, "POST", "/v1/chat/completions", body, headers={"X-Request-Id": name})
    assert TIMING.fullmatch(reply.headers["server-timing"]), reply.headers["server-timing"]
    for id in (name, reply.json["id"]):
        told = (await timeline(app, id)).json
        assert told["id"] == reply.json["id"] == f"chatcmpl-{name}"
        assert (told["status"], told["finished"]) == (200, True)
        assert told["route"] == "/v1/chat/completions"
        assert told["num_sequences"] == 1
        phases = told["phases_ms"]
        assert {"read", "tokenize", "flush"} <= set(phases)
        assert sum(phases.values()) <= told["total_ms"] + 1
    missing = await timeline(app, "nobody")
    assert missing.status == 404
    assert "512" in missing.error["message"]


async def test_a_tenant_sees_its_own() -> None:
    app = create_app(FakeEngine(), ServerSettings(keys=KEYS))
    headers = {"Authorization": "Bearer sk-crow", "X-Request-Id": "own"}
    await call(app, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=headers)
    assert (await timeline(app, "own", "crow")).json["tenant"] == "crow"
    assert (await timeline(app, "own", "boss")).json["tenant"] == "crow"
    assert (await timeline(app, "own", "heron")).status == 404
    assert (await timeline(app, "own")).status == 401


async def test_an_id_that_two_tenants_use_is_each_ones_own() -> None:
    app = create_app(FakeEngine(), ServerSettings(keys=KEYS))
    for name in ("crow", "heron"):
        headers = {"Authorization": f"Bearer sk-{name}", "X-Request-Id": "same"}
        body = {"prompt": "x", "max_tokens": 1}
        await call(app, "POST", "/v1/completions", body, headers=headers)
    for name, tenant in (("crow", "crow"), ("heron", "heron"), ("boss", "heron")):
        assert (await timeline(app, "same", name)).json["tenant"] == tenant


async def test_the_event_of_a_stream_is_there_if_asked_for() -> None:
    app = create_app(FakeEngine())
    plain = await complete(app, stream=True, max_tokens=4)
    assert all("timeline" not in event for event in plain.events[:-1])
    options = {"include_timeline": True, "include_usage": True}
    for ask in (complete, chat):
        events = (await ask(app, stream=True, max_tokens=4, stream_options=options)).events
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"] == events[-3]["choices"] == []
        assert events[-2]["usage"]["completion_tokens"] == 4
        told = events[-3]["timeline"]
        assert told["id"] == events[0]["id"]
        assert told["sequences"][0]["index"] == 0
    only = await complete(app, stream=True, max_tokens=4, stream_options={"include_timeline": True})
    assert "timeline" in only.events[-2]


async def test_none_are_kept_if_none_are_wanted() -> None:
    app = create_app(FakeEngine(), ServerSettings(timelines=0))
    options = {"include_timeline": True}
    reply = await complete(app, stream=True, max_tokens=2, stream_options=options)
    assert all("timeline" not in event for event in reply.events[:-1])
    reply = await complete(app)
    assert "server-timing" not in reply.headers
    reply = await timeline(app, reply.json["id"])
    assert reply.status == 404
    assert "--timeline-requests" in reply.error["message"]


async def test_the_ring_forgets_the_oldest() -> None:
    app = create_app(FakeEngine(), ServerSettings(timelines=3))
    ids = [(await complete(app, max_tokens=1)).json["id"] for _ in range(8)]
    found = [(await timeline(app, id)).status for id in ids]
    assert found == [404] * 5 + [200] * 3
    timelines = app.state.serving.timelines
    assert len(timelines) == 3
    assert len(timelines._by_name) == 6
    assert len(timelines._by_core_id) == 3


def test_sequences_that_start_when_the_ring_has_moved_on_are_not_kept() -> None:
    ring, times = Timelines(1), RequestTimes(arrival=0.0, prompt_tokens=1)
    slow, late = Timeline("a-slow", "/", "", 0.0, 0.0), f"late-{random.randrange(10**9)}"
    ring.put(slow)
    ring.put(Timeline("a-next", "/", "", 0.0, 0.0))
    slow.add(late, times)
    assert late not in ring._by_core_id


async def test_twins_of_one_id_do_not_lose_the_later() -> None:
    app = create_app(FakeEngine(), ServerSettings(timelines=2))
    headers = {"X-Request-Id": "twin"}
    for size in (1, 2, 3):
        body = {"prompt": "x", "max_tokens": size}
        await call(app, "POST", "/v1/completions", body, headers=headers)
    assert (await timeline(app, "twin")).status == 200


@pytest.mark.parametrize("log", [True, False])
async def test_a_line_for_each_request(log: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "octavo")
    engine = FakeEngine()
    app = create_app(engine, ServerSettings(log_requests=log))
    await complete(app, max_tokens=2)
    await complete(app, max_tokens=-1)
    engine.faults = Faults(end_after=2)
    await complete(app)
    await call(app, "GET", "/v1/models")
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("request ")
    ]
    if not log:
        assert lines == []
        return
    assert len(lines) == 3
    for line, status in zip(lines, (200, 400, 500), strict=True):
        fields = dict(pair.split("=", 1) for pair in line.split()[1:])
        assert fields["status"] == str(status)
        assert fields["route"] == "/v1/completions"
        assert float(fields["total_ms"]) > 0


# -- what is told, from what was written down --


def written(events: list[TraceEvent], tenant: str = "crow") -> tuple[Timelines, Timeline]:
    ring = Timelines(4)
    started = 100.0
    made = Timeline("cmpl-a", "/v1/completions", tenant, started, started + 0.001)
    ring.put(made)
    made.prepared = started + 0.003
    times = RequestTimes(started, prompt_tokens=100, cached_tokens=32, tenant=tenant)
    times.scheduled, times.first_token, times.last_token = 100.5, 100.9, 101.4
    times.events = events
    made.add("7-0", times)
    made.finished = 102.0
    return ring, made


def test_waits_are_told_by_what_they_were_for() -> None:
    queue = TraceEvent("queue", 100.5, (100.1, 0.1, 0.05, 0.25, 0.0, 0.0, 0.1, 0.0))
    again = TraceEvent("queue", 101.0, (100.95, 0.02, 0.0, 0.03, 0.0, 0.0, 0.0, 0.0))
    chunk = TraceEvent("chunk", 100.5, (32, 68, 100.8, 9))
    lost = TraceEvent("preempted", 100.95, (), "pages", "8-0", "heron")
    ring, made = written([queue, chunk, lost, again])
    told: Any = ring.body(made, Viewer())
    (sequence,) = told["sequences"]
    waits = {name: sequence["queue"][f"{name}_ms"] for name in ("step", "order", *LACKS)}
    assert waits == {
        "step": pytest.approx(100),
        "order": pytest.approx(120),
        "sequences": pytest.approx(50),
        "pages": pytest.approx(280),
        "budget": 0,
    }
    assert sequence["queue"]["ahead_lacked_ms"]["pages"] == pytest.approx(100)
    assert sequence["prefill_chunks"] == [
        {"first_token": 32, "tokens": 68, "planned_ms": 500, "landed_ms": 800, "step": 9}
    ]
    assert sequence["preemptions"] == [{"at_ms": 950, "cause": "pages", "by": None}]
    assert told["phases_ms"]["queue"] == pytest.approx(497)
    assert told["phases_ms"]["prefill"] == pytest.approx(400)
    assert told["phases_ms"]["decode"] == pytest.approx(500)
    assert told["first_token_ms"] == pytest.approx(900)
    assert made.waited_for() == "pages"
    assert 'queue;dur=497.000;desc="pages"' in made.header()
    line = log_fields(made)
    assert (line["queued_for"], line["ttft_ms"], line["prompt_tokens"]) == ("pages", 900.0, 100)


@pytest.mark.parametrize("reason", ["salt", "adapter"])
def test_what_another_tenant_asked_is_not_told(reason: str) -> None:
    event = TraceEvent("prefix", 100.5, (0, 96, 0, 64), reason, "9-0", "heron")
    ring, made = written([event])
    other = Timeline("cmpl-b", "/v1/completions", "heron", 1.0, 1.0)
    ring.put(other)
    other.add("9-0", RequestTimes(1.0))

    def prefix(viewer: Viewer) -> Any:
        told: Any = ring.body(made, viewer)
        return told["sequences"][0]["prefix_cache"]

    hidden = prefix(Viewer("crow", all=False))
    fresh = TraceEvent("prefix", 100.5, (0, 96, 0, 0), "new")
    told: Any = written([fresh])[0].body(written([fresh])[1], Viewer("crow", all=False))
    assert hidden == told["sequences"][0]["prefix_cache"], "the two must look alike"
    seen = prefix(Viewer())
    assert (seen["reason"], seen["would_have_hit_tokens"]) == (reason, 64)


def test_an_eviction_names_the_request_to_those_who_may_know() -> None:
    event = TraceEvent("prefix", 100.5, (32, 96, 2, 64, 7.5), "evicted", "9-0", "heron")
    ring, made = written([event])
    other = Timeline("cmpl-b", "/v1/completions", "heron", 1.0, 1.0)
    ring.put(other)
    other.add("9-0", RequestTimes(1.0))
    for viewer, by in ((Viewer("crow", all=False), None), (Viewer("heron", all=True), "cmpl-b")):
        told: Any = ring.body(made, viewer)
        prefix = told["sequences"][0]["prefix_cache"]
        assert prefix["reason"] == "evicted"
        assert prefix["evicted_by"] == by
        assert prefix["evicted_seconds_ago"] == 7.5
        assert (prefix["first_differing_block"], prefix["would_have_hit_tokens"]) == (2, 64)


def test_many_choices_are_counted_and_few_are_followed() -> None:
    ring = Timelines(1)
    made = Timeline("cmpl-a", "/v1/completions", "", 1.0, 1.0)
    ring.put(made)
    for number in range(300):
        made.add(f"1-{number}", RequestTimes(1.0))
    told: Any = ring.body(made, Viewer())
    assert told["num_sequences"] == 300
    assert len(told["sequences"]) == MAX_SEQUENCES
    json.dumps(told)


async def test_a_deadline_of_the_server_holds_where_none_is_named() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings(request_timeout=7.0))
    body = {"prompt": "x", "max_tokens": 1}
    await call(app, "POST", "/v1/completions", body)
    await call(app, "POST", "/v1/completions", {**body, "timeout": 60})
    await call(app, "POST", "/v1/completions", body, headers={"X-Request-Deadline-Ms": "2000"})
    found = [seen.options["deadline"] for seen in engine.seen]
    assert found == [pytest.approx(7), pytest.approx(60), pytest.approx(2)]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_expired_request_is_never_a_short_answer(stream: bool) -> None:
    engine = FakeEngine(faults=Faults(end_after=1, end_reason="timeout"))
    app = create_app(engine, ServerSettings(request_timeout=5.0))
    reply = await complete(app, stream=stream)
    assert reply.status == 504
    assert reply.error["type"] == "TimeoutError"
    engine.faults = Faults(end_after=4, end_reason="timeout")
    reply = await complete(app, stream=stream)
    if not stream:
        assert reply.status == 504
        return
    assert reply.events[-1] == "[DONE]"
    assert reply.events[-2]["error"]["code"] == 504
    assert all(
        choice["finish_reason"] is None
        for event in reply.events[:-2]
        for choice in event["choices"]
    )


def test_time_goes_on_while_a_request_runs() -> None:
    made = Timeline("cmpl-a", "/v1/completions", "", time.monotonic(), time.monotonic())
    ring = Timelines(1)
    ring.put(made)
    told: Any = ring.body(made, Viewer())
    assert (told["finished"], told["status"], told["first_token_ms"]) == (False, None, None)
    assert list(told["phases_ms"]) == ["read"]
