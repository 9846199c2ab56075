"""TC: features that are not there yet are refused by name, and harm nobody.

When one is built, its test here is to be replaced by the case itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.client import CHAT, Box

pytestmark = pytest.mark.unbuilt
MESSAGES = [{"role": "user", "content": "Name five fruits."}]
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"type": "object"}}}


def refused(box: Box, field: str, **fields: Any) -> None:
    """Refused in both forms by 400, with the field in the message and what to do."""
    for stream in (False, True):
        error = box.refused(CHAT, {"messages": MESSAGES, "stream": stream, **fields}, field)
        assert (error["code"], error["param"]) == (400, field)
        assert "not built" in error["message"]


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
