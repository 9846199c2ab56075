"""RF, TC and CC-1: features that are not there yet are refused by name, and harm nobody.

When one is built, its test here is to be replaced by the case itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.client import CHAT, COMPLETIONS, Box, fresh, together

pytestmark = pytest.mark.unbuilt
MESSAGES = [{"role": "user", "content": "Name five fruits."}]
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}


def schema(content: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": content}}


def refused(box: Box, field: str, **fields: Any) -> None:
    """Refused in both forms by 400, with the field in the message and what to do."""
    for stream in (False, True):
        error = box.refused(CHAT, {"messages": MESSAGES, "stream": stream, **fields}, field)
        assert (error["code"], error["param"]) == (400, field)
        assert "not built" in error["message"]


def test_rf_1_schemas(box: Box) -> None:
    names = {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 2}
    whole = {"type": "object", "properties": {"names": names}, "required": ["names"]}
    refused(box, "response_format", response_format=schema(whole))
    box.refused(COMPLETIONS, {"prompt": "x", "response_format": schema(whole)}, "response_format")


@pytest.mark.parametrize(
    "broken",
    [
        schema({"type": "strin"}),
        schema({"$ref": "#/nowhere"}),
        schema([]),
        schema({"type": "string", "pattern": "("}),
        schema({"type": "string", "pattern": ""}),
        schema({"type": "object", "properties": []}),
        {"type": "jsn"},
        {"type": "json_schema"},
    ],
    ids=str,
)
def test_rf_2_broken_schemas(box: Box, broken: dict[str, Any]) -> None:
    body = {"prompt": "Far away", "max_tokens": 12, "ignore_eos": True}
    alone = box.stream_completion(**body).text()
    stream = box.background(**body)
    refused(box, "response_format", response_format=broken)
    assert stream.events.text() == alone


def test_rf_3_json_objects(box: Box) -> None:
    refused(box, "response_format", response_format={"type": "json_object"})
    refused(box, "response_format", response_format=schema({}))
    assert box.ask(
        CHAT, {"messages": MESSAGES, "response_format": {"type": "text"}, "max_tokens": 1}
    )


def test_rf_4_regular_expressions_and_grammars(box: Box) -> None:
    endless: dict[str, Any] = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(150):
        deep = {"type": "array", "items": deep}
    refused(box, "response_format", response_format=schema(endless))
    refused(box, "response_format", response_format=schema(deep))
    refused(box, "structured_outputs", structured_outputs={"regex": "(a|a)*b{1,5000}"})
    for name in ("guided_regex", "guided_json", "guided_choice", "guided_grammar", "ebnf"):
        box.refused(CHAT, {"messages": MESSAGES, name: "a"}, name)


def test_cc_1_a_schema_for_each_of_many(box: Box) -> None:
    _, seed = fresh()

    def one(number: int) -> None:
        mark = schema({"type": "string", "enum": [f"marker-{seed}-{number}"]})
        refused(box, "response_format", response_format=mark)

    together([lambda number=number: one(number) for number in range(16)])  # type: ignore[misc]


def test_tc_1_tool_choice(box: Box) -> None:
    for harmless in ({"tool_choice": "none"}, {"tool_choice": "auto", "tools": []}):
        answer = box.ask(CHAT, {"messages": MESSAGES, "max_tokens": 3, **harmless})
        assert not answer["choices"][0]["message"].get("tool_calls")
        assert answer["choices"][0]["message"]["content"]
    refused(box, "tool_choice", tool_choice="required")
    refused(box, "tools", tools=[TOOL])
    refused(box, "tools", tools=[TOOL, TOOL])


def test_tc_2_a_forced_call(box: Box) -> None:
    forced = {"type": "function", "function": {"name": "note"}}
    for tokens in (8, 200):
        error = box.refused(
            CHAT,
            {"messages": MESSAGES, "tools": [TOOL], "tool_choice": forced, "max_tokens": tokens},
        )
        assert error["param"] in ("tools", "tool_choice")


def test_tc_3_calls_in_an_answer_stay_text(box: Box) -> None:
    """Nothing is parsed, so nothing is taken away from what the model wrote."""
    call = '<tool_call>{"name": "note", "arguments": {"text": "{\\"a\\": 🦉}"}}</tool_call>'
    for name in ("functions", "function_call"):
        refused(box, name, **{name: {"name": "note"}})
    history = [*MESSAGES, {"role": "assistant", "content": call}, *MESSAGES]
    body = {"messages": history, "max_tokens": 12, "temperature": 0}
    plain = box.ask(CHAT, body)["choices"][0]
    assert plain["finish_reason"] in ("stop", "length")
    assert box.stream(CHAT, body).text() == plain["message"]["content"]
