"""RF-1 to RF-4, CC-1 and LP-3 with a schema: answers of a demanded form, and demands refused."""

from __future__ import annotations

import itertools
import json
import random
import re
import time
from typing import Any

import jsonschema
import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, fresh, prose, strict, together

BLANKS = re.compile(r'"(?:[^"\\]|\\.)*"|(\s+)')
DIGITS = re.compile(r'"(?:[^"\\]|\\.)*"|(\d+)')
LIMIT = 2.0  # seconds for a refusal


def schema(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": content, **more}}


def longest(pattern: re.Pattern[str], text: str) -> int:
    """The longest run outside of texts."""
    return max((len(found.group(1) or "") for found in pattern.finditer(text)), default=0)


def asking(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_rf_1_a_list_of_two_has_two(box: Box) -> None:
    dice, _ = fresh()
    names = {
        "type": "array",
        "items": {"type": "string", "maxLength": 10, "pattern": "^[A-Za-z]*$"},
        "minItems": 2,
        "maxItems": 2,
    }
    whole = {"type": "object", "properties": {"names": names}, "required": ["names"]}
    first = dice.randrange(2**31)

    def one(number: int) -> bool:
        body = {"seed": first + number, "temperature": 1, "max_tokens": 120}
        body |= {"response_format": schema(whole, strict=True)}
        if number % 2:
            answer = box.ask(CHAT, asking("Give me five names.") | body)["choices"][0]
            text, reason = answer["message"]["content"], answer["finish_reason"]
        else:
            events = box.stream(CHAT, asking("Give me five names.") | body)
            text, reason = events.text(), events.ending()
        if reason == "stop":
            jsonschema.validate(strict(text), whole)
        return reason == "stop"

    ended = together([lambda number=number: one(number) for number in range(20)])  # type: ignore[misc]
    assert sum(ended) >= 18


BROKEN: list[dict[str, Any]] = [
    schema({"type": "strin"}),
    schema({"$ref": "#/nowhere"}),
    schema([]),
    schema({"type": "string", "pattern": "("}),
    schema({"type": "string", "pattern": ""}),
    schema({"type": "object", "properties": []}),
    schema({"type": "object", "required": ["a"], "properties": {}, "additionalProperties": False}),
    schema({"type": "array", "uniqueItems": True}),
    schema({"type": "string"}, strict="yes"),
    {"type": "jsn"},
    {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "answer"}},
    {"type": "json_object", "schema": {}},
    {},
]


def test_rf_2_broken_schemas(box: Box) -> None:
    body = {"prompt": "Far away", "max_tokens": 48, "ignore_eos": True}
    alone = box.stream_completion(**body).text()
    box.refused(CHAT, asking("x") | {"response_format": BROKEN[0]}, "response_format")
    stream = box.background(**body)
    for broken, streamed in itertools.product(BROKEN, (False, True)):
        begun = time.monotonic()
        more = {"response_format": broken, "stream": streamed}
        error = box.refused(CHAT, asking("x") | more, "response_format")
        assert time.monotonic() - begun < LIMIT, broken
        assert error["param"] == "response_format"
        error = box.refused(COMPLETIONS, {"prompt": "x"} | more, "response_format")
        assert error["param"] == "response_format"
    assert stream.events.text() == alone


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_old_names_are_refused_by_the_new_ones(box: Box, name: str) -> None:
    for path, body in ((CHAT, asking("x")), (COMPLETIONS, {"prompt": "x"})):
        error = box.refused(path, {**body, f"guided_{name}": "a"}, f"guided_{name}")
        assert f"structured_outputs with {name}" in error["message"]


def test_rf_3_no_endless_blanks_or_digits(box: Box) -> None:
    dice, _ = fresh()
    kind = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}}, "required": ["kind"]}
    first = dice.randrange(2**31)
    content = f"{dice.randrange(10**9)} reply with lots of blank lines"

    def one(form: dict[str, Any], number: int) -> tuple[str, str]:
        body = {"seed": first + number, "temperature": 0.7, "max_tokens": 200}
        choice = box.ask(CHAT, asking(content) | body | {"response_format": form})["choices"][0]
        text = choice["message"]["content"]
        assert longest(BLANKS, text) <= 32, repr(text)
        assert longest(DIGITS, text) <= 32, repr(text)
        return text, choice["finish_reason"]

    kinds = together([lambda number=number: one(schema(kind), number) for number in range(50)])  # type: ignore[misc]
    assert sum(reason == "stop" for _, reason in kinds) >= 49
    for text, reason in kinds:
        if reason == "stop":
            jsonschema.validate(strict(text), kind)
    forms = [schema({}), {"type": "json_object"}]
    jobs = [lambda form=form, n=n: one(form, n) for form in forms for n in range(2)]  # type: ignore[misc]
    for text, reason in together(jobs):
        if reason == "stop":
            strict(text)


HARD: list[dict[str, Any]] = [
    {"response_format": schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})},
    {"response_format": schema({"enum": [f"value {i}" for i in range(10_000)]})},
    {"structured_outputs": {"regex": "(a|a)*b{1,5000}"}},
    {"structured_outputs": {"regex": "(a{1,1000}){1,1000}"}},
    {"structured_outputs": {"grammar": 'start: "(" start ")" start | "x" | start start'}},
]


def deep(levels: int) -> bytes:
    """A body with a schema that is nested so deep that most writers of JSON cannot write it."""
    made = b'{"items":' * levels + b"{}" + b"}" * levels
    form = b'{"type":"json_schema","json_schema":{"name":"a","schema":%b}}' % made
    return b'{"prompt":"x","max_tokens":8,"response_format":%b}' % form


def test_rf_4_others_are_not_spoiled_and_hard_ones_hurt_nobody(box: Box) -> None:
    dice, _ = fresh()
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    words = {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}
    bodies = [
        {"prompt": f"{prose(dice, 6)} {index}", "max_tokens": 32, "temperature": 0}
        | ({"response_format": schema((number, words)[index % 2])} if index < 4 else {})
        for index in range(8)
    ]
    solo = [box.ask(COMPLETIONS, body)["choices"][0] for body in bodies]
    mixed = together(
        [lambda body=body: box.ask(COMPLETIONS, body)["choices"][0] for body in bodies]
    )  # type: ignore[misc]
    assert mixed == solo
    stream = box.background(prose(dice, 5), max_tokens=150, ignore_eos=True)
    every = [json.dumps({"prompt": "x", "max_tokens": 8, **hard}).encode() for hard in HARD]
    for hard in (*every, deep(150), deep(2000)):
        begun = time.monotonic()
        reply = box.post(COMPLETIONS, content=hard)
        assert reply.status_code in (200, 400), reply.text[:300]
        assert time.monotonic() - begun < 5, hard[:100]
    assert stream.events.ending() == "length"
    assert stream.largest_gap < 1


def test_cc_1_each_of_many_gets_its_own(box: Box) -> None:
    dice, _ = fresh()
    key = dice.randrange(100)
    shared = "Shared words. " * 70

    def one(number: int) -> None:
        mark = f"marker-{key}-{number:02d}"
        body = asking(f"{shared} {number}") | {"response_format": schema({"const": mark})}
        body |= {"max_tokens": 60, "request_id": mark}
        if number % 2:
            events = box.stream(CHAT, body)
            text, ids = events.text(), {event["id"] for event in events.all}
        else:
            answer = box.ask(CHAT, body)
            text, ids = answer["choices"][0]["message"]["content"], {answer["id"]}
        assert json.loads(text) == mark
        assert all(mark in id for id in ids), ids

    together([lambda number=number: one(number) for number in range(32)], 32)  # type: ignore[misc]


def test_lp_3_log_probs_where_the_form_allows_one_answer(box: Box) -> None:
    body = asking("Say something.") | {
        "response_format": schema({"const": {"a": [1, "é🦉"]}}),
        "logprobs": True,
        "top_logprobs": 5,
        "max_tokens": 60,
    }
    choice = box.ask(CHAT, body)["choices"][0]
    assert json.loads(choice["message"]["content"]) == {"a": [1, "é🦉"]}
    found = choice["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 5 for entry in found)
    joined = b"".join(bytes(entry["bytes"]) for entry in found).decode()
    assert joined.startswith(choice["message"]["content"])


def test_other_forms_over_http(box: Box) -> None:
    dice, seed = fresh()
    choices = ["amber", "naïve 🦉", 'quo"te']
    demands: list[tuple[dict[str, Any], str]] = [
        ({"choice": choices}, "|".join(map(re.escape, choices))),
        ({"regex": r"\d{3}-[a-f]{2,4}"}, r"\d{3}-[a-f]{2,4}"),
        ({"grammar": 'start: "go " ("left" | "right")'}, "go (left|right)"),
        ({"grammar": 'root ::= [0-9]+ " apples"'}, "[0-9]+ apples"),
        ({"json": {"const": 5}}, "5"),
    ]
    for demand, pattern in demands:
        body = {"structured_outputs": demand, "n": 2, "temperature": 1, "max_tokens": 30}
        body |= {"seed": seed}
        answer = box.ask(COMPLETIONS, {"prompt": prose(dice, 4), **body})
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                assert re.fullmatch(pattern, choice["text"]), (demand, choice["text"])


def test_many_bad_demands_at_once_leave_the_server_well(box: Box) -> None:
    _, seed = fresh()
    words = ["type", "items", "$ref", "anyOf", "enum", "pattern", "minLength", "required", "not"]

    def noise(draw: random.Random, depth: int) -> Any:
        kind = draw.randrange(6 if depth else 3)
        if kind == 0:
            return draw.choice([None, -1, 3.5, True, "string", "object", "#/a", "(", 10**18])
        if kind < 3:
            return draw.choice(["array", "integer", {}, []])
        if kind == 3:
            return [noise(draw, depth - 1) for _ in range(draw.randrange(3))]
        return {draw.choice(words): noise(draw, depth - 1) for _ in range(draw.randint(1, 3))}

    def one(number: int) -> int:
        content = noise(random.Random(seed + number), 4)
        body = {"prompt": "x", "max_tokens": 3, "response_format": schema(content)}
        return box.post(COMPLETIONS, body).status_code

    found = together([lambda number=number: one(number) for number in range(80)])  # type: ignore[misc]
    assert set(found) <= {200, 400}, f"seed {seed}"
    assert 400 in found
