"""Several API processes before one core: one port, one set of metrics, losses kept apart."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from octavo import fleet as fleet_module
from octavo.engine.process import Owners
from octavo.errors import ConfigError
from octavo.hub import Link
from octavo.obs.merge import families_of, merge, only_sums, registry_of, snapshot
from octavo.obs.metrics import Metrics
from octavo.options import ServerArgs
from octavo.server.run import Listen, bind, reserve
from octavo.types import SequenceOutput, StepOutputs, StepStats
from tests.e2e.servers import RunningServer, serving, wait_for


def children(pid: int, program: str) -> set[int]:
    """Processes that a process has started as `python -m program`."""
    found = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if program.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            found.add(int(child))
    return found


def ask(server: RunningServer, tokens: int, **fields: object) -> httpx.Response:
    """On a connection of its own, which any process may get."""
    body = {"prompt": "The", "max_tokens": tokens, "ignore_eos": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)


def in_background(
    server: RunningServer, number: int
) -> tuple[list[object], list[threading.Thread]]:
    ends: list[object] = []

    def one() -> None:
        try:
            ends.append(ask(server, 250).status_code)
        except httpx.HTTPError as error:
            ends.append(type(error))

    threads = [threading.Thread(target=one) for _ in range(number)]
    for thread in threads:
        thread.start()
    return ends, threads


@pytest.mark.model
def test_a_server_of_two_processes(smollm2_gguf: Path, tmp_path: Path) -> None:
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "640", "--max-num-seqs", "8")
    with serving(smollm2_gguf, tmp_path / "log", *flags, "--api-server-count", "2") as server:
        main = server.process.pid
        number = random.randint(6, 12)
        made = [ask(server, 3).json() for _ in range(number)]
        # Every process says the same, whichever served.
        for _ in range(6):
            assert server.gauge("vllm:request_success_total") == number
            assert server.gauge("vllm:generation_tokens_total") == 3 * number
            assert server.get("/load").json() == {"server_load": 0}
            shown = server.get(f"/v1/requests/{made[0]['id']}/timeline")
            assert shown.json()["id"] == made[0]["id"]
        assert server.get("/v1/requests/nobody/timeline").status_code == 404

        # One dies with its streams: they are ended in the core, and it is started anew.
        ends, threads = in_background(server, 8)
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 8, server)
        victim = min(children(main, "octavo.api"))
        os.kill(victim, signal.SIGKILL)
        for thread in threads:
            thread.join()
        lost = [end for end in ends if end != 200]
        assert set(lost) <= {httpx.RemoteProtocolError, httpx.ReadError}
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 0, server)
        wait_for(lambda: len(children(main, "octavo.api") - {victim}) == 2, server)
        served = number + 8 - len(lost)
        wait_for(lambda: server.gauge("vllm:request_success_total") == served, server)

        # The core dies: all streams end with an error, and both processes find the next core.
        ends, threads = in_background(server, 4)
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 4, server)
        os.kill(children(main, "octavo.core").pop(), signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert ends == [503] * 4
        wait_for(lambda: all(ask(server, 1).status_code == 200 for _ in range(6)), server)

        # A drain lets what runs come to its end.
        finished: list[object] = []
        worker = threading.Thread(target=lambda: finished.append(ask(server, 60).status_code))
        worker.start()
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 1, server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        worker.join()
        assert finished == [200]


@pytest.mark.model
def test_the_end_of_the_server_s_own_process_is_told(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Nobody drains then, but what is cut says so, and nothing is left behind."""
    flags = ("--max-model-len", "1024", "--num-gpu-blocks-override", "640", "--max-num-seqs", "8")
    log = tmp_path / "log"
    with serving(smollm2_gguf, log, *flags, "--api-server-count", "2") as server:
        main = server.process.pid
        left = children(main, "octavo.api") | children(main, "octavo.core")
        answers: list[httpx.Response] = []

        def one(stream: bool) -> None:
            answers.append(ask(server, 900, stream=stream))

        threads = [threading.Thread(target=one, args=(bool(n % 2),)) for n in range(6)]
        for thread in threads:
            thread.start()
        wait_for(lambda: server.gauge("vllm:num_requests_running") == 6, server)
        os.kill(main, signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        server.process.wait()
        assert len(answers) == 6
        for answer in answers:
            if answer.headers["content-type"].startswith("text/event-stream"):
                assert answer.status_code == 200
                event = next(line for line in answer.text.splitlines() if '"error"' in line)
                error = json.loads(event.removeprefix("data: "))["error"]
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                error = answer.json()["error"]
                assert answer.status_code == 503
            assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        end = time.monotonic() + 20
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in left):
            assert time.monotonic() < end, "a process was left behind"
            time.sleep(0.1)
        assert "Traceback" not in log.read_text()


class Kept:
    """Where an outbox stands."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, StepOutputs]] = []

    def send(self, message: StepOutputs, client: int = 0) -> None:
        self.sent.append((client, message))


def test_news_goes_to_its_owner_and_figures_to_the_server() -> None:
    seed = random.randrange(2**32)
    dice, kept = random.Random(seed), Kept()
    owners = Owners(kept)  # type: ignore[arg-type]
    clients = {f"{number}": dice.randint(1, 4) for number in range(40)}
    for name, client in clients.items():
        owners.add(name, client)
    gone = dice.randint(1, 4)
    assert sorted(owners.forget(gone)) == sorted(n for n, c in clients.items() if c == gone)
    ended = set(dice.sample(sorted(clients), 10))
    outputs = [SequenceOutput(n, [7], "stop" if n in ended else None) for n in clients]
    owners.send(StepOutputs(outputs, StepStats(running=40)))
    heard = {output.id: client for client, message in kept.sent for output in message.outputs}
    assert heard == {n: c for n, c in clients.items() if c != gone}, f"seed {seed}"
    assert [message.stats.running for client, message in kept.sent if client == 0] == [40]
    assert len(owners) == sum(n not in ended and c != gone for n, c in clients.items())


def test_merged_metrics_are_the_sum() -> None:
    registries = []
    for number in range(3):
        registry = CollectorRegistry()
        counter = Counter("made", "m", ["kind"], registry=registry)
        counter.labels("a").inc(number + 1)
        counter.labels(f"own{number}").inc()
        Gauge("state", "s", registry=registry).set(number)
        Histogram("took", "t", buckets=[1, 2], registry=registry).observe(number)
        Gauge("facts_info", "f", ["x"], registry=registry).labels("1").set(1)
        registries.append(registry)
    merged = merge([snapshot(registry) for registry in registries])
    values = {
        (name, dict(labels).get("kind") or dict(labels).get("le")): value
        for family in merged
        for name, labels, value in family.samples
        if not name.endswith("_created")
    }
    assert values["made_total", "a"] == 6
    assert values["made_total", "own2"] == 1
    assert values["state", None] == 3
    assert values["facts_info", None] == 1
    assert [values["took_bucket", edge] for edge in ("1.0", "2.0", "+Inf")] == [2, 3, 3]
    assert values["took_sum", None] == 3
    assert {family.name for family in only_sums(merged)} == {"made", "took"}
    assert {metric.name for metric in registry_of(merged).collect()} >= {"made", "state", "took"}


def test_merged_metrics_are_written_like_those_of_one() -> None:
    first, second = (Metrics("m", max_model_len=64) for _ in range(2))
    first.step(StepStats(running=3, sampled_tokens=2))
    second.token_gap(0.02, 5)

    packed = [families_of(msgspec.msgpack.encode(one.snapshot())) for one in (first, second)]
    alone = {f.name: f.type for f in text_string_to_metric_families(first.render()[0].decode())}
    body = first.render_merged(packed)[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert {name: family.type for name, family in families.items()} == alone
    (running,) = families["vllm:num_requests_running"].samples
    assert running.value == 3
    counts = [
        s.value for s in families["vllm:inter_token_latency_seconds"].samples if "_count" in s.name
    ]
    assert counts == [5]


def test_a_reserved_port_is_ours_and_shared_by_our_own_only() -> None:
    with reserve(Listen(host="127.0.0.1", port=0)) as held:
        port = held.getsockname()[1]
        mine = [bind(Listen(host="127.0.0.1", port=port, shared=True)) for _ in range(2)]
        with pytest.raises(ConfigError, match=f"--port {port} is taken"):
            reserve(Listen(host="127.0.0.1", port=port))
        with pytest.raises(ConfigError, match="is taken"):
            bind(Listen(host="127.0.0.1", port=port))
        for one in mine:
            one.close()


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ConfigError, match="--port"):
        ServerArgs(api_server_count=2, uds="/tmp/x").check()
    with pytest.raises(ConfigError, match="api_server_count"):
        ServerArgs(api_server_count=0).check()
    ServerArgs(api_server_count=3).check()


async def test_a_process_that_cannot_be_started_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fleet_module, "PROGRAM", (str(tmp_path / "nothing"),))
    fleet = fleet_module.Fleet(1, Metrics("m", max_model_len=64))
    fleet.open()
    folder = Path(fleet.hub).parent
    try:
        await fleet.start([b"{}"])
        error = await asyncio.wait_for(fleet.failure, 10)
        assert "API process 1 cannot be started" in error.message
    finally:
        await fleet.stop()
    assert not folder.exists()


HANGING = """
import asyncio, faulthandler, os, signal, sys, time
from octavo.hub import Hello, Link, Listening
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
hub, folder = sys.stdin.read().split()

def stands_still():
    time.sleep(60)

async def answer(op, to):
    return [b""]

async def main():
    reader, writer = await asyncio.open_unix_connection(hub)
    link = Link(reader, writer, answer)
    link.send(Hello(1))
    link.send(Listening("here"))
    first = not os.path.exists(folder + "/first")
    open(folder + "/first", "w").close()
    if first:
        asyncio.get_running_loop().call_later(1.0, stands_still)
    async for _ in link.messages():
        pass

asyncio.run(main())
"""


async def test_a_process_that_hangs_is_ended_and_started_anew(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fleet_module, "PROGRAM", (sys.executable, "-c", HANGING))
    monkeypatch.setattr(fleet_module, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(fleet_module, "HANG_SECONDS", 2.0)
    fleet = fleet_module.Fleet(1, Metrics("m", max_model_len=64))
    fleet.open()
    try:
        await fleet.start([f"{fleet.hub} {tmp_path}".encode()])
        (member,) = fleet._members
        await asyncio.wait_for(fleet.listening(), 20)
        assert member.process is not None
        hung = member.process.pid
        async with asyncio.timeout(30):
            while member.process.pid == hung or member.link is None:
                await asyncio.sleep(0.05)
        again = member.process.pid
        await asyncio.sleep(3)
        assert member.process.pid == again, "one that answers is left alone"
        assert not fleet.failure.done()
        assert "event=api_process_hangs index=1" in caplog.text
        assert "stands_still" in capfd.readouterr().err
    finally:
        await fleet.stop()


async def test_a_question_that_fails_is_answered(tmp_path: Path) -> None:
    """Who asks must not wait for an answer that does not come."""

    async def fails(op: str, to: int) -> list[bytes]:
        raise ZeroDivisionError(op)

    async def hear(link: Link) -> None:
        async for _ in link.messages():
            pass

    hearing: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hearing.append(asyncio.create_task(hear(Link(reader, writer, fails))))

    path = str(tmp_path / "hub")
    server = await asyncio.start_unix_server(accept, path)
    link = Link(*await asyncio.open_unix_connection(path), fails)
    hearing.append(asyncio.create_task(hear(link)))
    assert await link.ask("anything", 5) == []
    link.close()
    server.close()
    await asyncio.gather(*hearing)
