"""TextEngine: whose request it is, what a full queue does for whom, and what is written down."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.admission import ASSUMED_PACE, ENOUGH_ENDS
from octavo.errors import Overloaded
from octavo.launch import Launch, _weights, keys_in
from octavo.obs.stats import Throughput
from octavo.obs.tenants import MAX_TENANTS, OTHER, TenantMetrics
from octavo.obs.timeline import Timeline, Timelines, Viewer
from octavo.options import EngineArgs, ServerArgs
from octavo.sampling_params import SamplingParams
from octavo.text_engine import TextEngine
from octavo.types import SequenceOutput, StepStats, TraceEvent
from tests.front.test_text_engine import Source, make

WEIGHTS = {"crow": 1.0, "heron": 3.0}


class Ear:
    """Hears deltas."""

    def __init__(self) -> None:
        self.deltas: list[Any] = []
        self.error: Exception | None = None

    def news(self, delta: Any) -> None:
        self.deltas.append(delta)

    def broken(self, error: Exception) -> None:
        self.error = error


def ask(engine: TextEngine, tenant: str = "", max_tokens: int = 8, **options: Any) -> Ear:
    ear = Ear()
    engine.open(
        [70, 71, 72],
        SamplingParams(max_tokens=max_tokens),
        ear,
        request_id="r",
        arrival=time.monotonic(),
        tenant=tenant,
        **options,
    )
    return ear


async def test_the_core_is_told_whose_request_it_is() -> None:
    source = Source()
    ask(make(source), "heron", weight=3.0)
    assert (source.client.requests[0].tenant, source.client.requests[0].weight) == ("heron", 3.0)


async def test_a_full_queue_takes_those_who_have_less_than_their_share() -> None:
    engine = make(Source(), max_running=4, max_queued=4, weights=WEIGHTS)  # type: ignore[arg-type]
    for _ in range(8):
        engine.admit(1, 3, "crow")
        ask(engine, "crow")
    with pytest.raises(Overloaded):
        engine.admit(1, 3, "crow")
    for _ in range(6):  # three quarters of eight
        engine.admit(1, 3, "heron")
        ask(engine, "heron")
    with pytest.raises(Overloaded):
        engine.admit(1, 3, "heron")
    with pytest.raises(Overloaded):
        engine.admit(1, 3, "nobody")
    text = engine.metrics.render()[0].decode()
    assert 'octavo:tenant_rejections_total{model_name="m",tenant="crow"} 1.0' in text
    assert 'octavo:tenant_rejections_total{model_name="m",tenant="heron"} 1.0' in text


async def test_shares_come_back() -> None:
    source = Source()
    engine = make(source, max_running=2, max_queued=2, weights=WEIGHTS)  # type: ignore[arg-type]
    for _ in range(4):
        ask(engine, "crow")
    ask(engine, "heron")
    for number in range(5):
        source.client.say(number, [80], "length")
    assert engine._door._open_of == {}
    assert engine._door._asked == 0
    text = engine.metrics.render()[0].decode()
    labels = 'finished_reason="length",model_name="m",tenant="crow"'
    assert f"octavo:tenant_requests_total{{{labels}}} 4.0" in text


async def test_before_anything_has_ended_the_tokens_say_how_long_it_takes() -> None:
    source = Source()
    engine = make(source, max_running=2, max_queued=2)
    for _ in range(4):
        ask(engine, max_tokens=100)
    start = time.monotonic()
    engine.metrics.throughput = Throughput()
    for second in range(10):
        engine.metrics.throughput.count(20, start - 10 + second)  # twenty tokens a second
    with pytest.raises(Overloaded) as refused:
        engine.admit(1, 3)
    # three wait, of a hundred tokens each, and twelve tokens of prompts
    assert refused.value.retry_after == pytest.approx((3 * 100 + 12) / 20, rel=0.15)
    for number in range(4):
        source.client.say(number, [80], "length")
    for _ in range(ENOUGH_ENDS):
        engine._door._rate.count(time.monotonic())
    for _ in range(4):
        ask(engine)
    with pytest.raises(Overloaded) as refused:
        engine.admit(1, 3)
    assert refused.value.retry_after == 1.0  # twelve have ended within this second


async def test_a_cold_engine_says_a_time_that_fits_what_waits() -> None:
    engine = make(Source(), max_running=2, max_queued=2)
    for _ in range(4):
        ask(engine, max_tokens=100)
    for _ in range(ENOUGH_ENDS):  # too long ago to go by
        engine._door._rate.count(time.monotonic() - 100)
    with pytest.raises(Overloaded) as refused:
        engine.admit(1, 3)
    assert refused.value.retry_after == pytest.approx((3 * 100 + 12) / (2 * ASSUMED_PACE))


def test_throughput_is_measured_over_the_last_minute() -> None:
    rate = Throughput()
    assert rate.seconds_for(1000, 5.0, 100.0) == 10.0  # nothing is known
    for tenth in range(10_000):
        rate.count(5, tenth / 10)
    assert len(rate._counts) <= 62
    assert rate.seconds_for(500, 1000.0, 1.0) == pytest.approx(10, rel=0.05)
    assert rate.seconds_for(10**9, 1000.0, 1.0) == 60.0
    assert rate.seconds_for(500, 2000.0, 100.0) == 5.0


async def test_steps_are_counted_for_it() -> None:
    engine = make(Source())
    engine.metrics.step(StepStats(prompt_tokens=30, sampled_tokens=20))
    seconds = engine.metrics.throughput.seconds_for(100, time.monotonic(), 1.0)
    assert seconds == pytest.approx(2, rel=0.1)


async def test_what_the_core_tells_is_written_down() -> None:
    source = Source()
    engine = make(source)
    ring = Timelines(2)
    now = time.monotonic()
    made = Timeline("cmpl-a", "/v1/completions", "", now, now, prepared=now)
    ring.put(made)
    ask(engine, timeline=made)
    client = source.client
    (request,) = client.requests
    queue = TraceEvent("queue", now + 0.2, (now + 0.1, 0.02, 0.03, 0.05, 0.0, 0.0, 0.0, 0.0))
    prefix = TraceEvent("prefix", now + 0.2, (0, 0), "short")
    chunk = TraceEvent("chunk", now + 0.2, (0, 3, now + 0.3, 1))
    client.streams[request.id].push(
        SequenceOutput(request.id, [80], scheduled_at=now + 0.2, trace=(queue, prefix, chunk))
    )
    await asyncio.sleep(0.05)
    client.say(0, [81])
    client.say(0, [82], "length")
    told: Any = ring.body(made, Viewer())
    (sequence,) = told["sequences"]
    assert sequence["reason"] == "length"
    assert sequence["generated_tokens"] == 3
    assert sequence["queue"]["pages_ms"] == pytest.approx(50)
    assert sequence["prefix_cache"]["reason"] == "short"
    assert [chunk["tokens"] for chunk in sequence["prefill_chunks"]] == [3]
    assert sequence["longest_gap_ms"] >= 50
    assert told["phases_ms"]["detokenize"] > 0
    assert told["phases_ms"]["write"] > 0


def test_labels_are_bounded() -> None:
    metrics = TenantMetrics("m")
    for number in range(3 * MAX_TENANTS):
        metrics.rejected(f"t{number}")
    rows = metrics._rejections.values
    assert len(rows) == MAX_TENANTS + 1
    assert rows[("m", OTHER)] == 2 * MAX_TENANTS
    metrics.rejected("")
    assert len(rows) == MAX_TENANTS + 1


def test_keys_that_do_not_ask_have_no_share(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    scopes = {"a": ["inference"], "b": ["inference", "metrics"], "m": ["metrics"], "x": ["admin"]}
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nkey = "sk-{name}-123456"\nscopes = {json.dumps(these)}\n'
            for name, these in scopes.items()
        )
    )
    server = ServerArgs(api_keys_file=str(keys))
    launch = Launch(EngineArgs(scheduling_policy="fair"), server, 0.0, keys=keys_in(server))
    assert _weights(launch) == {"a": 1.0, "b": 1.0}
