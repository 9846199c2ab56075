"""Mutated requests: never a 5xx, never a hang, never a harmed engine, and always an answer in form.

504 is no fault of the server: it is the answer to a deadline that the request itself carries.
"""

from __future__ import annotations

import asyncio
import http.client
import random
import socket
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import unquote

import httpx
import pytest

from octavo.server.app import ROUTES, create_app
from tests.cases.client import COMPLETIONS, Box, strict
from tests.hostile.mutations import CHAT, Sent, mutated, routes_of
from tests.server.asgi import Exchange, call
from tests.server.fake_engine import FakeEngine

IN_PROCESS, LIVE = 400, 5000
DEADLINE = 3.0  # seconds that each live request gives itself
MOST_FAULTS = 10  # after which an attacker gives up
PATIENCE = 20.0  # and in which an answer must be there, whatever a busy machine does


def judge(sent: Sent, status: int, headers: dict[str, str], body: bytes) -> None:
    """The answer is one that a caller can rely on."""
    where = f"{sent}\n-> {status} {body[:500]!r}"
    assert status == 200 or 400 <= status < 500 or status == 504, where
    assert b"Traceback" not in body, where
    assert b" object at 0x" not in body, where
    if sent.method == "HEAD" or not body:
        return
    kind = headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        done = sent.target.startswith((CHAT, COMPLETIONS))  # other protocols end otherwise
        closing = b"data: [DONE]\n\n" if done else b"\n\n"
        assert body.endswith(closing), where
        assert b"Internal server error" not in body, where
        for line in body.decode().split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                strict(line.removeprefix("data: "))
    elif kind.startswith("application/json"):
        answer = strict(body)
        if status != 200:
            check_error(answer, status, where)


def check_error(answer: object, status: int, where: str) -> None:
    assert isinstance(answer, dict), where
    error = answer.get("error")
    if isinstance(error, str):  # KServe's form
        assert 0 < len(error) < 1000, where
        return
    assert set(error) == {"message", "type", "param", "code"}, where
    assert error["code"] == status, where
    assert 0 < len(error["message"]) < 1000, where


async def test_in_process() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    engine = FakeEngine()
    app = create_app(engine)
    routes = routes_of(ROUTES, engine.model_names[0])
    before = (await call(app, "POST", COMPLETIONS, {"prompt": "The owls"})).json["choices"]

    async def one(sent: Sent) -> int:
        # As HTTP would hand them over: a decoded path, headers as bytes in latin-1.
        headers = [(name, value.encode().decode("latin-1")) for name, value in sent.headers]
        path, _, query = sent.target.partition("?")
        exchange = Exchange(
            app, sent.method, f"{unquote(path)}?{query}", body=sent.body, headers=headers
        )
        reply = await exchange.end()
        judge(sent, reply.status, reply.headers, reply.body)
        return reply.status

    statuses: Counter[int] = Counter()
    for _ in range(IN_PROCESS // 10):
        sent = [mutated(dice, routes, ()) for _ in range(10)]
        statuses.update(await asyncio.gather(*map(one, sent)))
    print(statuses)
    assert statuses[200] > IN_PROCESS // 50, "nothing gets through: the good requests are not good"
    assert statuses[400] > IN_PROCESS // 4
    assert engine.running == 0
    after = (await call(app, "POST", COMPLETIONS, {"prompt": "The owls"})).json["choices"]
    assert after == before


def exchange(box: Box, sent: Sent) -> tuple[int, dict[str, str], bytes]:
    """The answer to these very bytes."""
    address = httpx.URL(box.url)
    lines = [f"{sent.method} {sent.target} HTTP/1.1", "Host: x", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in sent.headers]
    lines += [f"Content-Length: {len(sent.body)}", "", ""]
    place = (address.host, address.port or 80)
    with socket.create_connection(place, timeout=PATIENCE) as connection:
        connection.sendall("\r\n".join(lines).encode() + sent.body)
        reply = http.client.HTTPResponse(connection, method=sent.method)
        reply.begin()
        headers = {name.lower(): value for name, value in reply.getheaders()}
        return reply.status, headers, reply.read()


class Good(threading.Thread):
    """A good stream again and again; each must be answered as the first was."""

    def __init__(self, box: Box) -> None:
        super().__init__(daemon=True)
        self.box, self.over = box, threading.Event()
        self.answers = [self._ask()]
        self.start()

    def _ask(self) -> str:
        body = {"prompt": "Far away", "max_tokens": 20, "ignore_eos": True, "seed": 3}
        return self.box.stream(COMPLETIONS, body).text()

    def run(self) -> None:
        while not self.over.is_set():
            self.answers.append(self._ask())
            time.sleep(0.1)


@dataclass
class Found:
    """What one attacker saw; a fault does not end the attack, for there may be others."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


def attack(box: Box, seed: int, worker: int, count: int) -> Found:
    dice = random.Random(f"{seed}-{worker}")
    deadline = (("X-Request-Deadline-Ms", str(int(DEADLINE * 1000))),)
    routes = routes_of(ROUTES, "small")
    found = Found()
    for number in range(count):
        sent = mutated(dice, routes, deadline)
        started = time.monotonic()
        try:
            status, headers, body = exchange(box, sent)
            found.statuses[status] += 1
            judge(sent, status, headers, body)
        except (OSError, http.client.HTTPException, AssertionError) as error:
            found.faults.append(f"worker {worker}, request {number}: {error!r}\n{sent}")
            if len(found.faults) >= MOST_FAULTS:
                break
        found.slowest = max(found.slowest, time.monotonic() - started)
    return found


def touch_the_pool(box: Box) -> None:
    """Uses every page of the KV pool, which has no memory until it is used."""
    dice = random.Random(0)
    prompts = [[dice.randrange(300, 40_000) for _ in range(240)] for _ in range(16)]
    assert box.complete(prompts, max_tokens=2, ignore_eos=True)["choices"]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3000)
def test_live(target: Box) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    touch_the_pool(target)
    target.check_alive()
    core, memory = target.server.core_pid(), target.memory()
    beside = Good(target)
    workers = 6
    with ThreadPoolExecutor(workers) as pool:
        share = partial(attack, target, seed, count=-(-LIVE // workers))
        found = list(pool.map(share, range(workers)))
    beside.over.set()
    beside.join(60)
    statuses = sum((one.statuses for one in found), Counter[int]())
    print("memory grew by", (target.memory() - memory) // 2**20, "MiB")
    print(statuses, "slowest", max(one.slowest for one in found), "good", len(beside.answers))
    faults = [fault for one in found for fault in one.faults]
    assert not faults, "\n\n".join(faults)
    assert len(set(beside.answers)) == 1, "a good stream was harmed"
    assert target.server.core_pid() == core, "the engine was restarted"
    target.check_alive()
    assert target.memory() - memory < 100 * 2**20
    log = target.server.log.read_text(errors="replace")
    assert "Traceback" not in log, log[-3000:]
    assert "unexpected_error" not in log, log[-3000:]
