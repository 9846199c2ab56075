"""What the API process costs: many streams from an engine that only pretends, over the real wire.

    python benchmarks/frontend.py --model MODEL [--streams 256] [--rate 40] [--tokens 400]
        [--route chat|completions] [--logprobs N] [--api-server-count N] [--profile FILE]

Four kinds of process: a core that speaks the real messages over the real sockets and gives every
sequence a random token at each tick of its clock; the real server, with its tokenizer, routes and
HTTP; one light client that counts events in raw bytes; and this one, which reads /proc. The
figures are the server's CPU time a streamed token in the middle of the run, and how far the
client is behind the core's clock. Not for: engines that compute (`versus.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

TICKS = os.sysconf("SC_CLK_TCK")
START_SECONDS = 60
DONE = b"data: [DONE]"
RAMP = 0.2  # share of each end of a run that is left out of the CPU figure


# The fake core


def fake_core(rate: float, logprobs: int, context: int) -> int:
    """Serves as the engine core's process does, without a model; settings on standard input."""
    from octavo.core import CoreSettings
    from octavo.engine.process import run
    from octavo.types import WorkerInfo

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=CoreSettings)
    info = WorkerInfo(2**16, 16, context, 49152, "none", "none", 0, 0)
    core = FakeCore(rate, logprobs)
    return run(settings.addresses, settings.parent, lambda report: (core, info))  # type: ignore


class FakeCore:
    """Stands where an `EngineCore` stands: one random token a sequence at each tick."""

    allowance = 0.0

    def __init__(self, rate: float, logprobs: int) -> None:
        self._period = 1 / rate
        self._logprobs = logprobs
        self._next = 0.0
        self._left: dict[str, int] = {}  # tokens still to come
        self._random = random.Random(7)

    def add(self, request) -> None:
        self._left[request.id] = request.params.max_tokens

    def abort(self, ids) -> None:
        for name in ids:
            self._left.pop(name, None)

    def control(self, op: str, args) -> dict[str, str]:
        return {}

    def has_work(self) -> bool:
        return bool(self._left)

    def patience(self) -> float:
        return 0.0

    def step(self):
        from octavo.types import SequenceOutput, StepOutputs, StepStats, TokenLogprobs

        now = time.monotonic()
        self._next = max(self._next + self._period, now)
        time.sleep(self._next - now)
        outputs = []
        for name, left in list(self._left.items()):
            ids = [self._random.randrange(300, 49_000)]
            entries = None
            if self._logprobs:
                tops = list(range(500, 500 + self._logprobs))
                entries = [TokenLogprobs(ids + tops, [-1.5] * (1 + len(tops)), 1)]
            reason = "length" if left == 1 else None
            outputs.append(SequenceOutput(name, ids, reason, logprobs=entries))
            if left == 1:
                del self._left[name]
            else:
                self._left[name] = left - 1
        count = len(self._left)
        return StepOutputs(outputs, StepStats(running=count, sampled_tokens=len(outputs)))


# The server


def server(args: argparse.Namespace) -> int:
    """The real server over the fake core."""
    from octavo import launch, log
    from octavo.options import EngineArgs, ServerArgs

    log.setup("info")
    engine = EngineArgs(model=args.model, max_num_seqs=args.streams)
    more = {"api_server_count": args.api_server_count} if args.api_server_count > 1 else {}
    http = ServerArgs(host="127.0.0.1", port=0, served_model_name=["m"], **more)
    core = [sys.executable, __file__, "--model", args.model, "--role", "core"]
    core += ["--rate", str(args.rate), "--logprobs", str(args.logprobs)]
    core += ["--context", str(args.context)]
    if not args.profile:
        return launch.serve(engine, http, program=tuple(core))
    profile = cProfile.Profile()
    try:
        return profile.runcall(launch.serve, engine, http, program=tuple(core))
    finally:
        profile.dump_stats(args.profile)


# The client


class Reader(asyncio.Protocol):
    """One stream: counts events in what comes, and keeps the time of each piece."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request, self._ended = request, ended
        self.events = 0
        self.times: list[float] = []
        self._tail = b""

    def connection_made(self, transport) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.monotonic())
        self.events += data.count(b"data: {")
        if DONE in self._tail + data and not self._ended.done():
            self._ended.set_result(None)
            self._transport.close()
        self._tail = data[-len(DONE) :]

    def connection_lost(self, exc) -> None:
        if not self._ended.done():
            self._ended.set_exception(ConnectionError("a stream was cut"))


def body_of(args: argparse.Namespace) -> tuple[str, dict[str, object]]:
    fields: dict[str, object] = {"model": "m", "stream": True, "max_tokens": args.tokens}
    fields["ignore_eos"] = True
    if args.route == "chat":
        if args.logprobs:
            fields |= {"logprobs": True, "top_logprobs": args.logprobs}
        return "/v1/chat/completions", fields | {"messages": [{"role": "user", "content": "Hi"}]}
    if args.logprobs:
        fields["logprobs"] = args.logprobs
    return "/v1/completions", fields | {"prompt": "Hi"}


async def client(args: argparse.Namespace) -> None:
    """Opens all streams, reads them to the end, prints what it saw as one JSON line."""
    path, fields = body_of(args)
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    loop = asyncio.get_running_loop()
    host, port = args.address.rsplit(":", 1)
    began = time.monotonic()
    readers, ends = [], []
    for _ in range(args.streams):
        ended: asyncio.Future[None] = loop.create_future()
        ends.append(ended)
        _, reader = await loop.create_connection(
            lambda ended=ended: Reader(request, ended), host.removeprefix("http://"), int(port)
        )
        readers.append(reader)
    await asyncio.gather(*ends)
    gaps = [
        later - sooner
        for reader in readers
        for sooner, later in zip(reader.times[2:], reader.times[3:], strict=False)
    ]
    gaps.sort()
    spans = [reader.times[-1] - reader.times[1] for reader in readers]
    found = {
        "seconds": time.monotonic() - began,
        "events": sum(reader.events for reader in readers),
        "span": max(spans),
        "gap_median": gaps[len(gaps) // 2],
        "gap_99": gaps[len(gaps) * 99 // 100],
        "gap_most": gaps[-1],
    }
    print(json.dumps(found), flush=True)


# The conductor


@dataclass
class Sample:
    """CPU seconds of each role until a moment: in programs, in the kernel."""

    at: float
    cpu: dict[str, tuple[float, float]]


def cpu_of(pids: list[int]) -> tuple[float, float]:
    user = system = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        user, system = user + int(fields[11]), system + int(fields[12])
    return user / TICKS, system / TICKS


def tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from tree(int(child))


def roles(pid: int) -> dict[str, list[int]]:
    """The server's processes by what they do."""
    found: dict[str, list[int]] = {"api": [], "core": []}
    for one in tree(pid):
        line = Path(f"/proc/{one}/cmdline").read_bytes()
        found["core" if b"--role\0core" in line else "api"].append(one)
    return found


def sample(pids: dict[str, list[int]], extra: int) -> Sample:
    cpu = {name: cpu_of(members) for name, members in {**pids, "client": [extra]}.items()}
    return Sample(time.monotonic(), cpu)


def measure(args: argparse.Namespace, log: Path) -> None:
    me = [sys.executable, __file__, *sys.argv[1:]]
    with log.open("wb") as out:
        serving = subprocess.Popen([*me, "--role", "server"], stdout=out, stderr=out)
    try:
        address = wait_for(log, r"event=listening address=(\S+)", serving)
        wait_for(log, r"event=(ready)", serving)
        time.sleep(0.5)
        pids = roles(serving.pid)
        asking = subprocess.Popen(
            [*me, "--role", "client", "--address", address], stdout=subprocess.PIPE, text=True
        )
        length = args.tokens / args.rate
        time.sleep(1.0 + RAMP * length)
        first = sample(pids, asking.pid)
        time.sleep((1 - 2 * RAMP) * length)
        last = sample(pids, asking.pid)
        output, _ = asking.communicate(timeout=600)
        report(args, json.loads(output), first, last)
    finally:
        serving.send_signal(signal.SIGTERM)
        try:
            serving.wait(20)
        except subprocess.TimeoutExpired:
            serving.kill()


def report(args: argparse.Namespace, seen: dict, first: Sample, last: Sample) -> None:
    seconds = last.at - first.at
    tokens = seconds * args.rate * args.streams
    ideal = (args.tokens - 1) / args.rate
    tokens *= min(1.0, ideal / seen["span"])
    print(
        f"{args.streams} streams x {args.rate:g}/s, {args.route}: {seen['events']} events, "
        f"slowest stream {seen['span']:.2f} s for {ideal:.2f} s of tokens; gaps median "
        f"{1000 * seen['gap_median']:.1f}, p99 {1000 * seen['gap_99']:.1f}, most "
        f"{1000 * seen['gap_most']:.1f} ms"
    )
    for name in last.cpu:
        user, system = (b - a for a, b in zip(first.cpu[name], last.cpu[name], strict=True))
        used = user + system
        print(
            f"  {name:6} {1e6 * used / tokens:5.1f} us a token ({1e6 * user / tokens:.1f} in "
            f"programs, {1e6 * system / tokens:.1f} in the kernel), {100 * used / seconds:.0f} %"
        )


def wait_for(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        if found := re.search(pattern, log.read_text()):
            return found.group(1)
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", required=True, help="a model whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=40.0, help="tokens a second of a stream")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--route", choices=("chat", "completions"), default="chat")
    parser.add_argument("--logprobs", type=int, default=0)
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--profile", help="file for cProfile's figures of the server")
    parser.add_argument("--role", choices=("server", "client", "core"), help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "core":
        return fake_core(args.rate, args.logprobs, args.context)
    if args.role == "server":
        return server(args)
    if args.role == "client":
        asyncio.run(client(args))
        return 0
    for _ in range(args.rounds):
        measure(args, Path("frontend.log"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
