"""Rules that a random workload cannot state: who goes first, who goes out, what is shared."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.invariants import check
from octavo.engine.scheduler import Scheduler
from octavo.types import (
    LAST_CHUNK,
    SAMPLE,
    AddRequest,
    SequenceOutput,
    StepOutputs,
    StepPlan,
    TokenParams,
    unpack,
)
from tests.engine.machine import Behaviour, Machine
from tests.engine.oracle import expect


class Bench:
    """A core over the machine, with every plan kept."""

    def __init__(self, **settings: Any) -> None:
        fields: dict[str, Any] = {
            "num_blocks": 32,
            "block_size": 4,
            "max_model_len": 100,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
        }
        self.config = SchedulerConfig(**fields | settings)
        self.scheduler = Scheduler(self.config)
        self.machine = Machine(
            self.config.num_blocks, self.config.block_size, self.config.max_num_seqs
        )
        self.now = 1.0
        self.core = EngineCore(self.scheduler, self.machine, clock=lambda: self.now)
        self.outputs: list[SequenceOutput] = []
        self.count = 0

    def add(self, prompt: list[int], max_tokens: int = 4, **fields: Any) -> AddRequest:
        self.count += 1
        params = TokenParams(max_tokens, seed=self.count, **fields.pop("params", {}))
        defaults: dict[str, Any] = {"id": f"r{self.count}", "arrival": float(self.count)}
        request = AddRequest(prompt_ids=prompt, params=params, **defaults | fields)
        self.core.add(request)
        return request

    def step(self) -> StepOutputs:
        outputs = self.core.step()
        assert outputs is not None
        check(self.scheduler)
        self.outputs += outputs.outputs
        return outputs

    def plan(self) -> StepPlan:
        self.step()
        return self.machine.log[-1]

    def finish(self) -> None:
        while self.core.has_work():
            self.step()

    def of(self, request: AddRequest) -> list[SequenceOutput]:
        return [output for output in self.outputs if output.id == request.id]

    def last(self, request: AddRequest) -> SequenceOutput:
        return self.of(request)[-1]

    def ids(self, request: AddRequest) -> list[int]:
        return [id for output in self.of(request) for id in output.new_ids]

    def check_alone(self, *requests: AddRequest) -> None:
        for request in requests:
            behaviour = self.machine.behaviours.get(request.params.seed, Behaviour())
            expected = expect(request, behaviour, self.config)
            assert self.ids(request) == expected.new_ids
            assert self.last(request).reason == expected.reason


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """(start, length, flags) of each row."""
    return list(zip(unpack(plan.starts), unpack(plan.lengths), plan.flags, strict=True))


def test_decode_and_chunk_share_a_step_and_its_budget() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add([1, 2, 3])
    bench.step()
    bench.add(list(range(20)))
    assert rows(bench.plan()) == [(3, 1, SAMPLE), (0, 7, 0)]
    assert rows(bench.plan()) == [(4, 1, SAMPLE), (7, 7, 0)]
    assert rows(bench.plan()) == [(5, 1, SAMPLE), (14, 6, SAMPLE | LAST_CHUNK)]


def test_one_token_prompts_are_with_the_decode_rows() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add([1, 2, 3])
    bench.add([5])
    assert rows(bench.plan()) == [(0, 1, SAMPLE | LAST_CHUNK), (0, 3, SAMPLE | LAST_CHUNK)]


def test_a_step_with_enough_of_a_prompt_takes_no_other() -> None:
    bench = Bench(enough_prompt=8)
    requests = [bench.add([number] * 6, 2) for number in range(3)]
    assert rows(bench.plan()) == [(0, 6, SAMPLE | LAST_CHUNK)] * 2  # below it: one more
    assert rows(bench.plan()) == [(6, 1, SAMPLE)] * 2 + [(0, 6, SAMPLE | LAST_CHUNK)]
    bench.finish()
    bench.check_alone(*requests)


def test_without_chunking_a_prompt_is_whole_or_waits() -> None:
    bench = Bench(max_num_batched_tokens=8, chunked_prefill=False)
    first, second, third = bench.add([1] * 5), bench.add([2] * 5), bench.add([3] * 20, 1)
    assert rows(bench.plan()) == [(0, 5, SAMPLE | LAST_CHUNK)]
    assert rows(bench.plan()) == [(5, 1, SAMPLE), (0, 5, SAMPLE | LAST_CHUNK)]
    # Over the budget: alone, while the others pause.
    assert rows(bench.plan()) == [(0, 20, SAMPLE | LAST_CHUNK)]
    assert len(rows(bench.plan())) == 2
    bench.finish()
    bench.check_alone(first, second, third)


def test_prefix_is_found_but_never_the_whole_prompt() -> None:
    bench = Bench()
    prompt = list(range(12))
    first = bench.add(prompt, 1)
    bench.finish()
    second = bench.add(prompt, 1)
    assert rows(bench.plan()) == [(8, 4, SAMPLE | LAST_CHUNK)]
    third = bench.add([*prompt, 7], 1)
    assert rows(bench.plan()) == [(12, 1, SAMPLE | LAST_CHUNK)]
    assert [bench.last(r).num_cached for r in (first, second, third)] == [0, 8, 12]


def test_requests_of_one_step_share() -> None:
    bench = Bench()
    bench.add(list(range(9)))
    bench.add(list(range(9)))
    assert rows(bench.plan()) == [(8, 1, SAMPLE | LAST_CHUNK), (0, 9, SAMPLE | LAST_CHUNK)]
    assert bench.scheduler.pool.num_used == 4


@pytest.mark.parametrize(
    ("fields", "shared"),
    [({}, True), ({"cache_salt": "x"}, False), ({"adapter": "x"}, False)],
)
def test_salt_and_adapter_part_caches(fields: dict[str, str], shared: bool) -> None:
    bench = Bench()
    bench.add(list(range(9)), 1)
    bench.finish()
    request = bench.add(list(range(9)), 1, **fields)
    bench.finish()
    assert bench.last(request).num_cached == (8 if shared else 0)


def test_with_caching_off_only_a_group_shares_and_nothing_stays() -> None:
    bench = Bench(prefix_caching=False)
    for group in ("a", "a", "b", ""):
        bench.add(list(range(9)), 2, group=group)
    outputs = bench.step()
    assert bench.scheduler.pool.num_used == 3 + 1 + 3 + 3
    assert outputs.stats.prefix_queries == outputs.stats.prefix_hits == 0
    bench.finish()
    assert bench.scheduler.pool.num_cached == 0
    assert all(output.num_cached == 0 for output in bench.outputs)


def test_reset_prefix_cache() -> None:
    bench = Bench()
    bench.add(list(range(9)), 1)
    bench.finish()
    assert bench.core.control("snapshot", {})["blocks_cached"] == "2"
    assert bench.core.control("reset_prefix_cache", {}) == {"reset": "true"}
    request = bench.add(list(range(9)), 1)
    bench.finish()
    assert bench.last(request).num_cached == 0


def test_the_last_of_the_ranks_is_preempted_and_none_is_lost() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=3, prefix_caching=False)
    requests = [bench.add([number] * 6, 14) for number in range(3)]
    bench.finish()
    assert [bench.last(r).preemptions > 0 for r in requests] == [False, False, True]
    bench.check_alone(*requests)


def test_priority_orders_queue_and_victims() -> None:
    bench = Bench(num_blocks=10, max_num_seqs=3, prefix_caching=False, policy="priority")
    requests = [bench.add([n] * 6, 14, priority=p) for n, p in enumerate((2, 1, 0))]
    bench.finish()
    assert [bench.last(r).preemptions > 0 for r in requests] == [True, False, False]
    bench.check_alone(*requests)


def test_victim_in_flight_is_held_back_first() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2, prefix_caching=False, depth=2, lookahead=1)
    requests = [bench.add([number] * 6, 14) for number in range(2)]
    bench.finish()
    assert bench.last(requests[0]).preemptions == 0
    assert bench.last(requests[1]).preemptions > 0
    bench.check_alone(*requests)


def test_held_victim_that_ends_is_forgotten() -> None:
    bench = Bench(num_blocks=6, max_num_seqs=2, prefix_caching=False, depth=2, lookahead=1)
    requests = [bench.add([number] * 6, 14) for number in range(2)]
    while bench.scheduler._held is None:
        bench.step()
    bench.core.abort([requests[1].id])
    bench.finish()
    assert bench.last(requests[1]).reason == "abort"
    bench.check_alone(requests[0])


def test_tokens_known_to_the_client_are_not_sent_again() -> None:
    bench = Bench()
    whole = bench.add([1, 2, 3], 6)
    bench.finish()
    ids = bench.ids(whole)
    rest = bench.add([1, 2, 3], 6, emitted_ids=ids[:4])
    done = bench.add([1, 2, 3], 6, emitted_ids=ids)
    bench.finish()
    assert bench.ids(rest) == ids[4:]
    assert bench.ids(done) == []
    assert bench.last(rest).reason == bench.last(done).reason == "length"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [1] * 100}, "raise max_model_len"),
        ({"prompt": [1] * 99}, "25 blocks"),
        ({"prompt": [1] * 60, "emitted_ids": [1] * 30}, "23 blocks"),
        ({"prompt": [1, -1]}, "-1"),
        ({"prompt": [1], "emitted_ids": [2**31]}, "2147483648"),
    ],
)
def test_what_cannot_be_served_says_why(fields: dict[str, Any], words: str) -> None:
    bench = Bench(num_blocks=22)
    bad, good = bench.add(**fields), bench.add([1, 2])
    bench.finish()
    assert bench.last(bad).reason == "error"
    assert words in bench.last(bad).error
    bench.check_alone(good)


def test_first_tokens_go_out_before_those_of_others() -> None:
    bench = Bench()
    old = [bench.add([1, 2, 3, number], 20) for number in range(3)]
    for _ in range(3):
        bench.step()
    new = bench.add([5] * 9, 20)
    while new.id not in (ids := [output.id for output in bench.step().outputs]):
        pass
    assert ids[0] == new.id
    assert set(ids[1:]) == {request.id for request in old}


def test_equal_id_leaves_the_first_alone() -> None:
    bench = Bench()
    first = bench.add([1, 2], 3)
    bench.core.add(AddRequest(first.id, [4], TokenParams(3), 9.0))
    bench.step()
    assert "in use" in bench.of(first)[0].error
    bench.finish()
    assert bench.ids(first) == expect(first, Behaviour(), bench.config).new_ids
    bench.core.add(AddRequest(first.id, [4], TokenParams(3), 9.0))  # it has ended: free again
    bench.finish()
    assert bench.last(first).reason == "length"


def test_deadlines_end_waiting_and_running_ones_but_not_the_next_of_that_id() -> None:
    bench = Bench(max_num_seqs=1)
    running = bench.add([1, 2], 50, deadline=5.0)
    waiting = bench.add([3, 4], 50, deadline=4.0)
    again = bench.add([5], 50, id="twice", deadline=3.0)
    bench.step()
    bench.core.abort(["twice"])
    second = bench.add([5], 2, id="twice", deadline=9.0)
    bench.now = 4.5
    bench.step()
    assert bench.last(waiting).reason == "timeout"
    assert bench.ids(waiting) == []
    bench.now = 5.5
    bench.step()
    assert bench.last(running).reason == "timeout"
    bench.finish()
    assert again.id == second.id
    assert [o.reason for o in bench.of(second) if o.reason] == ["abort", "length"]


def test_row_that_is_not_finite_ends_and_leaves_nothing_in_the_cache() -> None:
    bench = Bench()
    bench.machine.behaviours[1] = Behaviour(bad_at=9)
    bad, good = bench.add(list(range(8))), bench.add(list(range(20, 27)))
    bench.finish()
    assert bench.last(bad).error == "NaN in the logits"
    bench.check_alone(bad, good)
    after = bench.add(list(range(12)))
    bench.finish()
    assert bench.last(after).num_cached == 0


def test_stats_tell_the_state() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add([1] * 6, 2)
    bench.add([2] * 9, 2)
    stats = bench.step().stats
    assert (stats.running, stats.waiting, stats.queued_tokens) == (1, 1, 9)
    assert (stats.prompt_tokens, stats.sampled_tokens) == (6, 1)
    assert (stats.blocks_used, stats.blocks_total) == (2, 32)


def test_modules_that_come_with_the_scheduler() -> None:
    import subprocess
    import sys

    code = (
        "import sys, octavo.engine.scheduler\n"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('octavo', 'torch', 'zmq')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = found.stdout.split()
    assert len(modules) <= 8, modules
    assert all(module.split(".")[0] == "octavo" for module in modules), modules


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    bench = Bench()
    kept = bench.add([1, 2], 5, deadline=7.0)
    for number in range(1000):
        bench.add([3], 5, id=f"x{number}", deadline=1e9 + number)
        bench.core.abort([f"x{number}"])
    assert len(bench.scheduler._deadlines) < 100
    bench.now = 8.0
    bench.step()
    assert bench.last(kept).reason == "timeout"
