"""LE: what fits the context is answered, what does not is refused before any event."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, fresh, random_ids

LONGEST = 512


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("limit", [{}, {"max_tokens": 5}])
def test_le_1_too_long_is_refused_at_once(edge: Box, streamed: bool, limit: dict[str, Any]) -> None:
    dice, seed = fresh()
    open_stream = edge.background("Far away", max_tokens=80, ignore_eos=True)
    stream = {"stream": True} if streamed else {}
    for length in (LONGEST, LONGEST + 1, 600, 100_000):
        ids = {"prompt": random_ids(dice, length), **limit, **stream}
        message = {"role": "user", "content": "owl " * length}
        for path, body in ((COMPLETIONS, ids), (CHAT, {"messages": [message], **limit, **stream})):
            start = time.monotonic()
            error = edge.refused(path, body, "prompt" if path == COMPLETIONS else "messages")
            assert time.monotonic() - start < 2
            assert str(LONGEST) in error["message"], f"seed {seed}"
    assert open_stream.events.ending() == "length"
    assert open_stream.largest_gap < 1


@pytest.mark.parametrize("streamed", [False, True])
def test_le_2_the_message_has_the_numbers(edge: Box, streamed: bool) -> None:
    dice, _ = fresh()
    for length, wanted in ((8, 505), (100, 10**9), (500, 13), (511, 2)):
        body = {"prompt": random_ids(dice, length), "max_tokens": wanted, "stream": streamed}
        message = edge.refused(COMPLETIONS, body, "max_tokens")["message"]
        for number in (LONGEST, length, wanted):
            assert str(number) in message


def test_le_2_what_fits_exactly_is_answered(edge: Box) -> None:
    dice, seed = fresh()
    answer = edge.complete(random_ids(dice, 488), max_tokens=24, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length", f"seed {seed}"
    assert answer["usage"]["total_tokens"] == LONGEST


@pytest.mark.slow
def test_le_2_a_short_prompt_and_all_that_is_left(edge: Box) -> None:
    dice, seed = fresh()
    answer = edge.complete(random_ids(dice, 8), max_tokens=504)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop"), f"seed {seed}"
    assert answer["usage"]["completion_tokens"] <= 504


def test_le_3_the_last_tokens_of_the_context(edge: Box) -> None:
    dice, seed = fresh()
    for length in (510, 511, 512):
        for wanted in (1, 2, None):
            body: dict[str, Any] = {"prompt": random_ids(dice, length), "ignore_eos": True}
            body |= {} if wanted is None else {"max_tokens": wanted}
            room = LONGEST - length
            if room < (wanted or 1):
                edge.refused(COMPLETIONS, body)
                continue
            usage = edge.ask(COMPLETIONS, body)["usage"]
            expected = room if wanted is None else wanted
            assert usage["completion_tokens"] == expected, f"{length}, {wanted}, seed {seed}"


def test_le_3_unset_means_what_is_left(edge: Box) -> None:
    words = ""
    while edge.ask("/tokenize", {"messages": [{"role": "user", "content": words}]})["count"] < 470:
        words += "owl " * 20
    answer = edge.chat(words, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == LONGEST
