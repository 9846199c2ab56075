"""NS: n answers are n different answers, seeds repeat, and no seed means no repetition."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cases.client import COMPLETIONS, Box, check_stream, fresh, prose, together
from tests.cases.conftest import FLOAT32
from tests.e2e.servers import serving


def texts(answer: Any) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [
        choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in answer["choices"]
    ]


def test_ns_1_a_seed_gives_the_same_different_answers(box: Box) -> None:
    dice, seed = fresh()
    question = f"Invent a story about {prose(dice, 2)}."
    fields: dict[str, Any] = {"temperature": 1.2, "seed": seed, "max_tokens": 20}
    first, again = (texts(box.chat(question, n=4, **fields)) for _ in range(2))
    assert first == again, f"seed {seed}"
    assert len(set(first)) >= 2, f"seed {seed}"
    assert texts(box.chat(question, **fields)) == first[:1], f"seed {seed}"
    fields["seed"] = seed + 1
    assert texts(box.chat(question, n=4, **fields)) != first, f"seed {seed}"


def test_ns_2_n_choices_are_n(box: Box) -> None:
    dice, seed = fresh()

    def plain(number: int) -> None:
        answer = box.complete(f"The {prose(dice, 1)}", n=number, temperature=1.5, max_tokens=3)
        assert len(texts(answer)) == number, f"seed {seed}"
        assert len(answer["choices"]) <= answer["usage"]["completion_tokens"] <= 3 * number

    together([partial(plain, number) for number in (2, 3, 4, 8) for _ in range(4)])


def test_ns_2_streamed_choices_end_each_for_itself(box: Box) -> None:
    _, seed = fresh()

    def streamed(number: int) -> None:
        body = {
            "prompt": "A day in",
            "n": 4,
            "temperature": 1.5,
            "seed": seed + number,
            "max_tokens": 20,
            "stop": ["e", "."],
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        events = box.stream(COMPLETIONS, body)
        check_stream(events, chat=False, choices=4, usage=True)
        lengths = [len(events.ids(index)) for index in range(4)]
        assert sum(lengths) == events.usage["completion_tokens"], f"seed {seed}"
        plain = box.ask(COMPLETIONS, {k: v for k, v in body.items() if k != "stream_options"})
        assert texts(plain) == [events.text(index) for index in range(4)], f"seed {seed}"
        assert [len(c["token_ids"]) for c in plain["choices"]] == lengths

    together([partial(streamed, number) for number in range(6)], workers=3)


def test_ns_3_unseeded_answers_differ(box: Box, tiny: Box) -> None:
    """The two servers are two starts of the same engine."""
    answers = [
        [texts(one.complete("My dream:", temperature=1.3, max_tokens=30))[0] for _ in range(3)]
        for one in (box, tiny)
    ]
    assert len({text for three in answers for text in three}) > 1
    assert answers[0][0] != answers[1][0]


@pytest.mark.slow
def test_ns_3_a_seed_of_the_server_makes_starts_agree(smollm2_gguf: Path, tmp_path: Path) -> None:
    _, seed = fresh()
    flags = ("--max-model-len", "256", "--num-gpu-blocks-override", "32", "--seed", str(seed))
    found = []
    for start in range(2):
        with serving(smollm2_gguf, tmp_path / f"log{start}", *FLOAT32, *flags) as server:
            ask = partial(Box(server).complete, "My dream:", temperature=1.3, max_tokens=30)
            found.append([texts(ask())[0] for _ in range(3)])
    assert found[0] == found[1], f"seed {seed}"
    assert len(set(found[0])) > 1
