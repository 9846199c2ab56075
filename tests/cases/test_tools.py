"""TC: tools. What is refused, what a forced call is worth when it is cut, and the real client.

TC-3, the parsers by themselves, is in tests/text/test_tool_parsers.py.
"""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.cases.client import CHAT, Box, Events, fresh, prose

MESSAGES = [{"role": "user", "content": "Note down what the sea looks like."}]
NOTE_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 60, "maxLength": 90}},
    "required": ["text"],
    "additionalProperties": False,
}
NOTE = {"type": "function", "function": {"name": "note", "parameters": NOTE_SCHEMA}}
LOOK = {"type": "function", "function": {"name": "look"}}
FORCED = {"type": "function", "function": {"name": "note"}}


def calls_of(events: Events) -> list[dict[str, Any]]:
    """The calls of a stream, after a check that name and id come once and first."""
    calls: list[dict[str, Any]] = []
    for event in events.all:
        for part in event["choices"][0]["delta"].get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": part["id"], "name": part["function"]["name"], "text": ""})
            assert part["index"] == len(calls) - 1
            calls[-1]["text"] += part["function"]["arguments"]
    return calls


def test_tc_1_tool_choice(box: Box) -> None:
    for harmless in ({"tool_choice": "none"}, {"tool_choice": "auto", "tools": []}):
        answer = box.ask(CHAT, {"messages": MESSAGES, "max_tokens": 3, **harmless})
        assert "tool_calls" not in answer["choices"][0]["message"]
        assert answer["choices"][0]["message"]["content"]
    spaced = {"type": "function", "function": {"name": "take note"}}
    for fields, param in (
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [NOTE, LOOK, NOTE]}, "tools[2].function.name"),
        ({"tools": [LOOK, spaced]}, "tools[1].function.name"),
    ):
        for stream in (False, True):
            error = box.refused(CHAT, {"messages": MESSAGES, "stream": stream, **fields})
            assert (error["code"], error["param"]) == (400, param)
    body = {"messages": MESSAGES, "tools": [LOOK], "tool_choice": "required", "max_tokens": 40}
    answer = box.ask(CHAT, {**body, "parallel_tool_calls": False})["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("look", "{}")
    # With a temperature white space would come sooner or later.
    dice, seed = fresh()
    for _ in range(4):
        drawn = {"temperature": 1.3, "seed": dice.randrange(2**31)}
        events = box.stream(CHAT, {**body, **drawn, "parallel_tool_calls": False})
        assert [call["text"] for call in calls_of(events)] == ["{}"], f"seed {seed}"


def test_tc_1_schemas_that_cannot_be_enforced_are_refused(box: Box) -> None:
    for broken in (
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=x)y"}}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": 5, "maxLength": 1}}},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": broken}}
        for stream in (False, True):
            body = {"messages": MESSAGES, "tools": [NOTE, tool], "tool_choice": "required"}
            error = box.refused(CHAT, {**body, "stream": stream})
            assert error["param"] == "tools[1].function.parameters", error


@pytest.mark.parametrize("tokens", [8, 12, 16, 24, 200])
def test_tc_2_a_forced_call_says_whether_it_is_whole(box: Box, tokens: int) -> None:
    dice, seed = fresh()
    body = {
        "messages": [{"role": "user", "content": f"Note: {prose(dice, 6)}."}],
        "tools": [NOTE],
        "tool_choice": FORCED,
        "max_tokens": tokens,
        "seed": seed,
        "temperature": 0.8,
    }
    plain = box.ask(CHAT, body)["choices"][0]
    events = box.stream(CHAT, body)
    streamed = calls_of(events)
    made = plain["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in made] == [call["text"] for call in streamed]
    assert plain["finish_reason"] == events.ending() == ("tool_calls" if tokens > 24 else "length")
    assert not plain["message"]["content"]
    if plain["finish_reason"] == "tool_calls":
        (call,) = streamed
        jsonschema.validate(json.loads(call["text"]), NOTE_SCHEMA)


def test_tc_2_required_calls_are_whole_ones(box: Box) -> None:
    for _ in range(3):
        _, seed = fresh()
        body = {"messages": MESSAGES, "tools": [NOTE, LOOK], "tool_choice": "required"}
        events = box.stream(CHAT, {**body, "max_tokens": 300, "seed": seed, "temperature": 1})
        calls = calls_of(events)
        ended = events.ending() == "tool_calls"
        assert calls
        assert len({call["id"] for call in calls}) == len(calls)
        for call in calls if ended else calls[:-1]:
            wanted = NOTE_SCHEMA if call["name"] == "note" else {"maxProperties": 0}
            jsonschema.validate(json.loads(call["text"]), wanted)


class Note(pydantic.BaseModel):
    """Write a note."""

    text: str = pydantic.Field(min_length=5, max_length=40)


@pytest.fixture
def client(box: Box) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{box.url}/v1", max_retries=0)


def test_the_client_parses_what_it_forced(client: openai.OpenAI) -> None:
    fields: Any = {"model": "small", "messages": MESSAGES, "max_tokens": 120}
    called = client.chat.completions.parse(
        **fields, tools=[openai.pydantic_function_tool(Note)], tool_choice="required"
    )
    (call, *_) = called.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Note)
    shaped = client.chat.completions.parse(**fields, response_format=Note)
    assert isinstance(shaped.choices[0].message.parsed, Note)


def test_the_client_reads_responses(client: openai.OpenAI) -> None:
    fields: Any = {"model": "small", "input": "What is the capital of France?", "temperature": 0}
    plain = client.responses.create(**fields, max_output_tokens=20)
    assert "Paris" in plain.output_text
    chat = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": fields["input"]}],
        temperature=0,
        max_tokens=20,
    )
    assert plain.output_text == chat.choices[0].message.content
    with client.responses.stream(**fields, max_output_tokens=20) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == text == plain.output_text
    flat: Any = {"type": "function", "name": "look"}
    called = client.responses.create(
        **fields,
        max_output_tokens=40,
        tools=[flat],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    (item,) = called.output
    assert item.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": item.call_id, "output": "Paris"}
    items: Any = [{"role": "user", "content": "Look."}, item, result]
    after = client.responses.create(model="small", input=items, max_output_tokens=4)
    assert after.status in ("completed", "incomplete")


def test_the_model_may_call_if_the_operator_lets_it(box: Box, edge: Box) -> None:
    """A small model hardly does; what it says instead is content."""
    body = {"messages": MESSAGES, "tools": [LOOK], "max_tokens": 16, "temperature": 0}
    choice = box.ask(CHAT, body)["choices"][0]
    assert choice["message"]["content"] or choice["message"]["tool_calls"]
    error = edge.refused(CHAT, body, "tools")
    assert "--enable-auto-tool-choice" in error["message"]
    error = edge.refused(CHAT, {**body, "tool_choice": "required"}, "messages")
    assert "no system role in this house" in error["message"]
