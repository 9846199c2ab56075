"""PR: sequences that are put back and begun again give what they would have given alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.client import COMPLETIONS, Background, Box, check_stream, fresh, random_ids


def bodies(number: int, tokens: int, **fields: Any) -> list[dict[str, Any]]:
    dice, _ = fresh(number)
    return [
        {
            "prompt": random_ids(dice, 40),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        for _ in range(8)
    ]


def crowd(tiny: Box, asked: list[dict[str, Any]]) -> list[Background]:
    return [Background(tiny, COMPLETIONS, body) for body in asked]


def check_same_as_alone(tiny: Box, box: Box, tokens: int, **fields: Any) -> None:
    _, seed = fresh()
    asked = bodies(seed, tokens, **fields)
    before = tiny.metric("vllm:num_preemptions_total")
    streams = crowd(tiny, asked)
    found = [stream.events for stream in streams]
    assert tiny.metric("vllm:num_preemptions_total") > before, "nothing was preempted"
    large = [stream.events for stream in [Background(box, COMPLETIONS, body) for body in asked]]
    for place, (mine, alone) in enumerate(zip(found, large, strict=True)):
        where = f"request {place}, seed {seed}"
        check_stream(mine, chat=False, choices=1, usage=True)
        assert mine.ending() == "length"
        assert len(mine.ids()) == tokens, where
        assert mine.ids() == alone.ids(), where
        assert mine.text() == alone.text(), where
        assert mine.usage["prompt_tokens"] == 40
        assert mine.usage["completion_tokens"] == tokens
        ours, theirs = values(mine), values(alone)
        assert ours == pytest.approx(theirs, abs=1e-3), where
        assert len(ours) == (tokens if "logprobs" in fields else 0)


def values(events: Any) -> list[float]:
    """The log-probs of the tokens of a stream."""
    return [
        value
        for event in events.all
        for choice in event["choices"]
        for value in (choice.get("logprobs") or {}).get("token_logprobs") or ()
    ]


def test_pr_1_2_a_crowd_answers_as_each_alone(tiny: Box, box: Box) -> None:
    check_same_as_alone(tiny, box, 64, logprobs=2)


def test_pr_1_seeded_too(tiny: Box, box: Box) -> None:
    check_same_as_alone(tiny, box, 56, temperature=1.1, seed=3)


@pytest.mark.slow
def test_pr_1_two_hundred_tokens_each(tiny: Box, box: Box) -> None:
    check_same_as_alone(tiny, box, 200)


def test_pr_2_who_leaves_while_put_back_leaves_nothing(tiny: Box) -> None:
    _, seed = fresh()
    asked = bodies(seed, 70)
    before = tiny.metric("vllm:num_preemptions_total")
    streams = crowd(tiny, asked[:7])
    # The last one to come is the first to be put back.
    tiny.until_running(7)
    with tiny.opened(COMPLETIONS, asked[7]) as lines:
        next(lines)
        tiny.until(lambda: tiny.metric("vllm:num_preemptions_total") > before, 60, "a preemption")
    for stream in streams:
        assert len(stream.events.ids()) == 70, f"seed {seed}"
    tiny.until_idle()
