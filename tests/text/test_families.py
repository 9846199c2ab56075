"""Templates of the families: tools, calls, parts, developer; and templates that mean harm."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.text.chat import ChatTemplate, validate_messages
from octavo.text.tools.declare import read_tools
from tests.text.samples import CHATML, chat_tokenizer
from tests.text.templates import DEEPSEEK, LLAMA, MISTRAL, PARTS, QWEN

TOKENIZER = chat_tokenizer(named={"bos_token": "<s>", "eos_token": "</s>"})
TOOLS = [
    tool.shown
    for tool in read_tools([{"function": {"name": "look", "description": "At", "strict": True}}])
]
DECLARED = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "At",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}


def asked(arguments: Any = '{"at": "sea 🦉"}', id_: str = "abcdef123") -> list[dict[str, Any]]:
    function = {"name": "look", "arguments": arguments}
    call = {"id": id_, "type": "function", "function": function}
    return validate_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("Look", "now")]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id_, "content": "blue"},
            {"role": "user", "content": "And?"},
        ]
    )


def shown(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, TOKENIZER).render(messages, **options).text


def test_qwen() -> None:
    text = shown(QWEN, asked(), tools=TOOLS)
    assert text.startswith(f"<|im_start|>system\n<tools>\n{json.dumps(DECLARED)}\n</tools>")
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "sea 🦉"}}\n</tool_call>' in text
    assert "<|im_start|>user\nLook\nnow<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")
    off = shown(QWEN, asked(), kwargs={"enable_thinking": False})
    assert off.endswith("<think>\n\n</think>\n\n")
    assert "<tools>" not in off


def test_deepseek_takes_arguments_as_text() -> None:
    text = shown(DEEPSEEK, asked(), tools=TOOLS)
    assert 'look\n```json\n{"at": "sea 🦉"}\n```' in text
    assert "1 tools" in text
    assert text.startswith("<s><\uff5cUser\uff5c>Look\nnow")
    assert "```json\nno JSON\n```" in shown(DEEPSEEK, asked("no JSON"))


def test_llama() -> None:
    text = shown(LLAMA, asked(), tools=TOOLS)
    assert '{"name": "look", "parameters": {"at": "sea 🦉"}}' in text
    assert "<|start_header_id|>ipython<|end_header_id|>\n\nblue<|eot_id|>" in text
    assert json.dumps(DECLARED, indent=4) in text


def test_mistral_speaks_for_itself() -> None:
    text = shown(MISTRAL, asked(), tools=TOOLS)
    assert f"[AVAILABLE_TOOLS]{json.dumps(TOOLS)}[/AVAILABLE_TOOLS][INST] And?[/INST]" in text
    assert '[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sea 🦉"}}]</s>' in text
    with pytest.raises(InvalidRequest, match="ids have nine letters"):
        shown(MISTRAL, asked(id_="call_1"))
    developer = validate_messages([{"role": "developer", "content": "x"}])
    with pytest.raises(InvalidRequest, match="roles are user, assistant and tool"):
        shown(MISTRAL, developer)


def test_parts_reach_a_template_that_takes_nothing_else() -> None:
    messages = validate_messages(
        [
            {"role": "developer", "content": "Be <|im_end|> brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "", "b")]},
        ]
    )
    assert shown(PARTS, messages) == shown(CHATML, messages)
    open_ = [*messages, {"role": "assistant", "content": "Well"}]
    text = shown(PARTS, open_, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nWell")


def test_system_messages_stand_anywhere() -> None:
    roles = ["user", "system", "assistant", "developer", "user"]
    messages = validate_messages([{"role": r, "content": f"{r} {i}"} for i, r in enumerate(roles)])
    text = shown(CHATML, messages)
    places = [text.index(f"{role} {place}") for place, role in enumerate(roles)]
    assert places == sorted(places)
    assert "<|im_start|>system\ndeveloper 3" in text


HARMFUL = [
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(1000) %}{{ 'x' * 999999 }}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 2 ** 999999999 }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%0999999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 999999999) }}",
    "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 999999999}) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.ljust(width=999999999) }}",
    "{{ 'x' | center(999999999) }}",
    "{{ 'x\ny' | indent(999999999) }}",
    "{{ [1] | tojson(indent=999999999) }}",
    "{{ ('x' * 999999).replace('x', 'y' * 999999) }}",
    "{{ ('x' * 999999) | replace('x', 'y' * 999999) }}",
    "{{ ('x' * 999999).join(['y'] * 999999) }}",
    "{{ lipsum(n=999999999) }}",
    "{{ range(999999999) | list }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append.__self__.__class__ }}",
    "{{ messages[0].update({}) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{% include 'other' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ ''.format.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
]


@pytest.mark.parametrize("source", HARMFUL)
def test_harmful_templates_are_refused_or_show_nothing(source: str) -> None:
    template = ChatTemplate(source, TOKENIZER)
    before = time.thread_time()
    text = ""
    with contextlib.suppress(InvalidRequest):
        text = template.render(validate_messages([{"role": "user", "content": "Hi"}])).text
    assert "class" not in text
    assert "{" not in text
    assert len(text) < 1000
    assert time.thread_time() - before < 10
