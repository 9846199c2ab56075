"""What a running server shows to others on its machine: ports, sockets, files, logs, processes."""

from __future__ import annotations

import os
import pickle
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.cases.client import CHAT, COMPLETIONS, Box
from tests.e2e.servers import serving, wait_for

pytestmark = pytest.mark.model
KEY = f"sk-{secrets.token_hex(12)}"
LISTENING = "0A"  # state in /proc/net/tcp


@pytest.fixture(scope="module")
def locked(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    flags = ("--max-model-len", "256", "--num-gpu-blocks-override", "64", "--api-key", KEY)
    log = tmp_path_factory.mktemp("locked") / "log"
    with serving(smollm2_gguf, log, *flags, "--served-model-name", "small") as server:
        yield Box(server, KEY)


def descendants(pid: int) -> list[int]:
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += descendants(child)
    return found


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """(address in hex, port) of every TCP socket on which these processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            except FileNotFoundError:
                continue
            if found:
                inodes.add(found.group(1))
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                sockets.add((address, int(port, 16)))
    return sockets


def folders(box: Box) -> list[Path]:
    """The folders with the sockets of this server's core, by the sockets that it holds."""
    fds = Path(f"/proc/{box.server.process.pid}/fd")
    held = {os.readlink(link) for link in fds.iterdir() if link.is_symlink()}
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and f"socket:[{fields[6]}]" in held:
            path = Path(fields[7])
            if path.name.startswith("to-core"):
                found.add(path.parent)
    return sorted(found)


def test_one_port_and_that_on_loopback(locked: Box) -> None:
    port = int(locked.url.rpartition(":")[2])
    assert listening(descendants(locked.server.process.pid)) == {("0100007F", port)}


def test_the_engine_s_sockets_are_private(locked: Box) -> None:
    (folder,) = folders(locked)
    mode = folder.stat()
    assert stat.S_IMODE(mode.st_mode) == 0o700
    assert mode.st_uid == os.geteuid()
    for entry in folder.iterdir():
        found = entry.stat()
        if entry.name == "lock":  # says that the folder's owner lives
            assert (found.st_mode & 0o777, found.st_size) == (0o600, 0)
        else:
            assert stat.S_ISSOCK(found.st_mode), entry


class Bomb:
    """Creates a file when somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.slow
def test_pickles_and_noise_on_the_sockets_are_not_run(locked: Box, tmp_path: Path) -> None:
    """Only this user can write there; what is no record ends the core, and a new one serves."""
    target = tmp_path / "ran"
    context = zmq.Context()
    messages = [pickle.dumps(Bomb(target)), secrets.token_bytes(200), b"", b"\x80\x04."]
    for message in messages[:2]:
        (folder,) = folders(locked)
        before = locked.server.core_pid()
        sender = context.socket(zmq.PUSH)
        sender.linger = 1000
        (address,) = folder.glob("from-core*")
        sender.connect(f"ipc://{address}")
        sender.send(message)
        sender.close()
        wait_for(lambda before=before: locked.server.core_pid() != before, locked.server, 20)
        wait_for(
            lambda: locked.http.get("/health/ready").status_code == 200, locked.server, seconds=60
        )
        assert locked.complete("One", max_tokens=1)["choices"]
    context.destroy(linger=0)
    assert not target.exists()


def test_keys_and_prompts_are_in_no_log(locked: Box) -> None:
    secret = f"my-secret-{secrets.token_hex(6)}"
    messages = [{"role": "user", "content": secret}]
    locked.ask(CHAT, {"messages": messages, "max_tokens": 2, "user": secret})
    locked.post(CHAT, {"messages": messages, "temperature": secret})
    locked.post(COMPLETIONS, {"prompt": secret, secret: 1})
    locked.http.get(f"/{secret}")
    locked.post(COMPLETIONS, {"prompt": secret}, headers={"Authorization": f"Bearer {secret}"})
    time.sleep(0.3)
    log = locked.server.log.read_text(errors="replace")
    assert "event=ready" in log
    assert KEY not in log
    assert secret not in log
    for path in ("/metrics", "/server_info", "/load", "/version", "/openapi.json", "/v1/models"):
        text = locked.http.get(path).text
        assert KEY not in text, path
        assert secret not in text, path
    assert "(set)" in locked.http.get("/server_info").text


def test_the_core_does_not_know_the_key(locked: Box) -> None:
    core = locked.server.core_pid()
    assert KEY.encode() not in Path(f"/proc/{core}/cmdline").read_bytes()
    assert KEY.encode() not in Path(f"/proc/{core}/environ").read_bytes()


def test_two_tenants_share_no_cached_tokens(locked: Box) -> None:
    """A salt of one's own: nobody learns from speed whether another has sent the same text."""
    prompt = [300 + secrets.randbelow(40_000) for _ in range(100)]
    seen = []
    for salt in ("a", "a", "b", "b", None, "a"):
        usage = locked.complete(prompt, max_tokens=1, cache_salt=salt)["usage"]
        seen.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert seen == [0, 96, 0, 96, 0, 96]
