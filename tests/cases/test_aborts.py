"""AB: whoever goes away is no longer served, in whatever form and at whatever moment."""

from __future__ import annotations

import json
import random
import socket
import time
from typing import Any

import httpx
import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, fresh, random_ids

LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


def aborted(box: Box) -> float:
    return box.metric("vllm:request_success_total", finished_reason="abort")


def check_left(box: Box, before: float, choices: int = 1) -> None:
    """Everything stops and is given back, and it was counted."""
    assert box.until_idle(2) < 1.5
    assert aborted(box) - before == choices
    # A step that was under way when the caller left still lands; then nothing more is made.
    for _ in range(5):
        tokens = box.metric("vllm:generation_tokens_total")
        time.sleep(0.2)
        if box.metric("vllm:generation_tokens_total") == tokens:
            return
    raise AssertionError("tokens are still made for nobody")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_ab_1_a_closed_stream_stops(box: Box, path: str) -> None:
    before = aborted(box)
    text = "Tell a long story."
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with box.opened(path, {**body, **LONG}) as lines:
        for _ in range(3):
            next(lines)
        box.until_running(1)
    check_left(box, before)


def test_ab_1_closed_while_its_prompt_is_read(box: Box) -> None:
    dice, _ = fresh()
    before = aborted(box)
    body = {"prompt": random_ids(dice, 1800), **LONG, "max_tokens": 200, "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        box.post(COMPLETIONS, body, timeout=httpx.Timeout(10, read=0.08))
    check_left(box, before)


def send_raw(box: Box, body: dict[str, Any], receive_bytes: int | None = None) -> socket.socket:
    """A request over a bare connection, of which nothing is read."""
    address = httpx.URL(box.url)
    made = socket.socket()
    if receive_bytes is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    made.connect((address.host, address.port or 80))
    raw = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n"
    made.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
    return made


def test_ab_1_who_does_not_read_holds_up_nobody(box: Box) -> None:
    before = aborted(box)
    body = {"prompt": "A story", **LONG, "stream": True, "logprobs": 20}
    silent = send_raw(box, body, receive_bytes=4096)
    box.until_running(1)
    for _ in range(3):
        assert box.complete("Hello", max_tokens=4, ignore_eos=True)["choices"]
    silent.close()
    check_left(box, before)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ab_1_who_does_not_read_is_cut(box: Box) -> None:
    before = aborted(box)
    body = {"prompt": "A story", "max_tokens": 1900, "ignore_eos": True, "n": 8}
    silent = send_raw(box, {**body, "stream": True, "logprobs": 20}, receive_bytes=4096)
    box.until_running(8)
    box.until(lambda: box.gauges() == [0, 0, 0], 150, "the silent reader is cut")
    assert aborted(box) > before
    silent.close()


@pytest.mark.parametrize(
    ("path", "fields", "choices"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Tell a long story."}]}, 1),
        (COMPLETIONS, {"prompt": "A story"}, 1),
        (COMPLETIONS, {"prompt": "A story", "n": 4}, 4),
        (COMPLETIONS, {"prompt": ["a b", "c d", "e f", "g h"]}, 4),
        (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "logprobs": True}, 3),
    ],
    ids=["chat", "completion", "n", "list", "chat-n"],
)
def test_ab_2_a_closed_plain_request_stops(
    box: Box, path: str, fields: dict[str, Any], choices: int
) -> None:
    before = aborted(box)
    with pytest.raises(httpx.ReadTimeout):
        box.post(path, {**fields, **LONG}, timeout=httpx.Timeout(10, read=0.4))
    check_left(box, before, choices)


def test_ab_2_who_waits_and_leaves_is_never_started(tiny: Box) -> None:
    dice, seed = fresh()
    before, prompts = aborted(tiny), tiny.metric("vllm:prompt_tokens_total")
    streams = [
        send_raw(tiny, {"prompt": random_ids(dice, 5), **LONG, "max_tokens": 60, "stream": True})
        for _ in range(8)
    ]
    tiny.until_running(8)
    waiting = send_raw(tiny, {"prompt": random_ids(dice, 77), **LONG})
    tiny.until(lambda: tiny.gauges()[1] == 1, 5, "the ninth waits")
    waiting.close()
    tiny.until(lambda: tiny.gauges()[1] == 0, 2, "the ninth is gone")
    for stream in random.sample(streams, 8):
        stream.close()
    tiny.until_idle()
    assert aborted(tiny) - before == 9
    assert tiny.metric("vllm:prompt_tokens_total") - prompts == 8 * 5, f"seed {seed}"
