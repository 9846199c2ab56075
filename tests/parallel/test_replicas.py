"""Several cores behind one client: which one a request goes to, and what one's death costs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.engine.client import Listener, Pulse
from octavo.errors import EngineDead, ServerError
from octavo.replicas import STEP, Prefixes, Replica, ReplicaClient, cheapest, digests_of
from octavo.types import AddRequest, SequenceOutput, TokenParams, WorkerInfo
from tests.e2e.servers import RunningServer, serving, wait_for
from tests.e2e.test_serve import Stream
from tests.parallel.crews import new_seed

SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", "128M", "--max-num-seqs", "8")


class Client:
    """A core that says what the test has it say."""

    def __init__(self) -> None:
        self.dead: EngineDead | None = None
        self.info: WorkerInfo | None = None
        self.pulse = Pulse("idle")
        self.ready = asyncio.Event()
        self.ready.set()
        self.given: dict[str, Listener] = {}
        self.aborted: list[str] = []

    def submit(self, requests: Sequence[AddRequest], listener: Listener) -> None:
        self.given |= {request.id: listener for request in requests}

    def abort(self, ids: Sequence[str]) -> None:
        self.aborted += ids

    async def control(self, op: str, **args: str) -> dict[str, str]:
        return {"op": op, **args}

    def cut(self, error: ServerError) -> None:
        for listener in set(self.given.values()):
            listener.fail(error)


class Supervisor:
    restarting = False

    def __init__(self) -> None:
        self.client = Client()


class Heard:
    def __init__(self) -> None:
        self.news: list[SequenceOutput] = []
        self.error: Exception | None = None

    def push(self, output: SequenceOutput) -> None:
        self.news.append(output)

    def fail(self, error: Exception) -> None:
        self.error = error


def some(count: int) -> tuple[ReplicaClient, list[Replica]]:
    replicas: list[Any] = [Replica(Supervisor()) for _ in range(count)]  # type: ignore[arg-type]
    return ReplicaClient(replicas), replicas


def request(name: str, prompt: Sequence[int], tokens: int = 10, salt: str = "") -> AddRequest:
    return AddRequest(name, list(prompt), TokenParams(max_tokens=tokens), 0.0, cache_salt=salt)


async def test_requests_go_where_the_least_is_to_be_done() -> None:
    client, replicas = some(3)
    for index, length in enumerate((50, 20, 30)):
        client.submit([request(str(index), range(length))], Heard())
    assert [one.outstanding for one in replicas] == [60, 30, 40]
    client.submit([request("3", range(5))], Heard())
    assert replicas[1].outstanding == 45
    replicas[1].supervisor.client.given["3"].push(SequenceOutput("3", [7]))
    assert replicas[1].outstanding == 39  # the prompt, and one token
    replicas[1].supervisor.client.given["3"].push(SequenceOutput("3", [8], "stop"))
    assert replicas[1].outstanding == 30
    client.abort(["0", "3", "unknown"])
    assert replicas[0].supervisor.client.aborted == ["0"]
    assert replicas[0].outstanding == 0
    assert client.num_open == 2


async def test_a_prompt_that_begins_alike_goes_to_the_same_core_if_that_is_sooner() -> None:
    rnd = random.Random(new_seed())
    client, replicas = some(2)
    common = [rnd.randrange(50_000) for _ in range(4 * STEP)]
    client.submit([request("a", [*common, 1])], heard := Heard())
    replicas[0].supervisor.client.given["a"].push(SequenceOutput("a", [1], "stop"))
    assert heard.news[0].reason == "stop"
    for name in "bcd":  # a whole other engine is idle, but this one has most of the prompt
        client.submit([request(name, [*common, 2, 3], 40)], Heard())
    assert [len(one.supervisor.client.given) for one in replicas] == [4, 0]
    client.submit([request("e", [*common, 2, 3], 40, salt="other")], Heard())
    assert "e" in replicas[1].supervisor.client.given
    client.submit([request("f", [*common, 4], 512)], Heard())
    client.submit([request("g", [*common, 4], 512)], Heard())
    assert "g" in replicas[1].supervisor.client.given


async def test_a_dead_core_costs_its_own_requests() -> None:
    client, replicas = some(2)
    first, second = Heard(), Heard()
    client.submit([request("a", range(9))], first)
    client.submit([request("b", range(9))], second)
    died = replicas[0].supervisor.client
    died.dead = EngineDead("gone")
    died.given["a"].fail(died.dead)
    assert isinstance(first.error, EngineDead)
    assert second.error is None
    assert replicas[0].outstanding == 0
    assert client.dead is None
    assert client.ready.is_set()
    client.submit([request("c", range(90))], Heard())
    assert "c" in replicas[1].supervisor.client.given
    replicas[1].supervisor.client.dead = EngineDead("gone too")
    assert client.dead is not None
    with pytest.raises(EngineDead):
        client.submit([request("d", range(9))], Heard())


async def test_operations_reach_all_cores() -> None:
    client, _ = some(2)
    assert await client.control("x") == {"op": "x", "0/op": "x", "1/op": "x"}
    client.submit([request("a", range(9))], heard := Heard())
    client.cut(ServerError("stop"))
    assert heard.error is not None
    assert client.num_open == 0


def test_prefixes_are_remembered_up_to_a_limit() -> None:
    prefixes = Prefixes(limit=3)
    long = digests_of(list(range(5 * STEP)), "")
    assert len(long) == 5
    assert digests_of(list(range(STEP - 1)), "") == []
    prefixes.note(long[:2], 1)
    assert prefixes.known(long) == {1: 2 * STEP}
    prefixes.note(long[:1], 2)
    assert prefixes.known(long) == {2: STEP, 1: 2 * STEP}
    prefixes.note(digests_of(list(range(1, 2 * STEP + 1)), ""), 3)
    assert prefixes.known(long) in ({2: STEP}, {})
    prefixes.forget(2)
    assert prefixes.known(long) == {}
    assert cheapest({0: 5, 1: 5}, {1: 3}) == 1


@pytest.mark.slow
@pytest.mark.model
def test_a_server_of_two_cores(smollm2_gguf: Path, tmp_path: Path) -> None:
    flags = ("--data-parallel-size", "2", "--dtype", "float32", *SMALL)
    with serving(smollm2_gguf, tmp_path / "log", *flags) as server:
        wait_for(lambda: server.log.read_text().count("event=ready") == 1, server)
        prompts = ["The river", "A market in winter", "Seven letters"]
        alone = [answer(server, prompt) for prompt in prompts]
        assert [answer(server, prompt) for prompt in reversed(prompts)] == alone[::-1]
        streams = [Stream(server, 300) for _ in range(4)]
        wait_for(lambda: engines_running(server) == {"0": 2.0, "1": 2.0}, server, 20)
        cores = core_pids(server)
        assert len(cores) == 2
        os.kill(cores[0], signal.SIGKILL)
        wait_for(lambda: sum(stream.is_alive() for stream in streams) <= 2, server, 10)
        assert server.get("/health/ready").status_code == 200
        assert answer(server, prompts[0]) == alone[0]
        for stream in streams:
            stream.join(60)
        assert sum(stream.ended_with_error for stream in streams) == 2
        assert sum(stream.ended_well for stream in streams) == 2
        wait_for(lambda: len(core_pids(server)) == 2, server, 20)


def answer(server: RunningServer, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 10, "temperature": 0}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def engines_running(server: RunningServer) -> dict[str, float]:
    found = {}
    for line in server.get("/metrics").text.splitlines():
        if line.startswith("vllm:num_requests_running{"):
            found[line.split('engine="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return found


def core_pids(server: RunningServer) -> list[int]:
    pid = server.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in map(int, children):
        if b"octavo.core" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(child)
    return found
