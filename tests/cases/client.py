"""Talks to a server as a stranger would: raw bodies, strict JSON, strict event streams.

Not for: starting servers (`tests/e2e/servers.py`).
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.servers import RunningServer

T = TypeVar("T")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
WORDS = [
    *("amber", "basket", "candle", "dragon", "ember", "falcon", "granite", "harbour", "island"),
    *("jacket", "kettle", "lantern", "meadow", "needle", "orchard", "pepper", "quarry", "ribbon"),
    *("saddle", "timber", "umbrella", "velvet", "walnut", "yogurt", "zephyr"),
]


def fresh(seed: int | None = None) -> tuple[random.Random, int]:
    """Dice and the seed that they were thrown with; print it on failure."""
    seed = random.randrange(2**31) if seed is None else seed
    print("seed", seed)
    return random.Random(seed), seed


def random_ids(dice: random.Random, count: int) -> list[int]:
    """Ids of ordinary tokens."""
    return [dice.randrange(300, 49_000) for _ in range(count)]


def prose(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def strict(data: bytes | str) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(data, parse_constant=refuse)


def together(jobs: Sequence[Callable[[], T]], workers: int = 8) -> list[T]:
    """The results of all jobs, so many at a time."""
    with ThreadPoolExecutor(workers) as pool:
        return [future.result(120) for future in [pool.submit(job) for job in jobs]]


@dataclass
class Events:
    """One stream that was read to its end."""

    status: int
    headers: httpx.Headers
    body: bytes
    times: list[float] = field(default_factory=list)  # of the arrival of each piece

    @property
    def all(self) -> list[Any]:
        """Parsed events after a check of the framing; the closing one is left out."""
        assert self.status == 200, self.body[:500]
        assert self.headers["content-type"].startswith("text/event-stream")
        blocks = self.body.split(b"\n\n")
        assert blocks[-1] == b"", "the body does not end with an event"
        assert blocks[-2] == b"data: [DONE]", blocks[-2][:300]
        assert self.body.count(b"[DONE]") == 1
        found = []
        for block in blocks[:-2]:
            assert block.startswith(b"data: "), block[:100]
            assert b"\n" not in block, block[:100]
            found.append(strict(block.removeprefix(b"data: ").decode("utf-8")))
        return found

    @property
    def usage(self) -> Any:
        return next(event["usage"] for event in reversed(self.all) if event.get("usage"))

    def pieces(self, index: int = 0) -> list[str]:
        """The texts of one choice, event by event."""
        found = []
        for event in self.all:
            for choice in event["choices"]:
                if choice["index"] == index:
                    found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return found

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces(index))

    def ending(self, index: int = 0) -> str:
        """The finish reason of one choice, of which there must be exactly one."""
        reasons = [
            choice["finish_reason"]
            for event in self.all
            for choice in event["choices"]
            if choice["index"] == index and choice["finish_reason"]
        ]
        assert len(reasons) == 1, (index, reasons)
        return str(reasons[0])

    def ids(self, index: int = 0) -> list[int]:
        """Token ids of one choice, if they were asked for."""
        return [
            token
            for event in self.all
            for choice in event["choices"]
            if choice["index"] == index
            for token in choice.get("token_ids") or ()
        ]


class Background(threading.Thread):
    """One stream, read in a thread of its own; `events` is set when it has ended."""

    def __init__(self, box: Box, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._box, self._path, self._body = box, path, body
        self.begun = threading.Event()
        self.result: Events | None = None
        self.times: list[float] = []
        self.start()

    def run(self) -> None:
        self.result = self._box.stream(
            self._path, self._body, times=self.times, on_piece=self.begun.set
        )

    @property
    def events(self) -> Events:
        self.join(120)
        assert self.result is not None, "the stream did not end"
        return self.result

    @property
    def largest_gap(self) -> float:
        """Seconds between two pieces that came one after the other."""
        return max(b - a for a, b in itertools.pairwise(self.times))


class Box:
    """A server, its name for the model, and its key."""

    def __init__(self, server: RunningServer, key: str | None = None) -> None:
        self.server = server
        self.url = server.url
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # No connection is used twice, so that what one test leaves behind cannot reach another.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=server.url, headers=headers, limits=limits, timeout=60, trust_env=False
        )

    # -- requests --

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """`body` goes as JSON; `content=` sends bytes as they are."""
        if "content" in more:
            headers = httpx.Headers(more.get("headers"))  # whose names have no case
            headers.setdefault("content-type", "application/json")
            more["headers"] = headers
            return self.http.post(path, **more)
        return self.http.post(path, json=body, **more)

    def ask(self, path: str, body: dict[str, Any], **more: Any) -> Any:
        """The answer of a request that must succeed."""
        reply = self.post(path, body, **more)
        assert reply.status_code == 200, reply.text[:500]
        return strict(reply.content)

    def complete(self, prompt: Any, **fields: Any) -> Any:
        return self.ask(COMPLETIONS, {"prompt": prompt, "temperature": 0, **fields})

    def chat(self, content: Any, **fields: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return self.ask(CHAT, {"messages": messages, "temperature": 0, **fields})

    def refused(self, path: str, body: Any, field: str | None = None, **more: Any) -> Any:
        """The error of a request that must be refused as the caller's fault."""
        return check_refusal(self.post(path, body, **more), field)

    def stream(
        self,
        path: str,
        body: dict[str, Any],
        *,
        times: list[float] | None = None,
        on_piece: Callable[[], None] = lambda: None,
    ) -> Events:
        """A stream, read to the end of the body."""
        times = [] if times is None else times
        parts = []
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            for part in response.iter_bytes():
                times.append(time.monotonic())
                parts.append(part)
                on_piece()
        return Events(response.status_code, response.headers, b"".join(parts), times)

    def stream_completion(self, prompt: Any, **fields: Any) -> Events:
        return self.stream(COMPLETIONS, {"prompt": prompt, "temperature": 0, **fields})

    def stream_chat(self, content: Any, **fields: Any) -> Events:
        messages = [{"role": "user", "content": content}]
        return self.stream(CHAT, {"messages": messages, "temperature": 0, **fields})

    def background(self, prompt: Any, **fields: Any) -> Background:
        """A streamed completion in a thread; returns once its first event is there."""
        made = Background(self, COMPLETIONS, {"prompt": prompt, "temperature": 0, **fields})
        assert made.begun.wait(60), "the stream does not begin"
        return made

    @contextmanager
    def opened(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """A stream whose connection is closed when the block is left, read or not."""
        with self.http.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200, response.read()[:500]
            lines = response.iter_lines()  # kept, for a closed iterator closes the stream
            yield lines

    def tokenize(self, **body: Any) -> list[int]:
        return list(self.ask("/tokenize", body)["tokens"])

    # -- state --

    def scrape(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All samples of /metrics, parsed strictly."""
        reply = self.http.get("/metrics")
        assert reply.status_code == 200
        found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in text_string_to_metric_families(reply.text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in found, f"{key} is given twice"
                found[key] = sample.value
        return found

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        values = [
            value
            for (sample, have), value in self.scrape().items()
            if sample == name and labels.items() <= dict(have).items()
        ]
        assert values, f"{name} {labels} is not in /metrics"
        return sum(values)

    def gauges(self) -> list[float]:
        """Running, waiting, and the share of KV blocks with an owner."""
        samples = self.scrape()
        return [sum(v for (name, _), v in samples.items() if name == gauge) for gauge in GAUGES]

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> float:
        """Polls; the seconds until the condition held."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            if condition():
                return time.monotonic() - start
            time.sleep(0.02)
        raise AssertionError(f"not within {seconds} s: {what}; gauges {self.gauges()}")

    def until_running(self, count: int) -> None:
        self.until(lambda: self.gauges()[0] == count, 20, f"{count} running")

    def until_idle(self, seconds: float = 5) -> float:
        return self.until(lambda: self.gauges() == [0, 0, 0], seconds, "nothing runs or is held")

    def check_alive(self) -> None:
        """Plain requests are answered, and nothing of what came before is held."""
        assert self.complete("One", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert self.http.get("/health/ready").status_code == 200
        self.until_idle()

    def memory(self) -> int:
        """Resident bytes of the server and its core."""
        total = 0
        for pid in (self.server.process.pid, self.server.core_pid()):
            status = Path(f"/proc/{pid}/status").read_text()
            total += int(status.split("VmRSS:")[1].split()[0]) * 1024
        return total


def check_refusal(reply: httpx.Response, field: str | None = None) -> Any:
    """The error of a 4xx answer in the API's form that names the field."""
    assert 400 <= reply.status_code < 500, (reply.status_code, reply.text[:300])
    assert reply.headers["content-type"] == "application/json"
    body = strict(reply.content)
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}, error
    assert error["code"] == reply.status_code
    assert error["type"]
    assert 0 < len(error["message"]) < 1000
    if field is not None:
        assert field in error["message"] or str(error["param"]).startswith(field), error
    return error


def check_stream(events: Events, *, chat: bool, choices: int, usage: bool) -> None:
    """Role, content, one finish reason for each choice, usage if asked for, and the closing."""
    opened, ended = set(), set()
    counted = False
    for event in events.all:
        assert "error" not in event, event
        assert not counted, "an event follows the usage"
        if not event["choices"]:
            assert event["usage"]["completion_tokens"] >= len(ended)
            counted = True
            continue
        assert event.get("usage") is None
        for choice in event["choices"]:
            index = choice["index"]
            assert 0 <= index < choices
            assert index not in ended, "a choice goes on after its finish reason"
            if chat and index not in opened:
                assert choice["delta"]["role"] == "assistant"
            elif chat:
                assert "role" not in choice["delta"]
            opened.add(index)
            if choice["finish_reason"] is not None:
                assert choice["finish_reason"] in ("stop", "length")
                ended.add(index)
    assert ended == set(range(choices))
    assert counted == usage
