"""What the engine tells of a sequence: why it waited, its chunks, and why the cache missed."""

from __future__ import annotations

import random

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.engine.trace import LACKS, MAX_FIRST_BLOCKS, Tracer
from octavo.types import AddRequest, TokenParams, TraceEvent
from tests.engine.machine import VOCAB, Machine

SIZE = 4


class Bench:
    """An engine whose clock goes one second a call, and all that it told by request."""

    def __init__(self, **settings: object) -> None:
        config = SchedulerConfig(
            **{  # type: ignore[arg-type]
                "num_blocks": 64,
                "block_size": SIZE,
                "max_model_len": 128,
                "max_num_seqs": 4,
                "max_num_batched_tokens": 32,
                **settings,
            }
        )
        self.now = 1000.0
        self.scheduler = Scheduler(config, Tracer())
        machine = Machine(config.num_blocks, config.block_size, config.max_num_seqs)
        self.core = EngineCore(self.scheduler, machine, clock=self.clock)
        self.told: dict[str, list[TraceEvent]] = {}

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def ask(self, ids: list[int], answer: int = 2, **fields: object) -> str:
        id = f"r{len(self.told)}"
        self.told[id] = []
        params = TokenParams(answer, min_tokens=answer, seed=len(self.told))
        self.core.add(AddRequest(id, ids, params, self.now, **fields))  # type: ignore[arg-type]
        return id

    def finish(self) -> None:
        while self.core.has_work():
            outputs = self.core.step()
            assert outputs is not None
            for output in outputs.outputs:
                self.told[output.id] += output.trace

    def run(self, ids: list[int], answer: int = 2, **fields: str) -> str:
        id = self.ask(ids, answer, **fields)
        self.finish()
        return id

    def one(self, id: str, kind: str) -> TraceEvent:
        (found,) = [event for event in self.told[id] if event.kind == kind]
        return found


def some(count: int) -> list[int]:
    return random.choices(range(VOCAB), k=count)


def test_who_waits_for_a_seat_and_who_for_the_one_before() -> None:
    bench = Bench(max_num_seqs=1)
    first, second, third = (bench.ask(some(6), 10) for _ in range(3))
    bench.finish()
    for id, own, order in ((first, False, False), (second, True, False), (third, True, True)):
        since, behind, *lacks = bench.one(id, "queue").values
        sequences, pages, budget = lacks[: len(LACKS)]
        assert (sequences > 0, behind > 0) == (own, order), id
        assert pages == budget == 0
        assert since + behind + sequences == pytest.approx(bench.one(id, "queue").at)
        assert (lacks[len(LACKS)] > 0) == order  # the one ahead lacked a seat


def test_who_expires_in_the_queue_has_waited_for_something_too() -> None:
    bench = Bench(max_num_seqs=1)
    bench.ask(some(6), 30)
    late, unseen = bench.ask(some(6), 4, deadline=bench.now + 9.5), bench.ask(some(6), 4)
    bench.core.abort([unseen])
    bench.finish()
    _, _, sequences, pages, budget, *_ = bench.one(late, "queue").values
    assert sequences > 5
    assert pages == budget == 0
    assert not [event for event in bench.told[late] if event.kind in ("prefix", "chunk")]
    assert bench.told[unseen] == []
    assert bench.scheduler.tracer is not None
    assert not bench.scheduler.tracer._new


def test_waits_for_pages_and_for_budget_are_told_apart() -> None:
    bench = Bench(num_blocks=8, max_model_len=28)
    bench.ask(some(16), 8)
    late = bench.ask(some(16), 4)
    bench.finish()
    _, _, sequences, pages, budget, *_ = bench.one(late, "queue").values
    assert pages > 0
    assert sequences == budget == 0
    bench = Bench(max_num_batched_tokens=8)
    bench.ask(some(24))
    late = bench.ask(some(4))
    bench.finish()
    _, _, sequences, pages, budget, *_ = bench.one(late, "queue").values
    assert budget > 0
    assert sequences == pages == 0


def test_each_chunk_is_told_with_its_step() -> None:
    bench = Bench(max_num_batched_tokens=8)
    id = bench.run(some(21))
    chunks = [event for event in bench.told[id] if event.kind == "chunk"]
    assert [event.values[:2] for event in chunks] == [(0, 8), (8, 8), (16, 5)]
    assert [event.values[3] for event in chunks] == [1, 2, 3]
    for event in chunks:
        assert event.values[2] > event.at
    assert bench.told[id].index(chunks[-1]) == len(bench.told[id]) - 1


def test_a_preemption_names_who_took_the_pages() -> None:
    bench = Bench(num_blocks=8, max_model_len=32, prefix_caching=False)
    first, second = bench.ask(some(8), 20, tenant="a"), bench.ask(some(8), 20, tenant="b")
    bench.finish()
    lost = [event for event in bench.told[second] if event.kind == "preempted"]
    assert lost
    assert {(event.text, event.who, event.tenant) for event in lost} == {("pages", first, "a")}
    stays = [event for event in bench.told[second] if event.kind == "queue"]
    assert len(stays) == 1 + len(lost)
    assert not [event for event in bench.told[first] if event.kind == "preempted"]


def test_hits_and_misses_have_reasons() -> None:
    bench = Bench()
    prompt = some(18)
    assert bench.one(bench.run(prompt), "prefix").text == "new"
    hit = bench.one(bench.run(prompt), "prefix")
    assert (hit.text, hit.values) == ("hit", (16, 16))
    other = [*prompt[:9], (prompt[9] + 1) % VOCAB, *prompt[10:]]
    fork = bench.one(bench.run(other), "prefix")
    assert fork.text == "new"
    assert fork.values[:4] == (8, 16, 2, 0)  # the third page is the first that differs
    assert bench.one(bench.run(prompt[:4]), "prefix").text == "short"
    bench.scheduler.reset_prefix_cache()
    gone = bench.one(bench.run(prompt), "prefix")
    assert (gone.text, gone.who) == ("evicted", "reset")
    assert gone.values[:4] == (0, 16, 0, 16)
    bench = Bench(prefix_caching=False)
    assert bench.one(bench.run(prompt), "prefix").text == "off"


def test_another_salt_or_adapter_would_have_hit() -> None:
    bench = Bench()
    prompt = some(18)
    first = bench.run(prompt, cache_salt="a", tenant="t")
    missed = bench.one(bench.run(prompt, cache_salt="b"), "prefix")
    assert (missed.text, missed.who, missed.tenant) == ("salt", first, "t")
    assert missed.values == (0, 16, 0, 16)
    assert bench.one(bench.run(prompt, cache_salt="a"), "prefix").text == "hit"
    missed = bench.one(bench.run(prompt, cache_salt="b", adapter="french"), "prefix")
    assert missed.text == "adapter"
    longer = bench.one(bench.run([*prompt[:8], *some(10)], cache_salt="c"), "prefix")
    assert longer.text == "salt"
    assert longer.values[3] >= 8


def test_an_eviction_is_told_with_its_time_and_cause() -> None:
    bench = Bench(num_blocks=16, max_model_len=64)
    prompt = some(18)
    bench.run(prompt)
    cause = ""
    while bench.scheduler.pool.match(bench.scheduler.pool.block_of) and not cause:
        cause = bench.run(some(56), tenant="greedy")
    began = bench.now
    missed = bench.one(bench.run(prompt), "prefix")
    assert (missed.text, missed.who, missed.tenant) == ("evicted", cause, "greedy")
    found, reusable, block, would, age = missed.values
    assert (reusable, block) == (16, found // SIZE)
    assert found + would == 16
    assert 0 < age <= bench.now - 1000
    assert began > 1000


def test_what_is_remembered_is_bounded() -> None:
    bench = Bench(num_blocks=16, max_model_len=64)
    tracer = bench.scheduler.tracer
    assert tracer is not None
    for number in range(MAX_FIRST_BLOCKS + 40):
        tracer._roots[number.to_bytes(4, "big")] = []
    for _ in range(20):
        bench.run(some(56))
    assert len(tracer._roots) <= MAX_FIRST_BLOCKS + 41
    for number in range(5000):
        tracer._evict([number.to_bytes(4, "big")])
    kept = len(tracer._evicted) + len(tracer._evicted_before)
    assert tracer._max_evicted <= kept <= 2 * tracer._max_evicted + 1
    assert tracer._gone((4999).to_bytes(4, "big")) is not None
    assert tracer._gone((0).to_bytes(4, "big")) is None
    assert not tracer._new


def test_nothing_is_told_without_a_tracer() -> None:
    scheduler = Scheduler(SchedulerConfig(16, SIZE, 64, 4, 32))
    core = EngineCore(scheduler, Machine(16, SIZE, 4))
    core.add(AddRequest("a", some(9), TokenParams(3), 0.0))
    while core.has_work():
        outputs = core.step()
        assert outputs is not None
        assert all(not output.trace for output in outputs.outputs)
