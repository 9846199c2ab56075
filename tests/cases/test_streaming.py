"""ST: usage when asked for, streams that end as they should, refusals before the first event."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, check_stream, fresh, prose, together

OPTIONS: list[dict[str, Any]] = [
    {},
    {"stream_options": {}},
    {"stream_options": {"include_usage": False}},
    {"stream_options": {"include_usage": True}},
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_st_1_usage_comes_when_asked_for(box: Box, path: str) -> None:
    dice, seed = fresh()
    text = f"Tell me about the {prose(dice, 2)}."
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 14}
    chat = path == CHAT
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    plain = box.ask(path, body)["usage"]
    found = []
    for options in OPTIONS:
        events = box.stream(path, {**body, **options})
        counted = [event for event in events.all if event.get("usage") is not None]
        found.append(len(counted))
        check_stream(events, chat=chat, choices=1, usage=bool(counted))
        if counted:
            names = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert {n: counted[0]["usage"][n] for n in names} == {n: plain[n] for n in names}
            assert counted[0] is events.all[-1] or counted[0] == events.all[-1], f"seed {seed}"
    assert found == [0, 0, 0, 1], f"seed {seed}"


def mixed_stream(box: Box, number: int, seed: int) -> None:
    """One stream of a random kind, held against the state machine and its own usage."""
    dice = random.Random(seed * 1000 + number)
    chat, usage, choices = dice.random() < 0.5, dice.random() < 0.5, dice.choice((1, 1, 1, 2, 3))
    body: dict[str, Any] = {
        "max_tokens": dice.randint(1, 40),
        "temperature": dice.choice((0, 0.7, 1.4)),
        "seed": number,
        "n": choices,
    }
    if dice.random() < 0.5:
        body["stop"] = dice.choice((["e"], [" the", "."], "\n", ["zqzqzq"]))
    if dice.random() < 0.3:
        small = {"type": "object", "properties": {"a": {"enum": [f"x{number}", 7]}}}
        form = {"name": "small", "schema": {**small, "required": ["a"]}}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if usage:
        body["stream_options"] = {"include_usage": True}
    text = f"Write about {prose(dice, 3)}"
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    events = box.stream(CHAT if chat else COMPLETIONS, body)
    check_stream(events, chat=chat, choices=choices, usage=usage)
    if usage:
        counts = events.usage
        assert 1 <= counts["completion_tokens"] <= choices * body["max_tokens"]


def mixed_streams(box: Box, count: int) -> None:
    _, seed = fresh()
    together([partial(mixed_stream, box, number, seed) for number in range(count)])


def test_st_2_every_stream_ends_as_it_should(box: Box) -> None:
    mixed_streams(box, 40)


@pytest.mark.slow
def test_st_2_two_hundred_streams(box: Box) -> None:
    mixed_streams(box, 200)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (400, {"max_tokens": 100_000}),
        (400, {"temperature": -1}),
        (404, {"model": "large"}),
        (400, {"top_p": 7}),
        (400, {"stop": [""]}),
        (400, {"logit_bias": {"49152": 1}}),
        (400, {"n": 0}),
        (400, {"timeout": -3}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_st_3_a_refusal_is_the_same_streamed_or_not(
    box: Box, path: str, status: int, fields: dict[str, Any]
) -> None:
    body: dict[str, Any] = dict(fields)
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    plain = box.post(path, body)
    streamed = box.post(path, {**body, "stream": True})
    assert plain.status_code == streamed.status_code == status
    assert plain.json() == streamed.json()
    assert streamed.headers["content-type"] == "application/json"
