"""A Ray cluster of two network namespaces: hosts with addresses and interfaces of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.model]
HOSTS = {"octavo-a": "10.231.7.1", "octavo-b": "10.231.7.2"}
PORT = 6399
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "c" * 64,
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Two namespaces with a cable between them; nothing else is reached from either."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("namespaces need root and iproute2")
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    (first, _), (second, _) = HOSTS.items()
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        ip("link", "add", "cable-a", "netns", first, "type", "veth")
        ip("-n", first, "link", "show")
    except subprocess.CalledProcessError:
        for name in HOSTS:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        pytest.skip("namespaces are not permitted here")
    try:
        ip("-n", first, "link", "del", "cable-a")
        ip(
            *("link", "add", "cable-a", "netns", first, "type", "veth"),
            *("peer", "name", "cable-b", "netns", second),
        )
        for (name, address), cable in zip(HOSTS.items(), ("cable-a", "cable-b"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in HOSTS:
            ip("netns", "del", name)


@contextlib.contextmanager
def raylet(name: str, folder: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    words = [str(Path(sys.executable).parent / "ray"), "start", "--num-cpus", "1", "--block"]
    words += ["--node-ip-address", HOSTS[name], *more]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *words], stdout=log, stderr=log, env=ENVIRONMENT
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()


def run(words: list[str], name: str = "") -> dict[str, list[object]]:
    prefix = ["ip", "netns", "exec", name] if name else []
    command = [*prefix, sys.executable, "-m", "tests.parallel.hosts_program", *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def test_stages_on_two_hosts(hosts: None, smollm2_gguf: Path, tmp_path: Path) -> None:
    first, second = HOSTS
    address = f"{HOSTS[first]}:{PORT}"
    expected = run([str(smollm2_gguf), "alone"])["tokens"]
    head = ("--head", "--port", str(PORT), "--include-dashboard", "false")
    with raylet(first, tmp_path, *head):
        time.sleep(5)
        with raylet(second, tmp_path, "--address", address):
            time.sleep(5)
            found = run([str(smollm2_gguf), address], first)
    assert found["tokens"] == expected
    assert any("2 stages" in str(note) for note in found["notes"])
