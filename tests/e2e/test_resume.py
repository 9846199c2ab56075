"""A real server: streams are cut anywhere and go on, through one API process and through two."""

from __future__ import annotations

import http.client
import json
import random
import re
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import RunningServer, serving

pytestmark = pytest.mark.model
FLAGS = ("--max-model-len", "512", "--num-gpu-blocks-override", "200", "--max-num-seqs", "4")
TOKENS = 40
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "The owl sat in the old tree and", "max_tokens": TOKENS},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Tell a story of an owl."}],
        "max_tokens": TOKENS,
        "logprobs": True,
    },
    "/v1/responses": {"input": "Tell a story of an owl.", "max_output_tokens": TOKENS},
}


class Call:
    """One request on a connection of its own, which can be broken at any byte."""

    def __init__(
        self, server: RunningServer, method: str, path: str, *, body: Any = None, **headers: str
    ) -> None:
        host, port = server.url.removeprefix("http://").split(":")
        self._connection = http.client.HTTPConnection(host, int(port), timeout=60)
        data = None if body is None else json.dumps(body)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        self._connection.request(method, path, data, {"Content-Type": "application/json", **sent})
        self.response = self._connection.getresponse()

    def some(self, size: int) -> bytes:
        """That many bytes, or fewer at the end; then the connection is reset."""
        data = b""
        while len(data) < size and (more := self.response.read1(size - len(data))):
            data += more
        self._connection.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", random.randint(0, 1), 0)
        )
        self._connection.close()
        self.response.close()
        return data

    def all(self) -> bytes:
        """Everything to the end, which must be a clean one."""
        data = self.response.read()
        self._connection.close()
        return data


def events(data: bytes) -> bytes:
    """Without the last event, if it is not whole."""
    return data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""


def text_of(data: bytes) -> str:
    found = []
    for line in re.findall(rb"^data: (\{.*\})$", data, re.MULTILINE):
        event = json.loads(line)
        if "choices" in event:
            choice = event["choices"][0]
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        elif event["type"] == "response.output_text.delta":
            found.append(event["delta"])
    return "".join(found)


def cut_and_joined(server: RunningServer, path: str, dice: random.Random) -> bytes:
    """The events of one request, over as many connections as it takes."""
    body = {**BODIES[path], "temperature": 0, "ignore_eos": True, "stream": True}
    call = Call(server, "POST", path, body=body, X_Octavo_Resume="20")
    assert call.response.status == 200, call.response.read()
    data = events(call.some(dice.randint(1500, 6000)))
    while True:
        id = re.findall(rb"^id: (.*)$", data, re.MULTILINE)[-1].decode()
        time.sleep(dice.choice((0, 0, 0.05, 0.2)))
        resumed = f"/v1/requests/{id.split(':')[0]}/stream"
        if dice.random() < 0.3:
            call = Call(server, "POST", path, body=body, Last_Event_ID=id, X_Octavo_Resume="20")
        else:
            call = Call(server, "GET", resumed, Last_Event_ID=id)
        if call.response.status == 204:
            return data
        assert call.response.status == 200, call.response.read()
        assert call.response.headers["X-Octavo-Resume"] == "20"
        data += events(call.some(dice.randint(1, 6000)))


def check(server: RunningServer, rounds: int) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    for path in BODIES:
        body = {**BODIES[path], "temperature": 0, "ignore_eos": True, "stream": True}
        plain = Call(server, "POST", path, body=body).all()
        assert b"\nid: " not in plain
        for _ in range(rounds):
            joined = cut_and_joined(server, path, dice)
            numbers = [int(number) for number in re.findall(rb"^id: .*:(\d+)$", joined, re.M)]
            assert numbers == list(range(1, len(numbers) + 1))
            name = re.findall(rb"^id: (.*):\d+$", joined, re.MULTILINE)[0].decode()
            resumed = f"/v1/requests/{name.split(':')[0]}/stream"
            whole = Call(server, "GET", resumed, Last_Event_ID=f"{name}:0").all()
            assert joined == whole
            assert text_of(joined) == text_of(plain) != ""
    assert server.gauge("vllm:num_requests_running") == 0


def test_streams_go_on_and_drains_wait_for_them(smollm2_gguf: Path, tmp_path: Path) -> None:
    with serving(smollm2_gguf, tmp_path / "log", *FLAGS, "--max-held-streams", "32") as server:
        check(server, 2)
        body = {**BODIES["/v1/completions"], "max_tokens": 300, "ignore_eos": True, "stream": True}
        # nobody comes back: the request is ended when its time is over
        Call(server, "POST", "/v1/completions", body=body, X_Octavo_Resume="1").some(900)
        assert server.gauge("vllm:num_requests_running") == 1
        time.sleep(1.2)
        assert server.gauge("vllm:num_requests_running") == 0
        # nobody said that he would: it is ended at once
        Call(server, "POST", "/v1/completions", body=body).some(900)
        time.sleep(0.3)
        assert server.gauge("vllm:num_requests_running") == 0
        call = Call(server, "POST", "/v1/completions", body=body, X_Octavo_Resume="20")
        data = events(call.some(900))
        assert server.gauge("octavo:streams_held") >= 1
        server.process.send_signal(signal.SIGTERM)
        id = re.findall(rb"^id: (.*)$", data, re.MULTILINE)[-1].decode()
        resumed = f"/v1/requests/{id.split(':')[0]}/stream"
        data += Call(server, "GET", resumed, Last_Event_ID=id).all()
        assert data.endswith(b"data: [DONE]\n\n")
        assert data.count(b'"finish_reason":"length"') == 1
        assert server.process.wait(30) == 0


def test_any_process_gives_the_rest(smollm2_gguf: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--api-server-count", "2")
    with serving(smollm2_gguf, tmp_path / "log", *flags) as server:
        check(server, 2)
        for _ in range(4):
            call = Call(server, "GET", "/v1/requests/nobody/stream", Last_Event_ID="nobody:a:1")
            assert call.response.status == 404
        assert "Traceback" not in server.log.read_text()
