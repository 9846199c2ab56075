"""Log-probs in all forms: a stream joined is the plain answer, and bytes join to the text."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.server.app import create_app
from tests.server.asgi import chat, complete
from tests.server.fake_engine import FakeEngine

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def fields_of(dice: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"n": dice.randint(1, 3), "max_tokens": dice.randint(1, 40)}
    fields["skip_special_tokens"] = False
    stop = dice.choice([None, None, "hoot", ["本", "zz"], "🦉", ["1, 2", " hoot at n"]])
    if stop is not None:
        fields["stop"] = stop
        fields["include_stop_str_in_output"] = dice.random() < 0.5
    if dice.random() < 0.3:
        fields["return_tokens_as_token_ids"] = True
    if dice.random() < 0.3:
        fields["min_tokens"] = dice.randint(1, fields["max_tokens"])
    return fields


def by_choice(events: list[Any], key: str) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).append(choice.get(key))
    return found


def check_chat_entries(choice: dict[str, Any], entries: list[Any], width: int) -> None:
    raw = b"".join(bytes(entry["bytes"]) for entry in entries)
    text = choice["message"]["content"]
    assert raw.decode("utf-8", "replace").startswith(text)
    for entry in entries:
        assert len(entry["top_logprobs"]) == width
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
        assert entry["logprob"] <= 0


@pytest.mark.parametrize("width", [None, 0, 4])
async def test_chat(width: int | None) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice, app = random.Random(seed), create_app(FakeEngine())
    for _ in range(12):
        fields = {**fields_of(dice), "logprobs": True}
        if width is not None:
            fields["top_logprobs"] = width
        plain = (await chat(app, **fields)).json
        events = (await chat(app, stream=True, **fields)).events
        deltas, parts = by_choice(events, "delta"), by_choice(events, "logprobs")
        total = 0
        for choice in plain["choices"]:
            entries = choice["logprobs"]["content"]
            total += len(entries)
            check_chat_entries(choice, entries, width or 0)
            index = choice["index"]
            joined = [entry for part in parts[index] if part for entry in part["content"]]
            assert joined == entries, fields
            text = "".join(delta.get("content", "") for delta in deltas[index])
            assert text == choice["message"]["content"]
        assert total == plain["usage"]["completion_tokens"]


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize("echo", [False, True])
async def test_completions(width: int, echo: bool) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice, engine = random.Random(seed), FakeEngine()
    app = create_app(engine)
    for _ in range(12):
        prompt = dice.choice(["The owls 🦉", ["hoot", "naïve 日本"], engine.tokenizer.encode("at")])
        fields = {**fields_of(dice), "logprobs": width, "echo": echo}
        plain = (await complete(app, prompt, **fields)).json
        events = (await complete(app, prompt, stream=True, **fields)).events
        texts, parts = by_choice(events, "text"), by_choice(events, "logprobs")
        total = 0
        for choice in plain["choices"]:
            lists, index = choice["logprobs"], choice["index"]
            for name in LISTS:
                joined = [item for part in parts[index] if part for item in part[name]]
                assert joined == lists[name], (name, fields)
            assert "".join(texts[index]) == choice["text"]
            check_lists(
                lists, choice["text"], width, plainly="return_tokens_as_token_ids" in fields
            )
            total += len(lists["tokens"])
        if echo:
            total -= fields["n"] * plain["usage"]["prompt_tokens"]
        assert total == plain["usage"]["completion_tokens"]


def check_lists(lists: dict[str, Any], text: str, width: int, *, plainly: bool) -> None:
    place, raw = 0, b""
    for token, value, top, offset in zip(
        lists["tokens"],
        lists["token_logprobs"],
        lists["top_logprobs"],
        lists["text_offset"],
        strict=True,
    ):
        assert offset == place
        place += len(token)
        if token.startswith("bytes:"):
            raw += bytes(int(part, 16) for part in token.split("\\x")[1:])
        else:
            raw += token.encode()
        assert (value is None) == (top is None)
        if top is not None:
            assert top[token] == value or width
            assert 1 <= len(top) <= width + 1
    if not plainly:
        assert raw.decode("utf-8", "replace").startswith(text)


async def test_prompt_logprobs_have_their_counts() -> None:
    app = create_app(FakeEngine())
    for width in (0, 3):
        made = (await complete(app, "The owls", prompt_logprobs=width, echo=True, logprobs=1)).json
        entries = made["choices"][0]["prompt_logprobs"]
        assert entries[0] is None
        assert all(1 <= len(entry) <= width + 1 for entry in entries[1:])
        assert len(entries) == made["usage"]["prompt_tokens"]
        made = (await chat(app, prompt_logprobs=width)).json
        assert len(made["prompt_logprobs"]) == made["usage"]["prompt_tokens"]
        first = next(iter(made["prompt_logprobs"][1].values()))
        assert set(first) == {"logprob", "rank", "decoded_token"}
