"""A server's life: start, drain, death of its core, and starts that must fail."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import RunningServer, serving, wait_for

pytestmark = pytest.mark.model
SMALL = ("--max-model-len", "1024", "--num-gpu-blocks-override", "256", "--max-num-seqs", "8")


class Stream(threading.Thread):
    """One streamed completion, read in the background."""

    def __init__(self, server: RunningServer, tokens: int) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._url = f"{server.url}/v1/completions"
        self._body = {
            "prompt": "Once upon a time",
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            self.lines.extend(line for line in response.iter_lines() if line)

    @property
    def ended_well(self) -> bool:
        return self.lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in self.lines[-2]

    @property
    def ended_with_error(self) -> bool:
        return self.lines[-1] == "data: [DONE]" and '"error"' in self.lines[-2]


def test_drain_lets_a_stream_end(smollm2_gguf: Path, tmp_path: Path) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *SMALL) as server:
        stream = Stream(server, 60)
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 1, server, 20)
        core = server.core_pid()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=10)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert server.process.wait(30) == 0
        stream.join(5)
        assert stream.ended_well
        assert not Path(f"/proc/{core}").exists()


def test_a_dead_core_costs_its_requests_and_not_the_service(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *SMALL) as server:
        streams = [Stream(server, 900) for _ in range(3)]
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 3, server, 20)
        os.kill(server.core_pid(), signal.SIGKILL)
        assert wait_for(lambda: server.get("/health/live").status_code == 503, server, 5) < 2
        for stream in streams:
            stream.join(5)
            assert stream.ended_with_error
        wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}, timeout=30)
        assert answer.status_code == 200
        assert server.gauge("vllm:num_requests_running") == 0


def test_a_paused_core_is_a_stall_and_no_loss(smollm2_gguf: Path, tmp_path: Path) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *SMALL) as server:
        stream = Stream(server, 200)
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 1, server, 20)
        core = server.core_pid()
        os.kill(core, signal.SIGSTOP)
        try:
            wait_for(lambda: server.get("/health/ready").status_code == 503, server, 15)
            assert server.get("/health/live").status_code == 200
        finally:
            os.kill(core, signal.SIGCONT)
        wait_for(lambda: server.get("/health/ready").status_code == 200, server, 10)
        stream.join(60)
        assert stream.ended_well


def test_children_end_with_their_parent(smollm2_gguf: Path, tmp_path: Path) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *SMALL) as server:
        core = server.core_pid()
        server.process.kill()
        server.process.wait()
        start = time.monotonic()
        while _runs(core) and time.monotonic() - start < 5:
            time.sleep(0.05)
        assert not _runs(core)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def start_fails(*arguments: str) -> str:
    """What a start that must fail says; it must exit with 1."""
    command = [sys.executable, "-m", "octavo", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_starts_that_cannot_work_say_why(smollm2_gguf: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(smollm2_gguf.read_bytes()[:50_000_000])
    assert "cut.gguf" in start_fails(str(cut), "--port", "0")
    assert str(tmp_path / "none") in start_fails(str(tmp_path / "none"), "--port", "0")
    model = str(smollm2_gguf)
    assert "block" in start_fails(model, "--port", "0", "--block-size", "0")
    message = start_fails(model, "--port", "0", "--num-gpu-blocks-override", "4")
    assert "max_model_len" in message or "max-model-len" in message


def test_a_mismatched_folder_names_the_tensors(smollm2_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(smollm2_folder, folder)
    config = folder / "config.json"
    text = config.read_text()
    assert '"intermediate_size": 1536' in text
    config.write_text(text.replace('"intermediate_size": 1536', '"intermediate_size": 1600'))
    assert "mlp" in start_fails(str(folder), "--port", "0")


def test_a_taken_port_is_named(server: RunningServer, smollm2_gguf: Path) -> None:
    port = server.url.rpartition(":")[2]
    assert port in start_fails(str(smollm2_gguf), "--host", "127.0.0.1", "--port", port)


def test_a_full_queue_refuses_and_a_deadline_ends(smollm2_gguf: Path, tmp_path: Path) -> None:
    tight = ("--max-num-seqs", "1", "--max-num-queued-reqs", "1", "--api-key", "sk-test")
    blocks = ("--max-model-len", "1024", "--num-gpu-blocks-override", "128")
    key = {"authorization": "Bearer sk-test"}
    with serving(smollm2_gguf, tmp_path / "log", *tight, *blocks, wait=False) as server:
        wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json={"prompt": "x"}).status_code == 401
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        body = {"prompt": "x", "max_tokens": 600, "ignore_eos": True}
        with (
            httpx.Client(headers=key, timeout=60) as client,
            client.stream("POST", url, json={**body, "stream": True}) as running,
        ):
            lines = running.iter_lines()  # kept, for a closed iterator closes the stream
            next(lines)
            late = httpx.post(
                url, json=body, headers={**key, "X-Request-Deadline-Ms": "300"}, timeout=30
            )
            assert late.status_code == 504
            waiting = threading.Thread(
                target=lambda: httpx.post(url, json=body, headers=key, timeout=60), daemon=True
            )
            waiting.start()
            gauge = re.compile(r"^vllm:num_requests_waiting{.*} 1.0$", re.MULTILINE)
            wait_for(lambda: gauge.search(client.get(f"{server.url}/metrics").text), server, 10)
            refused = client.post(url, json=body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"


def test_a_core_that_dies_while_it_starts_again_is_started_again(
    smollm2_gguf: Path, tmp_path: Path
) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *SMALL) as server:
        first = server.core_pid()
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server.core_pid() != first, server, 10)
        os.kill(server.core_pid(), signal.SIGKILL)
        wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        assert server.gauge("octavo:core_deaths_total") == 2


def test_a_drain_without_time_ends_at_once(smollm2_gguf: Path, tmp_path: Path) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *SMALL, "--shutdown-timeout", "0") as server:
        stream = Stream(server, 900)
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 1, server, 20)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(4) == 0
        stream.join(5)
        assert stream.ended_with_error
