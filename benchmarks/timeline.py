"""What writing timelines down costs: two servers of one model, with and without, in turns.

    python benchmarks/timeline.py --model MODEL [--blocks 20] [--requests 16] [--tokens 32]

Both servers run all the time and only one has work. Blocks of the same requests go to one and the
other in the order A B B A, so that what else the machine does hits both. Two figures a block: CPU
seconds of all processes of the server, which other programs disturb least, and tokens a second.
Printed are the medians of with over without of neighbouring blocks, and the middle 95 % of those
medians when the pairs are drawn anew. `--same` runs the server without timelines twice: the noise.
`--host` measures the scheduler alone, with and without a tracer, by CPU time and without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from octavo.config import SchedulerConfig
from octavo.engine.scheduler import Scheduler
from octavo.engine.trace import Tracer
from octavo.types import SAMPLE, AddRequest, StepResult, TokenParams, pack

TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 120
CLIENTS = 8


@dataclass
class Server:
    """A running server and its processes."""

    url: str
    pid: int

    def cpu(self) -> float:
        """CPU seconds so far of the server and its children."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        total = 0
        for pid in (self.pid, *map(int, children)):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total / TICKS


@contextlib.contextmanager
def server(model: str, kept: int, log: Path) -> Iterator[Server]:
    """A server that keeps so many timelines."""
    flags = ["--timeline-requests", str(kept), "--max-model-len", "512", "--max-num-seqs", "8"]
    flags += ["--num-gpu-blocks-override", "512", "--host", "127.0.0.1", "--port", "0"]
    command = [sys.executable, "-m", "octavo", "serve", model, *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        end = time.monotonic() + START_SECONDS
        while "event=ready" not in log.read_text():
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        found = re.search(r"address=(\S+)", log.read_text())
        assert found is not None
        yield Server(found.group(1), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def block(one: Server, prompts: list[str], tokens: int) -> tuple[float, float]:
    """CPU seconds and seconds that these requests take, half of them streamed."""
    places = asyncio.Semaphore(CLIENTS)

    async def ask(client: httpx.AsyncClient, number: int, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        async with places:
            reply = await client.post("/v1/completions", json={**body, "stream": bool(number % 2)})
            reply.raise_for_status()

    cpu, start = one.cpu(), time.monotonic()
    async with httpx.AsyncClient(base_url=one.url, timeout=120) as client:
        await asyncio.gather(*(ask(client, n, prompt) for n, prompt in enumerate(prompts)))
    return one.cpu() - cpu, time.monotonic() - start


def prompts_of(count: int) -> list[str]:
    words = ["owl", "river", "seven", "paper", "stone", "light", "north", "apple"]
    return [" ".join(random.choices(words, k=48)) for _ in range(count)]


def interval(ratios: list[float]) -> str:
    """Median, and the middle 95 % of medians of pairs drawn anew."""
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    low, high = medians[50], medians[-51]
    return f"{statistics.median(ratios):.4f} (95 %: {low:.4f} to {high:.4f}, {len(ratios)} pairs)"


async def measure(one: Server, other: Server, args: argparse.Namespace) -> None:
    await block(one, prompts_of(CLIENTS), 8)
    await block(other, prompts_of(CLIENTS), 8)
    cpu: list[float] = []
    wall: list[float] = []
    for number in range(args.blocks):
        prompts = prompts_of(args.requests)
        order = (one, other) if number % 2 == 0 else (other, one)
        found = {}
        for place in order:
            found[place.url] = await block(place, prompts, args.tokens)
        cpu.append(found[one.url][0] / found[other.url][0])
        wall.append(found[one.url][1] / found[other.url][1])
    print(f"CPU seconds, with / without: {interval(cpu)}")
    print(f"seconds, with / without:     {interval(wall)}")


def schedule(traced: bool, prompts: list[list[int]]) -> float:
    """CPU seconds of planning and committing these prompts and 32 tokens of output for each."""
    config = SchedulerConfig(2048, 16, 1024, 64, 2048)
    scheduler = Scheduler(config, Tracer() if traced else None)
    start = time.process_time()
    for number, ids in enumerate(prompts):
        scheduler.add(AddRequest(f"r{number}", ids, TokenParams(32), 0.0))
    now = 1.0
    while scheduler.num_live:
        now += 0.001
        plan = scheduler.plan(now)
        assert plan is not None
        tokens = pack([7] * sum(flag & SAMPLE for flag in plan.flags))
        scheduler.commit(plan, StepResult(plan.step, tokens), 1.0, now)
    return time.process_time() - start


def host() -> None:
    """The engine room's part: pairs of runs, each of 256 requests."""
    differences, ratios = [], []
    for number in range(40):
        prompts = [random.choices(range(50_000), k=random.randrange(50, 600)) for _ in range(256)]
        order = (True, False) if number % 2 else (False, True)
        seconds = {traced: schedule(traced, prompts) for traced in order}
        differences.append(1e6 * (seconds[True] - seconds[False]) / len(prompts))
        ratios.append(seconds[True] / seconds[False])
    print(f"scheduler, with / without: {interval(ratios)}")
    print(f"scheduler, microseconds a request more: {interval(differences)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--same", action="store_true", help="compare a server with its like")
    parser.add_argument("--host", action="store_true", help="the scheduler alone, without a model")
    args = parser.parse_args()
    if args.host:
        host()
        return
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        kept = 0 if args.same else 512
        one = stack.enter_context(server(args.model, kept, Path(folder) / "one"))
        other = stack.enter_context(server(args.model, 0, Path(folder) / "other"))
        asyncio.run(measure(one, other, args))


if __name__ == "__main__":
    main()
