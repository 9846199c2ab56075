"""`octavo bench startup`: what a start is made of, from the command to a model that can answer.

Starts the engine core as the server does, waits until it is ready, ends it, and does so again.
The first start may find the caches of kernels and of the file system empty, so it is shown apart;
`--cold` gives every start an empty folder of kernels. Not for: what comes after (`serve.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.bench.offline import add_engine
from octavo.cli.flags import engine_args
from octavo.errors import ConfigError
from octavo.frontend import Frontend
from octavo.options import EngineArgs
from octavo.resolve import is_in_core
from octavo.supervisor import CoreProcess, Supervisor

BAR = 40  # characters of the longest row


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a start, in seconds since its beginning."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Start:
    """One start."""

    phases: tuple[Phase, ...]
    device: str

    @property
    def seconds(self) -> float:
        """Until the engine could answer."""
        return self.phases[-1].end


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the benchmark."""
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-iters", type=int, default=3, help="starts after the first one")
    group.add_argument("--cold", action="store_true", help="no start finds compiled kernels")
    group.add_argument("--output-json", type=Path)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Starts the engine and prints a waterfall of the first start and of the median one."""
    if args.num_iters < 0:
        raise ConfigError(f"--num-iters {args.num_iters} must not be negative.", "num_iters")
    from rich.console import Console
    from rich.progress import track

    engine = engine_args(args)
    console = Console(file=sys.stderr)
    rounds = track(range(1 + args.num_iters), "Starts", console=console, transient=True)
    starts = [_start(engine, cold=args.cold) for _ in rounds]
    print(waterfall("first start", starts[0]))
    if later := sorted(starts[1:], key=lambda start: start.seconds):
        middle = later[(len(later) - 1) // 2]
        print(f"\n{waterfall(f'median of {len(later)} more', middle)}")
    if args.output_json is not None:
        args.output_json.write_text(json.dumps(_as_json(engine, starts), indent=4) + "\n")
    return 0


def _start(engine: EngineArgs, *, cold: bool) -> Start:
    with tempfile.TemporaryDirectory() if cold else nullcontext() as folder:
        return asyncio.run(_timed(engine, folder))


async def _timed(engine: EngineArgs, kernels: str | None) -> Start:
    began = time.perf_counter()
    engine.check()
    core = CoreProcess(prepares=is_in_core(engine))
    try:
        frontend = Frontend.open(engine)
    except BaseException:
        core.discard()
        raise
    worker = frontend.worker if kernels is None else replace(frontend.worker, cache_dir=kernels)
    opened = time.perf_counter() - began
    supervisor = Supervisor(worker, frontend.scheduler, process=core)
    await supervisor.start()
    try:
        info = await supervisor.ready()
        total = time.perf_counter() - began
    finally:
        await supervisor.stop()
    in_core = sum(seconds for _, seconds in info.timings)
    # The core's phases end when it is ready; what is before them is its process. What it imports
    # while the tokenizer is made is in neither.
    lengths = [("tokenizer", opened), ("process", max(0.0, total - opened - in_core))]
    return Start(_in_order([*lengths, *info.timings]), info.device)


def _in_order(lengths: list[tuple[str, float]]) -> tuple[Phase, ...]:
    phases, at = [], 0.0
    for name, seconds in lengths:
        phases.append(Phase(name, at, at + seconds))
        at += seconds
    return tuple(phases)


def waterfall(title: str, start: Start) -> str:
    """One line a phase, drawn where it lies in time."""
    lines = [f"{title}: {start.seconds:.2f} s to ready on {start.device}"]
    scale = BAR / max(start.seconds, 1e-9)
    for phase in start.phases:
        left, right = round(phase.begin * scale), round(phase.end * scale)
        bar = " " * left + "█" * max(1, right - left)
        lines.append(f"  {phase.name:<10} {phase.end - phase.begin:6.2f} s  {bar}")
    return "\n".join(lines)


def _as_json(engine: EngineArgs, starts: list[Start]) -> dict[str, object]:
    seconds = [start.seconds for start in starts]
    return {
        "model_id": engine.model,
        "device": starts[0].device,
        "first_startup_time": seconds[0],
        "avg_startup_time": statistics.fmean(seconds[1:] or seconds),
        "startup_times": seconds,
        "phases": [
            {phase.name: phase.end - phase.begin for phase in start.phases} for start in starts
        ],
    }
