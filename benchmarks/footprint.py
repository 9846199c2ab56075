"""Start-up time and resident memory of a server, Octavo's and a peer's, with the same KV size.

    python benchmarks/footprint.py --model FOLDER [--peer PEER/bin/vllm] [--rounds 3]

Each round starts each server in turn, from the start of the process to the first 200 of its
readiness route, sends one request, and adds up the resident memory of all its processes.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

KV_GIB = 4
PORT = 8911
START_SECONDS = 400


def commands(args: argparse.Namespace) -> dict[str, tuple[list[str], dict[str, str], str]]:
    """Name -> (command, environment, readiness route)."""
    shared = ["serve", args.model, "--port", str(PORT), "--host", "127.0.0.1"]
    shared += ["--max-model-len", "2048", "--dtype", "bfloat16"]
    ours = [sys.executable, "-m", "octavo", *shared, "--kv-cache-memory-bytes", f"{KV_GIB}G"]
    found = {"octavo": (ours, {}, "/health/ready")}
    if args.peer:
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "HF_HUB_OFFLINE": "1",
        }
        found["peer"] = ([args.peer, *shared], environment, "/health")
    return found


def measure(
    name: str, command: list[str], environment: dict[str, str], route: str, model: str
) -> tuple[float, float]:
    """(seconds to ready, MB resident in all its processes)."""
    url = f"http://127.0.0.1:{PORT}"
    with Path(f"{name}.footprint.log").open("w") as log:
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        try:
            while not _answers(url + route):
                if process.poll() is not None or time.monotonic() - start > START_SECONDS:
                    raise SystemExit(f"{name} did not start; see {name}.footprint.log")
                time.sleep(0.02)
            seconds = time.monotonic() - start
            body = {"model": model, "prompt": "The capital of France is", "max_tokens": 32}
            httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
            return seconds, sum(_resident(pid) for pid in _tree(process.pid))
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _tree(int(child))


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder, for both")
    parser.add_argument("--peer", help="the peer's command, such as PEER/bin/vllm")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(args.rounds):
        for name, (command, environment, route) in commands(args).items():
            values = measure(name, command, environment, route, args.model)
            found.setdefault(name, []).append(values)
            print(f"  {name:7} ready after {values[0]:6.2f} s, {values[1]:7.0f} MB", flush=True)
    for name, values in found.items():
        seconds, megabytes = (statistics.median(column) for column in zip(*values, strict=True))
        print(f"{name:7} median: {seconds:6.2f} s to ready, {megabytes:7.0f} MB resident")


if __name__ == "__main__":
    main()
