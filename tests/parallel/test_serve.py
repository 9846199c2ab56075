"""The server over several workers: a lost one costs its requests, not the service."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import RunningServer, serving, wait_for
from tests.e2e.test_serve import Stream

pytestmark = [pytest.mark.model, pytest.mark.slow]
SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "256M", "--dtype", "float32")
STAGES = ("--pipeline-parallel-size", "2", "--max-num-batched-tokens", "64", *SMALL)
BODY = {"prompt": "The river", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(child) for child in text.split()]


def ranks(server: RunningServer) -> list[int]:
    """Process ids of the workers."""
    found = children(server.core_pid())
    return [pid for pid in found if b"octavo.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def answer(server: RunningServer) -> str:
    reply = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


class LongStream(Stream):
    """One whose prompt takes many steps."""

    def __init__(self, server: RunningServer, tokens: int) -> None:
        self.words = " river" * 900
        super().__init__(server, tokens)

    def run(self) -> None:
        self._body["prompt"] = self.words
        super().run()


@pytest.mark.parametrize("when", ["idle", "prefill", "decode"])
def test_a_killed_worker(
    when: str, smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "tmp"
    own.mkdir()
    monkeypatch.setenv("TMPDIR", str(own))
    with serving(smollm2_gguf, tmp_path / "log", *STAGES) as server:
        expected = answer(server)
        pids = ranks(server)
        assert len(pids) == 2
        streams = []
        if when == "decode":
            streams = [Stream(server, 900) for _ in range(3)]
            wait_for(lambda: server.gauge("vllm:num_requests_running") == 3, server, 20)
        if when == "prefill":
            streams = [LongStream(server, 20) for _ in range(3)]
            wait_for(lambda: server.gauge("vllm:num_requests_running") >= 1, server, 20)
        os.kill(pids[1], signal.SIGKILL)
        assert wait_for(lambda: server.get("/health/ready").status_code == 503, server, 5) < 2
        for stream in streams:
            stream.join(5)
            # Before the first token there is no stream yet, and the answer itself is the error.
            plain = when == "prefill" and stream.lines[-1].startswith('{"error"')
            assert plain or stream.ended_with_error, stream.lines
        took = wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        print(f"ready again after {took:.1f} s")
        assert answer(server) == expected
        new = ranks(server)
        assert not set(new) & set(pids)
        assert "rank 1" in server.log.read_text()
    assert_gone(pids + new)
    assert list(own.iterdir()) == []


def test_workers_end_with_a_killed_core_and_with_a_killed_server(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *STAGES) as server:
        first = ranks(server)
        os.kill(first[0], signal.SIGSTOP)  # one that cannot end by itself
        os.kill(server.core_pid(), signal.SIGKILL)
        assert_gone(first)
        wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        second = ranks(server)
        server.process.kill()
        server.process.wait()
        assert_gone(second)


def assert_gone(pids: list[int]) -> None:
    end = time.monotonic() + 5
    left = pids
    while left and time.monotonic() < end:
        left = [pid for pid in left if _runs(pid)]
        time.sleep(0.05)
    assert not left


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
