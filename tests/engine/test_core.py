"""The loop when steps fail: who ends, who goes on, and when it is over."""

from __future__ import annotations

import pytest

from octavo.engine.core import FailedStep
from octavo.errors import EngineDead
from octavo.types import PREPARE, AddRequest, Grammar, StepPlan
from tests.engine.machine import Behaviour, Injected
from tests.engine.test_scheduler import Bench


@pytest.mark.parametrize("in_submit", [False, True])
@pytest.mark.parametrize(("depth", "lookahead"), [(1, 0), (2, 1), (3, 2)])
def test_only_the_poisoned_one_ends(depth: int, lookahead: int, in_submit: bool) -> None:
    bench = Bench(depth=depth, lookahead=lookahead)
    bench.machine.raise_in_submit = in_submit
    bench.machine.behaviours[2] = Behaviour(poison_at=7)
    requests = [bench.add([number, number + 1, number + 2, 9], 12) for number in range(5)]
    bench.finish()
    bench.check_alone(*requests)
    assert bench.last(requests[1]).error == "Injected: poisoned 2"
    assert bench.scheduler.epoch == 2


def test_a_fault_that_passes_harms_nobody() -> None:
    bench = Bench()
    bench.machine.transient = {3}
    requests = [bench.add([number, 9], 6) for number in range(3)]
    bench.finish()
    bench.check_alone(*requests)
    assert bench.scheduler.epoch == 1


def test_a_suspect_runs_alone_first() -> None:
    bench = Bench(max_num_seqs=2, num_blocks=5, max_num_batched_tokens=8)
    others = [bench.add([number] * 5, 6) for number in range(2)]
    bench.step()
    suspect = bench.add([7] * 14, 3, suspect=True)
    assert bench.plan().num_rows == 1  # room is made for it
    assert bench.plan().num_rows == 1  # the rest of its prompt
    assert len(bench.ids(suspect)) == 1
    bench.finish()
    bench.check_alone(suspect, *others)


def test_an_aborted_suspect_clears_the_way() -> None:
    bench = Bench(max_num_batched_tokens=8)
    suspect, other = bench.add([7] * 14, 3, suspect=True), bench.add([1], 2)
    bench.step()
    bench.core.abort([suspect.id])
    bench.finish()
    assert bench.last(suspect).reason == "abort"
    bench.check_alone(other)


def test_oversized_suspect_without_chunking() -> None:
    bench = Bench(max_num_batched_tokens=8, chunked_prefill=False)
    suspect = bench.add([7] * 14, 3, suspect=True)
    bench.finish()
    bench.check_alone(suspect)


def test_lost_executor_is_the_end() -> None:
    bench = Bench()
    bench.machine.behaviours[1] = Behaviour(poison_at=0)
    bench.add([1])
    bench.core.close()
    with pytest.raises(EngineDead, match="Injected: poisoned 1"):
        bench.core.step()


class Compiling:
    """Stands for a worker that needs a while for each grammar."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []
        self.ready: set[str] = set()

    def control(self, op: str, **args: str) -> dict[str, str]:
        assert op == PREPARE
        self.asked.append((args["text"], float(args["seconds"])))
        return {"ready": str(args["text"] in self.ready).lower()}


def with_form(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> tuple[AddRequest, Compiling]:
    worker = Compiling()
    monkeypatch.setattr(bench.machine, "control", worker.control)
    grammar = Grammar("heavy", end_ids=(0,))
    return bench.add([1, 2, 3], 4, params={"grammar": grammar}), worker


def test_a_form_that_is_being_compiled_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    first = bench.add([5, 6], 8)
    formed, worker = with_form(bench, monkeypatch)
    after = bench.add([7, 8], 8)
    for _ in range(3):
        assert bench.plan().num_rows == 2
    assert not bench.of(formed)
    assert all(seconds == 0 for _, seconds in worker.asked), "others must not wait for it"
    worker.ready.add("heavy")
    assert bench.plan().num_rows == 3
    asked = len(worker.asked)
    again = bench.add([1, 2], 4, params={"grammar": formed.params.grammar})
    assert len(worker.asked) == asked, "what has been compiled is not asked for again"
    bench.finish()
    assert len(bench.ids(again)) > 0
    bench.check_alone(first, after)
    assert len(bench.ids(formed)) > 0


def test_a_form_alone_is_waited_for_and_may_be_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    formed, worker = with_form(bench, monkeypatch)
    assert bench.core.has_work()
    assert bench.core.step() is None
    assert worker.asked[-1][1] > 0, "a little patience, and no idle turns"
    bench.core.abort([formed.id])
    bench.finish()
    assert bench.last(formed).reason == "abort"
    assert not bench.core.has_work()


def test_nothing_to_do() -> None:
    bench = Bench()
    assert not bench.core.has_work()
    assert bench.core.step() is None
    bench.core.abort(["never seen"])
    assert bench.core.step() is None


def test_other_operations_go_to_the_executor() -> None:
    assert Bench().core.control("profile", {"at": "x"}) == {"op": "profile", "at": "x"}


def test_failed_step_fails_in_its_turn() -> None:
    handle = FailedStep(Injected("no"))
    assert handle.done()
    with pytest.raises(Injected, match="no"):
        handle.result()


def test_time_of_overlapping_steps_is_shared() -> None:
    bench = Bench(depth=2, lookahead=1)
    times = iter(range(100))
    bench.core._clock = lambda: float(next(times))
    request = AddRequest("a", [1], bench.add([2], 3).params, 0.0)
    bench.core.add(request)
    total = 0.0
    while bench.core.has_work():
        total += bench.step().stats.step_ms
    assert 0 < total <= 1000.0 * next(times)


@pytest.mark.parametrize(
    ("depth", "lookahead", "rows"), [(1, 0, 4), (2, 1, 4), (2, 0, 2), (4, 0, 1), (4, 1, 2)]
)
def test_steps_in_flight_share_the_sequences(depth: int, lookahead: int, rows: int) -> None:
    bench = Bench(depth=depth, lookahead=lookahead)
    requests = [bench.add([number], 20) for number in range(4)]
    for _ in range(8):
        bench.step()
    bench.plan()
    assert {step.plan.num_rows for step in bench.scheduler.steps} <= {rows}
    assert len(bench.scheduler.steps) == depth - 1
    bench.finish()
    bench.check_alone(*requests)


def test_plans_can_be_replayed() -> None:
    """A plan is data: another machine given the same plans gives the same results."""
    plans: list[StepPlan] = []
    bench, other = Bench(num_blocks=8), Bench(num_blocks=8)
    submit = bench.machine.submit

    def keep(plan: StepPlan) -> object:
        plans.append(plan)
        return submit(plan)

    bench.machine.submit = keep  # type: ignore[method-assign, assignment]
    for number in range(4):
        bench.add([number] * 7, 12)
    bench.finish()
    for plan in plans:
        other.machine.submit(plan).result()
    assert (other.machine.tokens == bench.machine.tokens).all()
    assert (other.machine.contexts == bench.machine.contexts).all()
