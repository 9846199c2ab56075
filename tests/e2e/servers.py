"""Starts real `octavo serve` processes for tests, and finds what belongs to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 120


@dataclass(slots=True)
class RunningServer:
    """A server process, its address, and its log."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def gauge(self, name: str) -> float:
        """The sum of all samples of a metric."""
        text = self.get("/metrics").text
        samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"{name} is not in /metrics"
        return sum(map(float, samples))

    def core_pid(self) -> int:
        """The process of the engine core."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if b"octavo.core" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        raise LookupError("the server has no engine core")


@contextlib.contextmanager
def serving(model: Path, log: Path, *flags: str, wait: bool = True) -> Iterator[RunningServer]:
    """A server on a free port, ended when the block is left."""
    command = [sys.executable, "-m", "octavo", "serve", str(model), "--host", "127.0.0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", "0", *flags], stdout=out, stderr=out, env=environment
        )
    try:
        server = RunningServer(process, _address(process, log), log)
        if wait:
            wait_for(lambda: server.get("/health/ready").status_code == 200, server)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(condition, server: RunningServer, seconds: float = START_SECONDS) -> float:
    """Polls until the condition holds; the seconds it took."""
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        with contextlib.suppress(httpx.HTTPError, LookupError):
            if condition():
                return time.monotonic() - start
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s; log:\n{server.log.read_text()[-3000:]}")


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    start = time.monotonic()
    while time.monotonic() - start < START_SECONDS:
        found = re.search(r"event=listening address=(\S+)", log.read_text())
        if found:
            return found.group(1)
        if process.poll() is not None:
            raise AssertionError(f"exit code {process.returncode}:\n{log.read_text()}")
        time.sleep(0.05)
    raise AssertionError(f"the server does not listen:\n{log.read_text()}")
