"""Octavo and a peer engine side by side on this machine: the same cells in alternating rounds.

    python benchmarks/versus.py --model FOLDER --peer-python PEER/bin/python [--rounds 3]

Each round runs every cell on both engines, in an order that alternates, and prints the median of
each and their ratio. While one engine works the other is stopped. The number of busy cores in
each cell is printed too: more than the engine has threads means that others were at work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RUNNER = Path(__file__).with_name("runner.py")


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: its name, how it is asked for, and which way is better."""

    name: str
    method: str
    argument: int
    more_is_better: bool = False
    must: float = 0.0  # ratio to reach: ours / peer


# The peer's best setting on two cores, and as much KV memory as ours.
PEER_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}
CELLS = (
    Cell("throughput (a), output tok/s", "throughput", 64, more_is_better=True, must=1.35),
    Cell("inter-token latency, batch 1, ms", "between_tokens", 1, must=0.6),
    Cell("inter-token latency, batch 8, ms", "between_tokens", 8, must=0.55),
    Cell("inter-token latency, batch 32, ms", "between_tokens", 32, must=0.75),
    Cell("time to first token, 32 prompt tokens, ms", "first_token", 32, must=0.65),
    Cell("time to first token, 256 prompt tokens, ms", "first_token", 256, must=0.85),
    Cell("time to first token, 1024 prompt tokens, ms", "first_token", 1024, must=0.85),
)


@dataclass(slots=True)
class Engine:
    """A runner process and what it has measured."""

    name: str
    process: subprocess.Popen[str]
    values: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, python: str, module: str, arguments: dict[str, Any]) -> Engine:
        environment = {**os.environ, **(PEER_ENVIRONMENT if name == "peer" else {})}
        log = open(f"{name}.versus.log", "w")  # noqa: SIM115 - lives as long as the process
        process = subprocess.Popen(
            [python, "-P", str(RUNNER), module, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # so that all it starts ends with it
        )
        return cls(name, process)

    def reply(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended; see {self.name}.versus.log")
        answer: dict[str, float] = json.loads(line)
        return answer

    def run(self, cell: Cell) -> tuple[float, float]:
        """The value, and how many cores of the machine were busy meanwhile."""
        assert self.process.stdin is not None
        os.killpg(self.process.pid, signal.SIGCONT)
        busy, start = _busy_seconds(), time.monotonic()
        print(
            json.dumps({"cell": cell.method, "args": [cell.argument]}),
            file=self.process.stdin,
            flush=True,
        )
        value = self.reply()["value"]
        cores = (_busy_seconds() - busy) / (time.monotonic() - start)
        self.freeze()
        return value, cores

    def freeze(self) -> None:
        """Stops all its threads, so that none spins while the other engine is measured."""
        os.killpg(self.process.pid, signal.SIGSTOP)


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system = (int(x) for x in file.readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder in bf16, for both")
    parser.add_argument("--peer-python", help="Python of an environment with vllm in it")
    parser.add_argument("--peer-eager", action="store_true", help="the peer without compiling")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cells", help="only cells whose name contains this text")
    parser.add_argument("--ours", default="{}", help="more arguments for Octavo's LLM, as JSON")
    return parser.parse_args()


def main() -> None:
    args = parse()
    shared = {
        "model": args.model,
        "dtype": "bfloat16",
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 2048,
    }
    ours = {**shared, "kv_cache_memory_bytes": 4 << 30, **json.loads(args.ours)}
    engines = [Engine.start("octavo", sys.executable, "octavo", ours)]
    if args.peer_python:
        peer = {**shared, "enforce_eager": args.peer_eager}
        engines.append(Engine.start("peer", args.peer_python, "vllm", peer))
    for engine in engines:
        print(f"{engine.name}: loaded in {engine.reply()['load_s']:.1f} s", flush=True)
        engine.freeze()
    cells = [cell for cell in CELLS if not args.cells or args.cells in cell.name]
    for cell in cells:  # the first run of a cell warms up caches and is not counted
        for engine in engines:
            engine.run(cell)
    for round_number in range(args.rounds):
        order = engines if round_number % 2 == 0 else engines[::-1]
        for cell in cells:
            for engine in order:
                value, cores = engine.run(cell)
                engine.values.setdefault(cell.name, []).append(value)
                print(
                    f"  round {round_number + 1} {engine.name:7} {cell.name:45} {value:9.2f}"
                    f"   ({cores:.2f} cores busy)",
                    flush=True,
                )
    report(engines, cells)
    for engine in engines:
        os.killpg(engine.process.pid, signal.SIGKILL)


def report(engines: list[Engine], cells: list[Cell]) -> None:
    """Medians, spread and ratio; a row a cell."""
    print(f"\n{'cell':45} " + " ".join(f"{e.name:>22}" for e in engines) + "    ratio   must")
    for cell in cells:
        medians = [statistics.median(e.values[cell.name]) for e in engines]
        columns = [
            f"{m:9.1f} [{min(e.values[cell.name]):.1f}-{max(e.values[cell.name]):.1f}]"
            for m, e in zip(medians, engines, strict=True)
        ]
        row = f"{cell.name:45} " + " ".join(f"{c:>22}" for c in columns)
        if len(medians) == 2:
            ratio = medians[0] / medians[1]
            reached = ratio >= cell.must if cell.more_is_better else ratio <= cell.must
            row += f"   {ratio:6.2f} {cell.must:6.2f} {'yes' if reached else 'NO'}"
        print(row)


if __name__ == "__main__":
    main()
