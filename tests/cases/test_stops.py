"""SP: stop texts end an answer exactly, nothing is sent too early, lost, or passed over."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.cases.client import Box, fresh, together

COUNTING = "20, 21, 22, 23, 24, 25, 26, 27, 28,"


@pytest.fixture(scope="module")
def base(box: Box) -> str:
    """How the counting goes on, without a stop text."""
    text = box.complete(COUNTING, max_tokens=16)["choices"][0]["text"]
    assert len(text) >= 14, text
    return str(text)


def check_stop(box: Box, base: str, stop: str, streamed: bool) -> None:
    expected = base[: base.find(stop)]
    if not streamed:
        choice = box.complete(COUNTING, max_tokens=16, stop=[stop])["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop"), stop
        assert choice["stop_reason"] == stop
        return
    events = box.stream_completion(COUNTING, max_tokens=16, stop=[stop])
    sent = ""
    for piece in events.pieces():
        sent += piece
        assert expected.startswith(sent), f"sent {sent!r} with stop {stop!r}"
    assert (sent, events.ending()) == (expected, "stop"), stop


def test_sp_1_nothing_of_a_stop_text_is_sent(box: Box, base: str) -> None:
    dice, _ = fresh()
    stops = {
        base[start : start + size] for size in range(2, 9) for start in range(len(base) - size + 1)
    }
    together([partial(check_stop, box, base, stop, True) for stop in sorted(stops)])
    some = dice.sample(sorted(stops), 12)
    together([partial(check_stop, box, base, stop, False) for stop in some])


def test_sp_1_the_first_of_several_wins(box: Box, base: str) -> None:
    dice, seed = fresh()
    for _ in range(6):
        places = dice.sample(range(2, len(base) - 2), 3)
        stops = [base[place : place + 2] for place in places]
        choice = box.complete(COUNTING, max_tokens=16, stop=stops)["choices"][0]
        end = min(base.find(stop) + 2 for stop in stops)
        first = [stop for stop in stops if base.find(stop) + 2 == end]
        assert choice["text"] == base[: end - 2], f"{stops}, seed {seed}"
        assert choice["stop_reason"] in first


def test_sp_2_what_was_held_back_comes_at_the_end(box: Box, base: str) -> None:
    def check(stop: list[str], max_tokens: int) -> None:
        plain = box.complete(COUNTING, max_tokens=max_tokens)["choices"][0]["text"]
        events = box.stream_completion(COUNTING, max_tokens=max_tokens, stop=stop)
        assert events.text() == plain, (stop, max_tokens)
        assert events.ending() == "length"

    never: list[list[str]] = [
        ["qqqqqqqqqqqqqqqq"],
        [base[3:7] + "x"],
        [base[-4:] + "~", base[5:9] + "~"],
        [base[:8] + "#", ","[:1] + "#"],
    ]
    together([partial(check, stop, tokens) for stop in never for tokens in range(3, 14, 2)])


def test_sp_3_no_stop_before_min_tokens(box: Box) -> None:
    whole = box.complete(COUNTING, max_tokens=20, logprobs=0)["choices"][0]
    tokens: list[str] = whole["logprobs"]["tokens"]
    assert "".join(tokens) == whole["text"]

    def check(least: int, streamed: bool) -> None:
        end = next(k for k in range(least + 1, 21) if "," in tokens[k - 1])
        expected = "".join(tokens[:end]).rpartition(",")[0]
        fields: dict[str, Any] = {"max_tokens": 20, "min_tokens": least, "stop": [","]}
        if streamed:
            events = box.stream_completion(
                COUNTING, **fields, stream_options={"include_usage": True}
            )
            found = (events.text(), events.ending(), events.usage["completion_tokens"])
        else:
            answer = box.complete(COUNTING, **fields)
            choice = answer["choices"][0]
            usage = answer["usage"]["completion_tokens"]
            found = (choice["text"], choice["finish_reason"], usage)
        assert found == (expected, "stop", end), f"min_tokens {least}"

    together([partial(check, least, bool(least % 2)) for least in range(16)])


@pytest.mark.parametrize("streamed", [False, True])
def test_sp_3_ignore_eos_goes_on_to_the_limit(box: Box, streamed: bool) -> None:
    question = "What is the capital of Italy?"
    early = box.chat(question, max_tokens=64)
    assert early["choices"][0]["finish_reason"] == "stop"
    assert early["usage"]["completion_tokens"] < 64
    fields: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
    if streamed:
        events = box.stream_chat(question, **fields, stream_options={"include_usage": True})
        assert (events.ending(), events.usage["completion_tokens"]) == ("length", 64)
    else:
        answer = box.chat(question, **fields)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 64
