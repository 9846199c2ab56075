"""Sends one streamed request to an OpenAI-compatible server and times its events.

Not for: choosing when to send (`serve.py`) or judging the times (`report.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from octavo.bench.dataset import Sample

JSON = {"content-type": "application/json"}
LONGEST_EVENT = 2**20  # bytes of a line of a stream


@dataclass(slots=True)
class Outcome:
    """What became of one request; times in seconds."""

    prompt_len: int
    start: float = 0.0  # perf_counter at sending
    first: float = 0.0  # time to the first token
    latency: float = 0.0  # time to the last event
    gaps: list[float] = field(default_factory=list)  # between events with text
    output_len: int = 0
    text: str = ""
    error: str = ""

    @property
    def success(self) -> bool:
        """True if the stream ended as it should."""
        return not self.error

    @property
    def per_token(self) -> float:
        """Seconds a token after the first one."""
        return (self.latency - self.first) / (self.output_len - 1) if self.output_len > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what every one of them carries."""

    url: str
    model: str
    chat: bool
    headers: dict[str, str]
    body: dict[str, Any]

    def payload(self, sample: Sample) -> dict[str, Any]:
        """The request body for one sample."""
        common = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        if self.chat:
            content = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt)
            messages = [{"role": "user", "content": content}]
            return {**common, "messages": messages, "max_completion_tokens": sample.output_len}
        return {**common, "prompt": sample.prompt, "max_tokens": sample.output_len}


async def send(
    client: aiohttp.ClientSession, target: Target, sample: Sample, request_id: str
) -> Outcome:
    """Never raises for what a server does: an error is an outcome."""
    outcome = Outcome(sample.prompt_len, start=time.perf_counter())
    headers = {**JSON, **target.headers, "x-request-id": request_id}
    data = msgspec.json.encode(target.payload(sample))  # several times as fast as the library's
    try:
        async with client.post(target.url, data=data, headers=headers) as response:
            if response.status != 200:
                body = (await response.read()).decode("utf-8", "replace")
                outcome.error = f"HTTP {response.status}: {body[:300]}"
                return outcome
            await _read(response, outcome)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Reads events as they come, in whatever pieces: several that came together have one time."""
    reading = _Reading(outcome)
    rest = b""
    async for data in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not reading.event(line[5:].strip(), now):
                return
        if len(rest) > LONGEST_EVENT:
            raise ValueError(f"an event of the stream has more than {LONGEST_EVENT} bytes")
    outcome.text = "".join(reading.texts)
    if not reading.ended:
        outcome.error = "the stream ended without [DONE]"
    elif not outcome.first:
        outcome.error = "the stream held no text"


class _Reading:
    """What is known of a stream so far."""

    def __init__(self, outcome: Outcome) -> None:
        self.texts: list[str] = []
        self.ended = False
        self._outcome = outcome
        self._last = outcome.start

    def event(self, data: bytes, now: float) -> bool:
        """Takes one event; False if it tells of an error."""
        outcome = self._outcome
        if data == b"[DONE]":
            self.ended = True
            return True
        event = msgspec.json.decode(data)
        if "error" in event:
            outcome.error = f"in the stream: {event['error']}"
            return False
        if usage := event.get("usage"):
            outcome.output_len = usage.get("completion_tokens", outcome.output_len)
        text = _text_of(event)
        if text is None:
            return True
        if not outcome.first:
            outcome.first = now - outcome.start
        else:
            outcome.gaps.append(now - self._last)
        self._last = now
        outcome.latency = now - outcome.start
        self.texts.append(text)
        return True


def _text_of(event: dict[str, Any]) -> str | None:
    """The text of an event; None for events that carry no token, such as the first role."""
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "delta" in choice:
        delta = choice["delta"]
        if "role" in delta and not delta.get("content"):
            return None
        return str(delta.get("content") or "")
    return str(choice.get("text") or "")
