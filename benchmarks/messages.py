"""What a step's messages cost: the plan out to every worker, the result back from one.

    python benchmarks/messages.py [--ranks 2] [--rounds 3000]

The executor is the real one and the workers are processes, but they compute nothing: each decodes
the plan, and the one that answers sends as many tokens as the plan has rows. `mp` is the channel of
one machine (sockets in a private folder), `ray` that between machines (TCP, encrypted), here over
the loopback interface. Times are from `submit` to `result` in the core's process, decode steps of
64 and 512 rows. Not for: what a worker does in a step, or collectives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import msgspec
import zmq

from octavo.config import ParallelConfig, WorkerConfig
from octavo.executor.channel import Binder, Context, connect, encode
from octavo.executor.records import Landed, RankSettings, Step, ToRank, Up
from octavo.executor.remote import Patience, RemoteExecutor
from octavo.executor.spawn import LOOPBACK, LocalCrew
from octavo.types import SAMPLE, StepPlan, StepResult, WorkerInfo, pack

ROWS = (64, 512)
LIMIT_US = 150
WARM_UP = 200


class EncryptedCrew(LocalCrew):
    """Processes of this machine behind the channel that leaves it."""

    def binder(self, context: Context) -> Binder:
        return Binder(context, host=LOOPBACK)


def echo() -> int:
    """A worker that computes nothing."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=RankSettings)
    context: Context = zmq.Context()
    plans = connect(context, zmq.PULL, settings.plans, settings)
    results = connect(context, zmq.PUSH, settings.results, settings)
    results.linger = 1000
    info = WorkerInfo(1, 16, 1, 1, "none", "none", 0, 0)
    results.send(encode(Up(settings.place.rank, info)))
    decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
    while isinstance(message := decoder.decode(plans.recv()), Step):
        if settings.place.answers:
            tokens = message.plan.tokens  # as many bytes as those of a real step
            results.send(encode(Landed(StepResult(message.plan.step, tokens))))
    return 0


def decode_plan(step: int, rows: int) -> StepPlan:
    """One token of each row, and a new block for every sixteenth."""
    new = range(0, rows, 16)
    return StepPlan(
        step=step,
        epoch=0,
        slots=pack(range(rows)),
        starts=pack([1000 + step % 1000] * rows),
        lengths=pack([1] * rows),
        flags=bytes([SAMPLE] * rows),
        tokens=pack([4242] * rows),
        block_rows=pack(new),
        block_at=pack([63] * len(new)),
        block_ids=pack(new),
    )


def measure(kind: str, ranks: int, rounds: int) -> bool:
    """Prints a line for each number of rows; False if a median is over the limit."""
    parallel = ParallelConfig(ranks, 1, "mp")
    crew = (LocalCrew if kind == "mp" else EncryptedCrew)(
        parallel, program=(sys.executable, __file__, "--echo")
    )
    config = WorkerConfig("none", parallel=parallel)
    executor = RemoteExecutor(config, crew, parent=os.getpid(), patience=Patience(silence=3600.0))
    executor.start()
    good = True
    try:
        step = 0
        for rows in ROWS:
            times: list[float] = []
            for number in range(WARM_UP + rounds):
                step += 1
                plan = decode_plan(step, rows)
                began = time.perf_counter()
                result = executor.submit(plan).result()
                if number >= WARM_UP:
                    times.append(1e6 * (time.perf_counter() - began))
                assert len(result.tokens) == 4 * rows
            median = statistics.median(times)
            good = good and median < LIMIT_US
            tail = statistics.quantiles(times, n=100)
            print(
                f"{kind:4} {ranks} ranks {rows:4} rows: median {median:6.1f} us, "
                f"p10 {tail[9]:6.1f}, p90 {tail[89]:6.1f}, p99 {tail[98]:7.1f}, n={rounds}"
            )
    finally:
        executor.close()
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description="cost of a step's messages")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    args, _ = parser.parse_known_args()
    if args.echo:
        return echo()
    good = [measure(kind, args.ranks, args.rounds) for kind in ("mp", "ray")]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
