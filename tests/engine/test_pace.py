"""Planning late: a request that comes while the device works waits for one step, not for two.

The device has a clock of its own, so the test tells how long a request waited and not how fast this
computer is.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.pace import LARGE, LEAST_MARGIN, MOST_MARGIN, TRUST, Allowance, Pace
from octavo.engine.scheduler import Scheduler
from octavo.types import SAMPLE, AddRequest, StepPlan, StepResult, TokenParams, WorkerInfo

DECODE, A_TOKEN = 0.005, 25e-6  # seconds of a step, and more for each token of a prompt
PLANNING = 0.0012  # and launching


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Step:
    """A handle whose result is there at `end`."""

    plan: StepPlan
    end: float
    clock: Clock

    def done(self) -> bool:
        return self.clock.now >= self.end

    def result(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.end)
        sampled = sum(flags & SAMPLE for flags in self.plan.flags)
        return StepResult(self.plan.step, bytes(4 * sampled))


class Device:
    """An executor that does one step after another, each for as long as a GPU would."""

    def __init__(self, clock: Clock, random: Random) -> None:
        self.clock, self.random = clock, random
        self.busy_until, self.idle = 0.0, 0.0

    def start(self) -> WorkerInfo:
        raise NotImplementedError

    def control(self, op: str, **args: str) -> dict[str, str]:
        raise NotImplementedError

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass

    def submit(self, plan: StepPlan) -> Step:
        self.clock.now += PLANNING
        started = max(self.clock.now, self.busy_until)
        if self.busy_until:
            self.idle += started - self.busy_until
        noise = self.random.uniform(1.0, 1.02)
        prompts = (plan.num_tokens - plan.num_rows) * A_TOKEN
        self.busy_until = started + (DECODE + prompts) * noise
        return Step(plan, self.busy_until, self.clock)


class EarlyDevice(Device):
    """Does most of its planning before, where it may."""

    prepared: StepPlan | None = None

    def prepare(self, plan: StepPlan) -> None:
        self.clock.now += 0.7 * PLANNING
        self.prepared = plan

    def submit(self, plan: StepPlan) -> Step:
        if plan is self.prepared:
            self.clock.now -= 0.7 * PLANNING
        return super().submit(plan)


class Outcome:
    """First-token times of requests that arrive at random, and what the device lost."""

    def __init__(self, seed: int, *, patient: bool, kind: type[Device] = Device) -> None:
        random, clock = Random(seed), Clock()
        device = kind(clock, random)
        config = SchedulerConfig(4096, 16, 2048, 64, 2048, depth=2, lookahead=1)
        core = EngineCore(Scheduler(config), device, clock=clock)
        at = 1.0
        arrivals = [at := at + random.expovariate(25) for _ in range(200)]
        requests = [
            AddRequest(
                f"r{number}",
                [random.randrange(50) for _ in range(512)],
                TokenParams(128, seed=number + 1),
                arrival,
            )
            for number, arrival in enumerate(arrivals)
        ]
        self.first: dict[str, float] = {}
        while requests or core.has_work():
            while requests and requests[0].arrival <= clock.now:
                core.add(requests.pop(0))
            if not core.has_work():
                clock.now = requests[0].arrival
                device.busy_until = 0.0
                continue
            patience = core.patience() if patient else 0.0
            if patience > 0:
                # As a queue does: sleep until the next arrival or the end of the wait.
                until = clock.now + patience
                clock.now = min(until, requests[0].arrival) if requests else until
                continue
            outputs = core.step()
            for output in outputs.outputs if outputs else ():
                if output.new_ids:
                    self.first.setdefault(output.id, clock.now)
        self.waits = sorted(self.first[f"r{n}"] - arrivals[n] for n in range(200))
        self.lost = device.idle / (clock.now - 1.0)


def test_a_late_plan_takes_in_who_came_meanwhile() -> None:
    seed = Random().randrange(2**32)
    print("seed", seed)
    eager, patient = Outcome(seed, patient=False), Outcome(seed, patient=True)
    assert patient.waits[100] < eager.waits[100] - 0.4 * DECODE
    assert sum(patient.waits) < 0.9 * sum(eager.waits)
    assert patient.lost < 0.01


def test_who_comes_while_a_step_is_laid_out_is_in_it() -> None:
    seed = Random().randrange(2**32)
    print("seed", seed)
    patient = Outcome(seed, patient=True)
    early = Outcome(seed, patient=True, kind=EarlyDevice)
    assert sum(early.waits) < sum(patient.waits) - 200 * 0.2 * PLANNING
    assert early.lost < 0.01


def test_a_plan_that_came_too_late_widens_the_margin() -> None:
    pace = Pace()
    pace.landed(8, 8, 0.010)
    early = pace.patience(8, 8, 0.0)
    for _ in range(30):
        pace.planned(8, 8, 0.0, late=True)
    assert early - pace.patience(8, 8, 0.0) == pytest.approx(MOST_MARGIN - LEAST_MARGIN)
    for _ in range(1000):
        pace.planned(8, 8, 0.0, late=False)
    assert pace.patience(8, 8, 0.0) == pytest.approx(early)


def test_the_time_of_the_host_is_left_to_it() -> None:
    pace = Pace()
    pace.landed(8, 8, 0.010)
    before = pace.patience(8, 8, 0.0)
    pace.planned(8, 8, 0.002, late=False)
    pace.planned(8, 520, 1.0, late=True)  # a prompt, which tells nothing
    assert before - pace.patience(8, 8, 0.0) == pytest.approx(0.002)


def test_nothing_is_known_nothing_is_waited_for() -> None:
    pace = Pace()
    assert pace.patience(8, 8, 0.0) == 0.0
    pace.landed(1, 512, 0.012)
    assert pace.patience(8, 8, 0.0) == 0.0
    assert pace.patience(9, 1024, 0.0) == pytest.approx(TRUST * 0.024 - LEAST_MARGIN)
    assert pace.patience(9, 1024, 1.0) == 0.0


def test_steps_of_about_as_many_tokens_tell_more_than_others() -> None:
    pace = Pace()
    pace.landed(9, 1024, 0.020)  # half the time a token
    pace.landed(9, 520, 0.012)
    pace.landed(12, 530, 0.013)
    assert pace.patience(20, 536, 0.0) == pytest.approx(TRUST * 0.012 - LEAST_MARGIN)
    assert pace.patience(20, 100, 0.0) == pytest.approx(TRUST * 100 * 0.020 / 1024 - LEAST_MARGIN)


def test_a_host_that_computes_itself_never_waits() -> None:
    clock = Clock()
    device = Device(clock, Random(1))
    core = EngineCore(Scheduler(SchedulerConfig(64, 16, 512, 8, 512)), device, clock=clock)
    core.add(AddRequest("a", [1, 2, 3], TokenParams(5, seed=1), 1.0))
    while core.has_work():
        assert core.patience() == 0.0
        core.step()


def test_large_steps_may_take_their_time_and_small_ones_may_not() -> None:
    allowance = Allowance()
    assert allowance.seconds(LARGE - 1) == 0.0
    assert 10 < allowance.seconds(2048) < 30, "nothing has been measured"
    allowance.landed(2048, 17.4)
    assert allowance.seconds(2048) == pytest.approx(3 * 17.4)
    for _ in range(40):
        allowance.landed(8192, 0.2)
    assert allowance.seconds(8192) == pytest.approx(0.6, rel=0.05)
    allowance.landed(8, 5.0)
    assert allowance.seconds(8192) < 1, "small steps say nothing of large ones"


def test_the_core_allows_for_what_is_in_flight() -> None:
    clock = Clock()
    device = Device(clock, Random(1))
    core = EngineCore(Scheduler(SchedulerConfig(64, 16, 512, 8, 512)), device, clock=clock)
    core.add(AddRequest("a", list(range(300)), TokenParams(5, seed=1), 1.0))
    core.step()
    assert core.allowance > 1
    core.step()
    assert core.allowance == 0.0, "a step of one token"
