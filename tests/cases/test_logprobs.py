"""LP: log-probs that belong to their tokens, echoed prompts, values that JSON can hold."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.cases.client import CHAT, Box, fresh, prose

QUESTION = "Name two things that float on water."


def test_lp_1_each_position_has_its_own_list(box: Box) -> None:
    width = random.randint(2, 9)
    fields: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": width}
    answer = box.chat(QUESTION, **fields)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == width
        assert tops == sorted(tops, reverse=True)
        assert max(tops) <= 0
        first = entry["top_logprobs"][0]
        assert (first["token"], first["logprob"]) == (entry["token"], entry["logprob"])
    lists = [[top["token"] for top in entry["top_logprobs"]] for entry in entries]
    assert len({tuple(names) for names in lists}) >= 2
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    text = answer["choices"][0]["message"]["content"]
    assert joined.decode().removesuffix("<|im_end|>") == text

    events = box.stream_chat(QUESTION, **fields)
    streamed = [
        entry
        for event in events.all
        for choice in event["choices"]
        for entry in (choice.get("logprobs") or {}).get("content") or ()
    ]
    assert [e["token"] for e in streamed] == [e["token"] for e in entries]
    for mine, other in zip(streamed, entries, strict=True):
        assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [t["token"] for t in mine["top_logprobs"]] == [
            t["token"] for t in other["top_logprobs"]
        ]


def test_lp_2_as_many_alternatives_as_asked_for(box: Box) -> None:
    answer = box.chat(QUESTION, max_tokens=7, logprobs=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in entries)
    message = [{"role": "user", "content": QUESTION}]
    box.refused(CHAT, {"messages": message, "top_logprobs": 3}, "top_logprobs")
    for wanted in (0, 1, 4):
        answer = box.complete("Ships and", max_tokens=6, logprobs=wanted)
        lists = answer["choices"][0]["logprobs"]
        number = answer["usage"]["completion_tokens"]
        assert {len(values) for values in lists.values()} == {number}
        assert all(value <= 0 for value in lists["token_logprobs"])
        for token, value, top in zip(
            lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
        ):
            assert len(top) == max(1, wanted)
            assert top[token] == value  # greedy, so the chosen one is the best


def test_lp_3_impossible_values_are_finite(box: Box) -> None:
    dice, seed = fresh()
    prompt = prose(dice, 5)
    fields: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 3}
    greedy = box.complete(prompt, **fields)["choices"][0]
    single = box.complete(prompt, **fields, temperature=1, top_k=1)["choices"][0]
    assert single["text"] == greedy["text"], f"seed {seed}"
    mine, other = (c["logprobs"]["token_logprobs"] for c in (single, greedy))
    assert mine[0] is other[0] is None
    assert mine[1:-3] == pytest.approx(other[1:-3], abs=1e-3), f"seed {seed}"
    # One token is possible, all others have the probability 0.
    chosen = dice.randrange(1000, 40_000)
    for limit in ({"allowed_token_ids": [chosen]}, {"logit_bias": {str(chosen): 100}}):
        made = box.chat(
            prompt, max_tokens=2, logprobs=True, top_logprobs=5, return_token_ids=True, **limit
        )
        assert made["choices"][0]["token_ids"] == [chosen] * 2, f"seed {seed}"
        for entry in made["choices"][0]["logprobs"]["content"]:
            assert all(-1e4 < top["logprob"] <= 0 for top in entry["top_logprobs"])


def test_lp_4_a_prompt_can_be_read_without_an_answer(box: Box) -> None:
    dice, seed = fresh()
    prompt = f"Some {prose(dice, 4)}: naïve"
    ids = box.tokenize(prompt=prompt)
    answer = box.complete(prompt, echo=True, max_tokens=0, logprobs=1)
    choice, lists = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == prompt, f"seed {seed}"
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["usage"]["prompt_tokens"] == len(ids) == len(lists["tokens"])
    assert lists["token_logprobs"][0] is None
    assert all(value <= 0 for value in lists["token_logprobs"][1:])
    check_offsets(lists)

    silent = box.complete(prompt, max_tokens=0)
    assert (silent["choices"][0]["text"], silent["usage"]["completion_tokens"]) == ("", 0)

    answer = box.complete(prompt, echo=True, max_tokens=1, logprobs=1)
    longer = answer["choices"][0]["logprobs"]
    assert len(longer["tokens"]) == len(ids) + 1
    assert answer["choices"][0]["text"] == prompt + longer["tokens"][-1]
    assert longer["token_logprobs"][1:-1] == pytest.approx(lists["token_logprobs"][1:], abs=1e-3)
    check_offsets(longer)


def check_offsets(lists: dict[str, Any]) -> None:
    expected, place = [], 0
    for token in lists["tokens"]:
        expected.append(place)
        place += len(token)
    assert lists["text_offset"] == expected
