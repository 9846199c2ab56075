"""Large bodies: refused by their size first, and never worked on in the event loop.

How long the loop stands still is measured elsewhere; here it is shown that nothing large is
looked at item by item before it is refused, and that what is looked at is looked at in a thread.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.sampling_params import MAX_ALLOWED, SamplingParams
from octavo.server import decode, models, prompts
from octavo.server.app import create_app
from octavo.server.decode import check_names
from octavo.server.prompts import split_prompts
from octavo.server.schema import CompletionRequest
from octavo.server.settings import ServerSettings
from octavo.text.chat import validate_messages
from octavo.text.tokenizer import Tokenizer
from tests.server.asgi import call, chat, complete
from tests.server.fake_engine import FakeEngine


class Watched(list[Any]):
    """A list that must not be looked through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("looked through")


class Names(Mapping[str, int]):
    """A body of many unknown names, which counts how many were looked at."""

    def __init__(self) -> None:
        self.seen = 0

    def __iter__(self) -> Iterator[str]:
        for number in range(1000):
            self.seen += 1
            yield f"unknown{number}"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, name: str) -> int:
        return 0


def test_too_many_prompts_are_counted_and_not_looked_at() -> None:
    for first in ("text", [1, 2]):
        with pytest.raises(InvalidRequest, match="holds 5 prompts; at most 4") as caught:
            split_prompts(Watched([first] * 5), 4)
        assert caught.value.param == "prompt"
    assert split_prompts([[1, 2]] * 4, 4) == [[1, 2]] * 4
    assert split_prompts([1] * 5, 4) == [[1] * 5]  # one prompt


async def test_prompts_times_choices_are_bounded() -> None:
    settings = ServerSettings(max_sequences=6)
    app = create_app(FakeEngine(), settings)
    for count, choices, status in ((6, 1, 200), (7, 1, 400), (3, 2, 200), (4, 2, 400), (1, 7, 400)):
        reply = await complete(app, ["owl"] * count, n=choices, max_tokens=1)
        assert reply.status == status, (count, choices)


def test_too_many_allowed_ids_are_counted_and_not_looked_at() -> None:
    with pytest.raises(InvalidRequest, match="a list of 1048577") as caught:
        SamplingParams(allowed_token_ids=Watched([0] * (MAX_ALLOWED + 1)))
    assert caught.value.param == "allowed_token_ids"


async def test_more_allowed_ids_than_the_vocabulary_has_are_refused() -> None:
    engine = FakeEngine()
    app, size = create_app(engine), engine.limits.vocab_size
    for ask in (chat, complete):
        reply = await ask(app, allowed_token_ids=list(range(size)), max_tokens=1)
        assert reply.status == 200
        reply = await ask(app, allowed_token_ids=[1] * (size + 1), max_tokens=1)
        assert reply.status == 400
        assert f"has {size + 1} ids; this model has {size}" in reply.error["message"]
        assert reply.error["param"] == "allowed_token_ids"


def test_allowed_ids_are_kept_once_and_checked_one_by_one() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    ids = [dice.randrange(2**31) for _ in range(50)]
    params = SamplingParams(allowed_token_ids=[*ids, *ids])
    assert params.allowed_token_ids == list(dict.fromkeys(ids))
    for wrong in (-1, 2**31, True, 1.0, "1", None):
        mixed = [*ids, wrong]
        dice.shuffle(mixed)
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(allowed_token_ids=mixed)  # type: ignore[arg-type]
        assert caught.value.param == "allowed_token_ids"


def test_the_first_unknown_name_is_enough() -> None:
    body = Names()
    with pytest.raises(InvalidRequest, match="unknown0"):
        check_names(body, CompletionRequest, {}, strict=True)
    assert body.seen == 1
    assert len(check_names(body, CompletionRequest, {}, strict=False)) == 1000


async def test_too_many_ids_to_detokenize_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_IDS", 9)
    engine = FakeEngine()
    engine.limits = replace(engine.limits, max_model_len=8)
    app = create_app(engine)
    reply = await call(app, "POST", "/detokenize", {"tokens": [5] * 9})
    assert reply.status == 200
    reply = await call(app, "POST", "/detokenize", {"tokens": [5] * 10})
    assert (reply.status, reply.error["param"]) == (400, "tokens")
    assert "has 10 ids; send at most 9" in reply.error["message"]
    reply = await call(app, "POST", "/detokenize", {"tokens": [5] * 10**4})
    assert (reply.status, reply.error["param"]) == (400, "tokens")
    for text, words in (("hoot 🦉 " * 9, "tokens; send at most 9"), ("x" * 73, "at most 72")):
        reply = await call(app, "POST", "/tokenize", {"prompt": text})
        assert (reply.status, reply.error["param"]) == (400, "prompt")
        assert words in reply.error["message"]
    engine.limits = replace(engine.limits, max_model_len=73)
    assert (await call(app, "POST", "/tokenize", {"prompt": "x" * 73})).status == 200


TEXTS = st.text(st.sampled_from('a,"\\\\[{é\n'))
VALUES = st.recursive(
    TEXTS | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


def sizes(value: object) -> tuple[int, int]:
    """(texts, lists and objects; commas) of a value as JSON."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, (list, dict)):
        return 0, 0
    items = [*value, *value.values()] if isinstance(value, dict) else value
    inner = [sizes(item) for item in items]
    commas = max(0, len(value) - 1)
    return 1 + sum(size for size, _ in inner), commas + sum(count for _, count in inner)


@given(value=st.dictionaries(TEXTS, VALUES), ascii_only=st.booleans())
def test_values_are_counted_and_texts_are_not_looked_into(
    value: dict[str, Any], ascii_only: bool
) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    objects, commas = sizes(value)
    for most, most_commas, fits in (
        (objects, commas, True),
        (objects, commas - 1, False),
        (objects - 1, commas, False),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decode, "MAX_OBJECTS", most)
            patch.setattr(decode, "MAX_SEPARATORS", most_commas)
            if fits:
                decode.refuse_crowded(body)
            else:
                with pytest.raises(InvalidRequest, match="holds more than"):
                    decode.refuse_crowded(body)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("filler", ["[]", "{}", '""', '{"a": 1}', "[[[]]]"])
async def test_crowded_bodies_are_refused(path: str, filler: str) -> None:
    body = '{"prompt": "x", "metadata": {"a": [' + f"{filler}, " * decode.MAX_OBJECTS + "1]}}"
    reply = await call(create_app(FakeEngine()), "POST", path, raw=body.encode())
    assert reply.status == 400
    assert "send several requests" in reply.error["message"]
    assert reply.error["param"] == "metadata"


def spied(tokenizer: Tokenizer, name: str) -> set[bool]:
    """Whether `name` of the tokenizer was called in the thread of the loop, once it has been."""
    seen: set[bool] = set()
    real: Callable[..., Any] = tokenizer.__getattribute__(name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.add(threading.current_thread() is threading.main_thread())
        return real(*args, **kwargs)

    tokenizer.__dict__[name] = watched
    return seen


@pytest.mark.parametrize(("count", "in_loop"), [(3, {True}), (models.THREAD_FROM, {False})])
async def test_large_answers_are_made_in_a_thread(count: int, in_loop: set[bool]) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    decoded = spied(engine.tokenizer, "decode")
    shown = spied(engine.tokenizer, "token_text")
    reply = await call(app, "POST", "/detokenize", {"tokens": [70] * count})
    assert reply.status == 200
    body = {"prompt": reply.json["prompt"], "return_token_strs": True}
    reply = await call(app, "POST", "/tokenize", body)
    assert "".join(reply.json["token_strs"]) == body["prompt"]
    assert decoded == in_loop
    if reply.json["count"] >= models.THREAD_FROM:
        assert shown == {False}
    elif count == 3:
        assert shown == {True}


async def test_large_conversations_are_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = validate_messages

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(threading.current_thread() is threading.main_thread())
        return real(*args, **kwargs)

    monkeypatch.setattr(prompts, "validate_messages", watched)
    app = create_app(FakeEngine())
    part = {"type": "text", "text": ""}
    many = [{"role": "user", "content": [part] * 600}]
    for messages in (
        [{"role": "user", "content": "Hi"}],
        many,
        [{"role": "user", "content": "owl " * 9000}],
        [{"role": "user", "content": ""}] * 600,
    ):
        await call(app, "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert seen == [True, False, False, False]
