"""CT: all that was sent reaches the template, and what the template refuses is the caller's fault.

Text parts are joined by a newline.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.cases.client import CHAT, Box, fresh, prose
from tests.cases.conftest import SYSTEM, count, render
from tests.e2e.test_serve import start_fails


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_ct_1_all_parts_arrive(box: Box, reference: tokenizers.Tokenizer) -> None:
    dice, seed = fresh()
    for number in (1, 2, 3, 5):
        texts = [prose(dice, 2) for _ in range(number)]
        if number > 2:
            texts[dice.randrange(number)] = ""
        joined = "\n".join(texts)
        fields: dict[str, Any] = {"max_tokens": 8}
        as_parts = box.chat([text_part(text) for text in texts], **fields)
        as_text = box.chat(joined, **fields)
        expected = count(reference, render(("user", joined)))
        assert as_parts["usage"]["prompt_tokens"] == expected, f"seed {seed}"
        assert as_text["usage"]["prompt_tokens"] == expected
        assert as_parts["choices"][0]["message"] == as_text["choices"][0]["message"]


@pytest.mark.parametrize(
    "part",
    [{"type": "scent", "text": "x"}, {"text": "x"}, {"type": "text"}, {"type": "text", "text": 1}],
    ids=str,
)
def test_ct_1_unknown_parts_are_refused(box: Box, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [text_part("alpha"), part]}]
    error = box.refused(CHAT, {"messages": messages})
    assert str(error["param"]).startswith("messages[0].content[1]")


CALL = {"id": "c7", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}


def history(assistant: dict[str, Any], tool: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    tool = {"tool_call_id": "c7"} if tool is None else tool
    return [
        {"role": "user", "content": "Look at the sea."},
        {"role": "assistant", "tool_calls": [CALL], **assistant},
        {"role": "tool", "content": "blue", **tool},
        {"role": "user", "content": "And?"},
    ]


def test_ct_2_a_call_without_content_is_a_message(box: Box) -> None:
    def tokens(assistant: dict[str, Any]) -> int:
        body = {"messages": history(assistant), "max_tokens": 1}
        return int(box.ask(CHAT, body)["usage"]["prompt_tokens"])

    def with_arguments(value: Any) -> dict[str, Any]:
        function = {"name": "look", "arguments": value}
        return {"content": "", "tool_calls": [{**CALL, "function": function}]}

    same = [
        {"content": None},
        {},
        {"content": ""},
        {"content": None, "tool_calls": []},
        with_arguments({"at": "sea"}),
        with_arguments('{"at": "se'),
        with_arguments("no JSON"),
    ]
    assert len({tokens(assistant) for assistant in same}) == 1
    assert tokens({"content": "I see"}) > tokens({"content": ""})


def test_ct_2_an_answer_of_a_tool_says_to_which_call(box: Box) -> None:
    for tool in ({"tool_call_id": None}, {"tool_call_id": ""}, {"name": "look"}):
        messages = history({"content": None}, {"name": "x", **tool})
        box.refused(CHAT, {"messages": messages}, "messages[2].tool_call_id")


def test_ct_3_an_empty_system_message_is_one(box: Box, reference: tokenizers.Tokenizer) -> None:
    found = []
    for system in (None, "", "x"):
        turns = [] if system is None else [("system", system)]
        turns.append(("user", "Are you there?"))
        messages = [{"role": role, "content": text} for role, text in turns]
        answer = box.ask(CHAT, {"messages": messages, "max_tokens": 1, "return_token_ids": True})
        assert answer["usage"]["prompt_tokens"] == count(reference, render(*turns))
        found.append(answer["prompt_token_ids"])
    assert len({tuple(ids) for ids in found}) == 3
    assert SYSTEM in reference.decode(found[0], skip_special_tokens=False)


def test_ct_4_the_template_speaks_for_itself(edge: Box) -> None:
    user = {"role": "user", "content": "Hi"}
    for system in ({"role": "system", "content": "x"}, {"role": "developer", "content": "x"}):
        error = edge.refused(CHAT, {"messages": [system, user]}, "messages")
        assert "no system role in this house" in error["message"]
    assert edge.ask(CHAT, {"messages": [user], "max_tokens": 1})["choices"]


def test_ct_4_templates_of_callers_are_off(box: Box) -> None:
    endless = (
        "{% for a in range(10**9) %}{% for b in range(10**9) %}{{ a }}{% endfor %}{% endfor %}"
    )
    box.refused(
        CHAT,
        {"messages": [{"role": "user", "content": "Hi"}], "chat_template": endless},
        "chat_template",
    )


def test_ct_4_a_broken_template_stops_the_start(smollm2_gguf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jinja"
    broken.write_text("{% for m in messages %}\n{{ m['content'] }}\n{% endfo %}\n")
    message = start_fails(str(smollm2_gguf), "--port", "0", "--chat-template", str(broken))
    assert "broken.jinja" in message
    assert "line 3" in message
