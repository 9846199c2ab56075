"""A real server: timelines, keys, fair shares, and a stop signal at any moment of its start."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import serving, wait_for

pytestmark = pytest.mark.model
SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "80", "--max-num-seqs", "2")
KEYS = """
[[keys]]
name = "crow"
key = "sk-crow-12345"

[[keys]]
name = "heron"
key = "sk-heron-12345"

[[keys]]
name = "boss"
key = "sk-boss-12345"
scopes = ["admin"]
"""
PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16"


def as_(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer sk-{name}-12345"}


def test_keys_shares_and_timelines(smollm2_gguf: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS)
    flags = ("--api-keys-file", str(keys), "--scheduling-policy", "fair", "--enable-log-requests")
    with serving(smollm2_gguf, tmp_path / "log", *SMALL, *flags, wait=False) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        url = f"{server.url}/v1/completions"
        body = {"prompt": PROMPT, "max_tokens": 24, "ignore_eos": True}
        ended: list[str] = []

        def ask(name: str, id: str) -> None:
            headers = {**as_(name), "X-Request-Id": id}
            assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
            ended.append(id)

        flood = [threading.Thread(target=ask, args=("crow", f"crow-{n}")) for n in range(8)]
        for thread in flood:
            thread.start()
        wait_for(lambda: _gauge(server.url, "vllm:num_requests_waiting") >= 4, server, 20)
        ask("heron", "light")
        assert len(ended) <= 6, ended  # those who had a seat, and one more round at most
        for thread in flood:
            thread.join(60)

        def told(id: str, name: str) -> httpx.Response:
            return httpx.get(f"{server.url}/v1/requests/{id}/timeline", headers=as_(name))

        assert told("light", "crow").status_code == 404
        light = told("light", "heron").json()["sequences"][0]
        assert light["queue"]["sequences_ms"] > 0
        last = told(ended[-1], "boss").json()
        assert last["tenant"] == "crow"
        assert last["sequences"][0]["prefix_cache"]["reason"] == "hit"
        chunk = last["sequences"][0]["prefill_chunks"][0]
        assert chunk["planned_ms"] < chunk["landed_ms"] <= last["first_token_ms"] + 1
        phases = last["phases_ms"]
        named = sum(phases[name] for name in ("read", "tokenize", "queue", "prefill", "decode"))
        assert named <= last["total_ms"]
        assert named >= 0.5 * last["total_ms"]
        # another's prompt is in the cache, and neither used nor spoken of
        assert told("light", "heron").json()["sequences"][0]["prefix_cache"]["reason"] == "new"
        assert light["cached_tokens"] == 0
        assert httpx.get(f"{server.url}/metrics", headers=as_("crow")).status_code == 403
        lines = [line for line in server.log.read_text().splitlines() if " request id=" in line]
        assert len(lines) == 9
        assert all("reason=length" in line and "output_tokens=24" in line for line in lines)


def _gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics", headers=as_("boss")).text
    return sum(float(row.split()[-1]) for row in text.splitlines() if row.startswith(name + "{"))


def catches_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 0.6, 1.0, 1.6])
def test_a_stop_signal_at_any_moment_of_a_start(
    smollm2_gguf: Path, tmp_path: Path, delay: float
) -> None:
    delay += random.random() * 0.1
    command = [sys.executable, "-m", "octavo", "serve", str(smollm2_gguf), "--port", "0", *SMALL]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        start = time.monotonic()
        while not catches_sigterm(process.pid):
            assert process.poll() is None
            assert time.monotonic() - start < 30
            time.sleep(0.005)
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, f"after {delay:.2f} s: {log.read_text()}"
        assert "Traceback" not in log.read_text(), f"after {delay:.2f} s: {log.read_text()}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
