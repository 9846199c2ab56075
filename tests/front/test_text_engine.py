"""TextEngine over a core that is played by the test: admission, endings, counts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from octavo.admission import Admission, Rate
from octavo.engine.client import Listener, Pulse
from octavo.errors import Draining, EngineDead, InvalidRequest, Overloaded
from octavo.obs.metrics import Metrics
from octavo.sampling_params import SamplingParams
from octavo.text_engine import TextEngine
from octavo.types import AddRequest, SequenceOutput, StepStats, WorkerInfo
from tests.text.samples import chat_tokenizer


class PlayedClient:
    """Stands where an EngineClient stands; the test answers for the core."""

    def __init__(self) -> None:
        self.dead: EngineDead | None = None
        self.ready = asyncio.Event()
        self.ready.set()
        self.pulse = Pulse("idle")
        self.stats = StepStats()
        self.info = WorkerInfo(64, 16, 256, 300, "cpu", "float32", 0, 0)
        self.requests: list[AddRequest] = []
        self.streams: dict[str, Listener] = {}
        self.aborted: list[str] = []

    def submit(self, requests: Sequence[AddRequest], listener: Listener) -> None:
        self.requests += requests
        self.streams |= dict.fromkeys((request.id for request in requests), listener)

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids

    def cut(self, error: Exception) -> None:
        for stream in set(self.streams.values()):
            stream.fail(error)

    def say(self, number: int, ids: list[int], reason: str | None = None) -> None:
        request = self.requests[number]
        self.streams[request.id].push(SequenceOutput(request.id, ids, reason=reason))


class Source:
    restarting = False

    def __init__(self) -> None:
        self.client = PlayedClient()


def make(source: Source, *, seed: int | None = None, **limits: int) -> TextEngine:
    return TextEngine(
        source,  # type: ignore[arg-type]
        tokenizer=chat_tokenizer(),
        chat_template=None,
        model_names=("m",),
        max_logprobs=5,
        admission=Admission(**{"max_running": 2, "max_queued": 2, **limits}),
        metrics=Metrics("m", max_model_len=256),
        generation_defaults={},
        settings=[],
        seed=seed,
    )


def run(engine: TextEngine, params: SamplingParams | None = None, **options):
    params = params or SamplingParams(max_tokens=8)
    return engine.generate(
        [70, 71, 72], params, request_id="r", arrival=time.monotonic(), **options
    )


async def collect(engine: TextEngine, params: SamplingParams | None = None) -> list:
    return [delta async for delta in run(engine, params)]


async def started(engine: TextEngine, params: SamplingParams | None = None) -> asyncio.Task:
    before = engine.num_open
    task = asyncio.create_task(collect(engine, params))
    while engine.num_open == before:
        await asyncio.sleep(0)
    return task


async def test_choices_end_each_once() -> None:
    source = Source()
    engine = make(source)
    task = await started(engine, SamplingParams(n=2, max_tokens=4))
    source.client.say(1, [80])
    source.client.say(0, [81], "length")
    source.client.say(1, [82], "length")
    deltas = await task
    reasons = [(d.index, d.finish_reason) for d in deltas if d.finish_reason]
    assert reasons == [(0, "length"), (1, "length")]
    assert engine.num_open == 0
    assert source.client.aborted == []


async def test_a_stop_text_aborts_its_sequence() -> None:
    source = Source()
    engine = make(source)
    tokenizer = engine.tokenizer
    ids = tokenizer.encode("ab", False)
    task = await started(engine, SamplingParams(max_tokens=64, stop=["b"]))
    source.client.say(0, ids)
    deltas = await task
    assert deltas[-1].finish_reason == "stop"
    assert "".join(delta.text for delta in deltas) == "a"
    assert source.client.aborted == [source.client.requests[0].id]


async def test_closing_the_iterator_aborts_what_is_left() -> None:
    source = Source()
    engine = make(source)
    async with aclosing(run(engine, SamplingParams(n=2, max_tokens=64))) as deltas:
        first = asyncio.ensure_future(anext(deltas))
        while not source.client.requests:
            await asyncio.sleep(0)
        source.client.say(0, [80], "stop")
        await first
    assert source.client.aborted == [source.client.requests[1].id]
    assert engine.num_open == 0


async def test_a_full_queue_refuses_and_an_idle_engine_never_does() -> None:
    source = Source()
    engine = make(source)
    engine.admit(50, 10)  # larger than the queue, but nothing is there
    tasks = [await started(engine) for _ in range(4)]
    with pytest.raises(Overloaded) as refused:
        engine.admit(1, 3)
    assert 1 <= refused.value.retry_after <= 60
    for number in range(4):
        source.client.say(number, [80], "length")
    await asyncio.gather(*tasks)
    engine.admit(2, 6)


async def test_queued_tokens_are_bounded_until_the_first_news() -> None:
    source = Source()
    engine = make(source, max_queued=50, max_queued_tokens=5)
    engine.admit(1, 1000)  # nothing waits, so no later moment would be better
    task = await started(engine)
    with pytest.raises(Overloaded, match="3 prompt tokens"):
        engine.admit(1, 3)
    engine.admit(1, 2)
    source.client.say(0, [80])
    while engine._door._queued_tokens:
        await asyncio.sleep(0)
    engine.admit(1, 5)
    source.client.say(0, [80], "length")
    await task


async def test_seeds_of_the_server_repeat_and_its_own_do_not() -> None:
    number = random.randrange(2**31)

    async def seeds(seed: int | None) -> list[int]:
        source = Source()
        engine = make(source, seed=seed)
        tasks = [await started(engine) for _ in range(2)]
        for index in range(2):
            source.client.say(index, [80], "length")
        await asyncio.gather(*tasks)
        return [request.params.seed for request in source.client.requests]

    assert await seeds(number) == await seeds(number), f"seed {number}"
    assert await seeds(None) != await seeds(None)
    assert len(set(await seeds(number))) == 2


async def test_a_cut_drain_ends_streams_and_not_the_core() -> None:
    source = Source()
    engine = make(source)
    task = await started(engine)
    assert await engine.drain(0.01) == 1
    with pytest.raises(Draining):
        await task
    assert source.client.dead is None
    with pytest.raises(Draining):
        engine.admit(1, 1)
    with pytest.raises(Draining):
        await collect(engine)


async def test_a_second_signal_ends_the_drain() -> None:
    engine = make(Source())
    task = await started(engine)
    hurry = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, hurry.set)
    start = time.monotonic()
    assert await engine.drain(60, hurry) == 1
    assert time.monotonic() - start < 10
    with pytest.raises(Draining):
        await task


async def test_a_lost_core_ends_every_stream_with_its_error() -> None:
    source = Source()
    engine = make(source)
    task = await started(engine, SamplingParams(n=2, max_tokens=4))
    source.client.cut(EngineDead("gone"))
    with pytest.raises(EngineDead, match="gone"):
        await task
    assert engine.num_open == 0
    text = engine.metrics.render()[0].decode()
    assert 'finished_reason="error",model_name="m"} 2.0' in text


async def test_a_priority_that_does_not_fit_is_named() -> None:
    engine = make(Source())
    with pytest.raises(InvalidRequest, match="priority"):
        async for _ in run(engine, priority=2**70):
            pass
    assert engine.num_open == 0


async def test_health_follows_the_heartbeat() -> None:
    source = Source()
    engine = make(source)
    assert engine.health.ready
    source.client.pulse = Pulse("running", "", time.monotonic(), time.monotonic() - 20, 1)
    assert engine.health.stalled_for >= 20
    source.client.pulse = Pulse("idle", "", time.monotonic() - 30, time.monotonic() - 30)
    assert engine.health.stalled_for >= 30
    source.restarting = True
    assert not engine.health.alive


async def test_min_tokens_beyond_the_room_are_refused() -> None:
    engine = make(Source())
    with pytest.raises(InvalidRequest, match="min_tokens = 300"):
        await collect(engine, SamplingParams(max_tokens=None, min_tokens=300))
    assert engine.num_open == 0


async def test_tokens_without_an_embedding_are_refused() -> None:
    source = Source()
    source.client.info = WorkerInfo(64, 16, 256, 71, "cpu", "float32", 0, 0)
    with pytest.raises(InvalidRequest, match="token 72"):
        await collect(make(source))


@pytest.mark.parametrize("priority", [1.5, True, None, "x", 2**70])
async def test_priorities_that_are_none(priority: object) -> None:
    engine = make(Source())
    with pytest.raises(InvalidRequest, match="priority"):
        async for _ in run(engine, priority=priority):
            pass


async def test_an_abort_ends_all_requests_of_an_id() -> None:
    source = Source()
    engine = make(source)
    tasks = [await started(engine) for _ in range(2)]
    engine.abort("r")
    for deltas in await asyncio.gather(*tasks):
        assert deltas[-1].finish_reason == "abort"
    engine.abort("r")
    assert engine._by_request == {}


def test_the_rate_forgets_what_is_long_past() -> None:
    rate = Rate()
    for second in range(5000):
        rate.count(float(second))
    assert len(rate._ends) <= 62
    assert rate.seconds_for(10, 5000.0) == pytest.approx(10, rel=0.1)
