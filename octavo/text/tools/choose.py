"""The families of tool calls by name, and which one a model writes.

A family says how to read its calls and how to force one: the text before and after arguments in
JSON, for which the engine makes a grammar. To add a family: a parser in a file of its own and
an entry in `FAMILIES`. Not for: grammars. Next file: `text/reasoning.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.text.tools import deepseek_v3
from octavo.text.tools.declare import Tool
from octavo.text.tools.deepseek_v3 import DeepSeekV3Parser
from octavo.text.tools.events import Calls, Parser, call_id, short_call_id
from octavo.text.tools.hermes import HermesParser
from octavo.text.tools.llama3_json import TAG, Llama3JsonParser
from octavo.text.tools.mistral import ARGS, CALL_ID, MARK, MistralParser
from octavo.text.tools.qwen3_xml import FUNCTION, Qwen3XmlParser

AUTO = "auto"
_NAME = "NAME"  # stands for the name of the function


@dataclass(frozen=True, slots=True)
class Family:
    """How models of one kind write calls."""

    make: Callable[[Calls, Sequence[Tool]], Parser]
    begin: str  # of a forced call, up to its arguments, with NAME in it
    end: str
    separator: str = ""  # between two forced calls
    trigger: str = ""  # text that only calls begin with; empty if there is none
    markers: tuple[str, ...] = ()  # which may be special tokens
    make_id: Callable[[], str] = call_id
    make_forced: Callable[[Calls, Sequence[Tool]], Parser] | None = None  # if it differs

    def marks(self, tool: Tool) -> tuple[str, str]:
        """The texts before and after the arguments of a call of `tool`."""
        return self.begin.replace(_NAME, tool.name), self.end

    def parser(
        self, tools: Sequence[Tool], *, forced: bool = False, only_first: bool = False
    ) -> Parser:
        """A reader of one answer, which is nothing but calls if they are `forced`."""
        make = self.make_forced if forced and self.make_forced else self.make
        return make(Calls(self.make_id, only_first=only_first), tools)


def _qwen3_xml(calls: Calls, tools: Sequence[Tool]) -> Parser:
    return Qwen3XmlParser(calls, {tool.name: tool.parameters for tool in tools})


HERMES = Family(
    make=lambda calls, tools: HermesParser(calls),
    begin='<tool_call>\n{"name": "NAME", "arguments": ',
    end="}\n</tool_call>",
    separator="\n",
    trigger="<tool_call>",
    markers=("<tool_call>", "</tool_call>"),
)
_LLAMA3 = Family(
    make=lambda calls, tools: Llama3JsonParser(calls),
    begin='{"name": "NAME", "parameters": ',
    end="}",
    separator="; ",
    markers=(TAG,),
)
_MISTRAL = Family(
    make=lambda calls, tools: MistralParser(calls),
    begin='[TOOL_CALLS] [{"name": "NAME", "arguments": ',
    end="}]",
    trigger=MARK,
    markers=(MARK, ARGS, CALL_ID),
    make_id=short_call_id,
)
_DEEPSEEK = Family(
    make=lambda calls, tools: DeepSeekV3Parser(calls),
    begin=(
        f"{deepseek_v3.CALLS_BEGIN}{deepseek_v3.CALL_BEGIN}function{deepseek_v3.SEPARATOR}NAME\n"
        "```json\n"
    ),
    end=f"\n```{deepseek_v3.CALL_END}{deepseek_v3.CALLS_END}",
    trigger=deepseek_v3.CALLS_BEGIN,
    markers=deepseek_v3.MARKS,
)
_DEEPSEEK_31 = replace(
    _DEEPSEEK,
    begin=(f"{deepseek_v3.CALLS_BEGIN}{deepseek_v3.CALL_BEGIN}NAME{deepseek_v3.SEPARATOR}"),
    end=f"{deepseek_v3.CALL_END}{deepseek_v3.CALLS_END}",
)
_MISTRAL_ARGS = replace(_MISTRAL, begin="[TOOL_CALLS]NAME[ARGS]", end="")
# Its arguments are no JSON, so a forced call is written in the form of Hermes.
_QWEN3_XML = replace(HERMES, make=_qwen3_xml, make_forced=HERMES.make, trigger="")

FAMILIES: dict[str, Family] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen3_xml": _QWEN3_XML,
    "qwen3_coder": _QWEN3_XML,
    "llama3_json": _LLAMA3,
    "mistral": _MISTRAL,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK_31,
}
NAMES = (AUTO, *FAMILIES)


def family_of(name: str | None, template: str) -> Family | None:
    """The family that an operator named, or the one whose marks stand in the model's template.

    None if nothing was named and no marks are known there.
    """
    found = None if name in (None, AUTO) else FAMILIES[str(name)]
    if found is None:
        found = _guessed(template)
    if found is _MISTRAL and ARGS in template:
        return _MISTRAL_ARGS
    return found


def _guessed(template: str) -> Family | None:
    if deepseek_v3.CALLS_BEGIN in template:
        in_fence = "```json" in template
        return _DEEPSEEK if in_fence else _DEEPSEEK_31
    if MARK in template:
        return _MISTRAL
    if FUNCTION in template:
        return _QWEN3_XML
    if "<tool_call>" in template:
        return HERMES
    if TAG in template or "<|start_header_id|>" in template:
        return _LLAMA3
    return None
