"""Chat templates in the form of each family's: the same prompt as transformers makes of them."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.errors import InvalidRequest
from octavo.text.chat import ChatTemplate, validate_messages
from tests.text.family_templates import TEMPLATES
from tests.text.samples import chat_tokenizer

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENIZER = chat_tokenizer(named=NAMED)
ARGUMENTS = {"at": "sea 🦉", "deep": [1, 2.5, None, True], "quoted": "<\"&'>"}
ARGUMENTS_TEXT = '{"at": "sea", "n": 1}'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks <at> what's there & 日本",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    }
]


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def calls(arguments: object) -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    return [{"id": "abcdef123", "type": "function", "function": function}]


PLAIN = [turn("user", " Hi <b> \n"), turn("assistant", "Ho."), turn("user", "日本語 & 🦉?")]
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": PLAIN[:1],
    "three": PLAIN,
    "system": [turn("system", "Be\n\nbrief. "), *PLAIN],
    "thought": [*PLAIN[:1], turn("assistant", "<think>\nhm\n</think>\n\nHo."), PLAIN[2]],
    "last thought": [*PLAIN, turn("assistant", "<think>\nhm\n</think>\n\nHo.")],
    "roles twice": [PLAIN[0], PLAIN[2]],
}
USED = ("qwen3", "llama", "mistral", "glm", "deepseek")


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """transformers' prompt; None if the template refuses."""
    tools = options.pop("tools", None)
    try:
        prompts, _ = render_jinja_template(
            conversations=[messages], tools=tools, chat_template=source, **NAMED, **options
        )
    except jinja2.TemplateError:
        return None
    return str(prompts[0])


def ours(source: str, messages: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return ChatTemplate(source, TOKENIZER).render(validate_messages(messages), **options).text
    except InvalidRequest:
        return None


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("open_", [True, False])
def test_talk(family: str, talk: str, open_: bool) -> None:
    source, messages = TEMPLATES[family], TALKS[talk]
    expected = theirs(source, messages, add_generation_prompt=open_)
    assert ours(source, messages, add_generation_prompt=open_) == expected
    refuses = talk == "roles twice" and family in ("mistral", "mixtral", "gemma")
    refuses |= talk == "system" and family == "mixtral"
    assert (expected is None) == refuses


@pytest.mark.parametrize("family", USED)
@pytest.mark.parametrize("declared", [True, False])
def test_tools(family: str, declared: bool) -> None:
    arguments = ARGUMENTS_TEXT if family == "deepseek" else ARGUMENTS
    called = {"role": "assistant", "tool_calls": calls(arguments)}
    if family not in ("llama", "mistral"):
        called["content"] = ""
    answer = turn("tool", "3", tool_call_id="abcdef123")
    messages = [PLAIN[0], called, answer, turn("assistant", "Seen."), PLAIN[2]]
    tools = TOOLS if declared else None
    expected = theirs(TEMPLATES[family], messages, tools=tools, add_generation_prompt=True)
    assert expected is not None
    assert "look" in expected
    if declared and family == "deepseek":  # it does not show tools, so they are refused
        expected = None
    assert ours(TEMPLATES[family], messages, tools=tools) == expected


@pytest.mark.parametrize("family", ["qwen3", "glm"])
@pytest.mark.parametrize("think", [True, False])
def test_switches(family: str, think: bool) -> None:
    expected = theirs(TEMPLATES[family], PLAIN, add_generation_prompt=True, enable_thinking=think)
    found = ours(TEMPLATES[family], PLAIN, kwargs={"enable_thinking": think})
    assert found == expected
    assert found is not None
    assert found.rstrip().endswith("</think>") is not think
