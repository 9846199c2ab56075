"""PN: which tokens penalties look at, and values that would slip past a comparison."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, check_refusal, fresh

NUMBERS = "1, 3, 5, 7, 9, 11, 13, 15, 17, 19,"


def test_pn_1_only_repetition_looks_at_the_prompt(box: Box) -> None:
    def first(**fields: Any) -> int:
        made = box.complete(NUMBERS, max_tokens=1, return_token_ids=True, **fields)
        return int(made["choices"][0]["token_ids"][0])

    plain = first()
    assert plain in box.tokenize(prompt=NUMBERS)
    assert first(frequency_penalty=2) == plain
    assert first(presence_penalty=2) == plain
    assert first(repetition_penalty=1.8) != plain
    assert first(repetition_penalty=1.0) == plain


@pytest.mark.parametrize(("frequency", "presence"), [(1.7, 0.0), (0.0, 1.9), (0.6, 0.8), (-0.5, 0)])
def test_pn_1_each_token_is_the_best_after_its_penalty(
    box: Box, frequency: float, presence: float
) -> None:
    """The shown values are those of the model, so the penalties can be laid on by hand."""
    made = box.complete(
        NUMBERS,
        max_tokens=16,
        logprobs=20,
        return_tokens_as_token_ids=True,
        return_token_ids=True,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )["choices"][0]
    seen: Counter[str] = Counter()
    for token, tops in zip(made["token_ids"], made["logprobs"]["top_logprobs"], strict=True):
        lowered = {
            name: value - frequency * seen[name] - presence * (seen[name] > 0)
            for name, value in tops.items()
        }
        best = max(lowered.values())
        assert lowered[f"token_id:{token}"] >= best - 1e-3, (token, tops, seen)
        seen[f"token_id:{token}"] += 1
    assert max(seen.values()) >= 1


# (field, value as it stands in the body, whether it is taken)
VALUES = [
    *(("temperature", v, False) for v in ("NaN", "Infinity", "-Infinity", "1e999", "-0.1")),
    *(("temperature", v, False) for v in ("2.5e38", "100.5", '"1"', "true", "[1]")),
    *(("temperature", v, True) for v in ("0", "1e-9", "2", "-0.0", "null")),
    *(("top_p", v, False) for v in ("0", "1.01", "NaN", "-0.5", "1e999", "-1e-300")),
    *(("top_p", v, True) for v in ("1", "1e-12", "0.35")),
    *(("top_k", v, False) for v in ("-5", "-2", "1.5", "NaN", "1e12", '"3"')),
    *(("top_k", v, True) for v in ("0", "-1", "1", "1000000000000")),
    *(("min_p", v, False) for v in ("NaN", "-0.01", "1.5", "Infinity")),
    *(("presence_penalty", v, False) for v in ("NaN", "99", "-2.5", "-Infinity")),
    *(("frequency_penalty", v, False) for v in ("NaN", "99", "2.0001")),
    *(("repetition_penalty", v, False) for v in ("NaN", "0", "-1", "99", "1e999")),
    *(("repetition_penalty", v, True) for v in ("0.5", "10")),
]


def test_pn_2_odd_values_are_refused_and_good_streams_unharmed(box: Box) -> None:
    dice, seed = fresh()
    good: list[dict[str, Any]] = [
        {"prompt": NUMBERS, "max_tokens": 60, "ignore_eos": True, "temperature": heat, "seed": seed}
        for heat in (0, 0.8, 1.3)
    ]
    alone = [box.stream(COMPLETIONS, body).text() for body in good]
    running = [box.background(**body) for body in good]
    values = list(VALUES)
    dice.shuffle(values)
    for field, value, taken in values:
        path = dice.choice((CHAT, COMPLETIONS))
        text = (
            '"messages": [{"role": "user", "content": "Hi"}]' if path == CHAT else '"prompt": "Hi"'
        )
        raw = f'{{{text}, "max_tokens": 1, "{field}": {value}}}'
        reply = box.post(path, content=raw.encode())
        if taken:
            assert reply.status_code == 200, (field, value, reply.text)
        else:
            assert reply.status_code == 400, (field, value, reply.text)
            check_refusal(reply, field if value not in ("NaN", "Infinity", "-Infinity") else None)
    assert [stream.events.text() for stream in running] == alone, f"seed {seed}"
