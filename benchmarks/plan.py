"""What planning and committing a step costs on the host, in milliseconds, without any device.

    python benchmarks/plan.py [--steps N]

Running decode sequences of about 500 tokens, block size 16, and an executor that does nothing.
Prints medians and 99th percentiles for 64, 256 and 512 sequences. The bar for a plan at 512 is
1 ms, the aim 0.3 ms.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

from octavo.config import SchedulerConfig
from octavo.engine.scheduler import Scheduler
from octavo.engine.trace import Tracer
from octavo.types import SAMPLE, AddRequest, StepPlan, StepResult, TokenParams, pack

BLOCK_SIZE = 16
CONTEXT = 500


def result_of(plan: StepPlan) -> StepResult:
    """A token for each sampled row, and nothing computed."""
    return StepResult(plan.step, pack([7] * sum(flag & SAMPLE for flag in plan.flags)))


def running_scheduler(num_sequences: int, num_steps: int, *, depth: int) -> Scheduler:
    """All sequences past their prompts, at different places in their blocks."""
    length = CONTEXT + 2 * num_steps + 64
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=num_sequences * (length // BLOCK_SIZE + 2),
            block_size=BLOCK_SIZE,
            max_model_len=length,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=16384,
            depth=depth,
            lookahead=depth - 1,
        ),
        Tracer(),
    )
    numbers = random.Random(0)
    for number in range(num_sequences):
        prompt = numbers.choices(range(50_000), k=CONTEXT - numbers.randrange(2 * BLOCK_SIZE))
        scheduler.add(AddRequest(f"request-{number}", prompt, TokenParams(length), float(number)))
    while scheduler.waiting or scheduler.filling:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, result_of(plan))
    return scheduler


def timed(call: Callable[[], object], times: list[float]) -> object:
    began = time.perf_counter()
    value = call()
    times.append(1000 * (time.perf_counter() - began))
    return value


def measure(num_sequences: int, num_steps: int, *, depth: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each plan and each commit, with `depth` steps in flight."""
    scheduler = running_scheduler(num_sequences, num_steps, depth=depth)
    plans: list[float] = []
    commits: list[float] = []
    flying: list[tuple[StepPlan, StepResult]] = []
    for _ in range(num_steps):
        plan = timed(partial(scheduler.plan, 0.0), plans)
        assert isinstance(plan, StepPlan)
        assert plan.num_rows == num_sequences
        flying.append((plan, result_of(plan)))
        if len(flying) == depth:
            oldest, result = flying.pop(0)
            timed(partial(scheduler.commit, oldest, result), commits)
    return plans, commits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="steps to time for each size")
    num_steps = parser.parse_args().steps
    print("sequences  depth   plan ms (p99)     commit ms (p99)")
    for depth in (1, 2):
        for num_sequences in (64, 256, 512):
            columns = measure(num_sequences, num_steps, depth=depth)
            cells = [
                f"{statistics.median(times):.3f} ({sorted(times)[int(0.99 * len(times))]:.3f})"
                for times in columns
            ]
            print(f"{num_sequences:9}  {depth:5}   {cells[0]:16}  {cells[1]}")


if __name__ == "__main__":
    main()
