"""From what a caller demands to the text of a grammar, in the library's form of Lark.

White space between the tokens of JSON is at most one space, or one line end with an indent, so that
an answer can be read and cannot run into blanks. Not for: whether the text compiles (`check.py`,
the next file).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import llguidance
import msgspec

from octavo.grammar.request import Form, Preamble, StructuralTag, StructuredOutputs
from octavo.grammar.schema import SchemaError, normalize

MAX_SCHEMA = 2**18  # characters
MAX_BREAKS = 4  # line breaks between a model's thought and its answer
WHITE_SPACE = r"(\n {0,24}|\n\t{0,8}| )?"


class GrammarError(Exception):
    """Why no grammar can be made of a demand; the field is in the message."""


def form_of(wanted: StructuredOutputs, special: Mapping[str, int]) -> Form:
    """The grammar of a demand; `special` are the texts of special tokens. Raises GrammarError."""
    marks = Marks(special)
    text = _text_of(wanted, marks)
    if wanted.preamble is not None:
        return Form(_after(wanted.preamble, text, marks))
    return Form(text, json=wanted.json is not None or bool(wanted.json_object))


def _text_of(wanted: StructuredOutputs, marks: Marks) -> str:
    if wanted.json is not None:
        return _json_grammar(read_schema(wanted.json), wanted)
    if wanted.json_object:
        return _json_grammar({"type": "object"}, wanted)
    if wanted.regex is not None:
        return _regex(wanted.regex)
    if wanted.choice is not None:
        return "start: " + " | ".join(map(_quoted, dict.fromkeys(wanted.choice)))
    if wanted.grammar is not None:
        return _grammar(wanted.grammar)
    tags = wanted.structural_tag
    assert isinstance(tags, StructuralTag), "checked when the record was made"
    return _tagged(tags, wanted, marks)


def _after(preamble: Preamble, text: str, marks: Marks) -> str:
    """A grammar of free text, its end, and what `text` is the grammar of."""
    lazy = "" if marks.starts_special(preamble.end) else "[lazy]"
    thought = f"{marks.lark(preamble.begin)} thought" if preamble.begin else "thought"
    optional = "?" if preamble.begin else ""
    outer = "\n".join(
        (
            f"start: ({thought} BREAKS){optional} @form",
            f"thought{lazy}: TEXT {marks.lark(preamble.end)}",
            rf"BREAKS: /\n{{0,{MAX_BREAKS}}}/",
            r"TEXT: /(.|\n)*/",
        )
    )
    inner = json.loads(text)["grammars"][0] if text.startswith("{") else {"lark_grammar": text}
    return json.dumps({"grammars": [{"lark_grammar": outer}, {**inner, "name": "form"}]})


def read_schema(value: str | dict[str, Any] | bool) -> Any:
    """A schema, from its text if it is one."""
    if not isinstance(value, str):
        if len(msgspec.json.encode(value)) > MAX_SCHEMA:
            raise GrammarError(f"json: the schema is too large; use at most {MAX_SCHEMA} bytes")
        return value
    if len(value) > MAX_SCHEMA:
        raise GrammarError(f"json: the schema is too large; use at most {MAX_SCHEMA} characters")
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"json: the text is no JSON schema: {error}") from None


def _json_grammar(schema: Any, wanted: StructuredOutputs) -> str:
    return json.dumps({"grammars": [{"json_schema": _ready(schema, wanted, "json")}]})


def _ready(schema: Any, wanted: StructuredOutputs, field: str) -> dict[str, Any]:
    """The schema as it is compiled, with the library's own options in it."""
    try:
        made = normalize(schema, additional=not wanted.disable_additional_properties)
    except SchemaError as error:
        raise GrammarError(f"{field}: {error}") from None
    options: dict[str, Any] = {"whitespace_pattern": WHITE_SPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    return {**made, "x-guidance": options}


def _regex(pattern: str) -> str:
    if not pattern:
        raise GrammarError("regex: it is empty; name what the answer may be")
    # As in JSON Schema, \d and \w are of ASCII: what other dialects take for one is one too.
    return f"start: /{llguidance.regex_to_lark(pattern, 'dw')}/"


def _grammar(text: str) -> str:
    if not text.strip():
        raise GrammarError("grammar: it is empty; define the rule start")
    if text.lstrip().startswith("{"):
        raise GrammarError("grammar: it is JSON; send Lark or GBNF, or use the field json")
    if "lenient" in text or "coerce_one_of" in text:
        raise GrammarError("grammar: options that let keywords pass are not allowed")
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        made: str = any_to_lark(text)
    except Exception as error:  # whatever the converter met
        raise GrammarError(f"grammar: it is no GBNF: {str(error)[:200]}") from None
    return made


def _tagged(tags: StructuralTag, wanted: StructuredOutputs, marks: Marks) -> str:
    lines: list[str] = []
    bodies: dict[str, list[str]] = {}  # rules of the tags that follow each trigger
    for index, tag in enumerate(tags.tags):
        trigger = _trigger(tags, tag.begin)
        schema = _ready(tag.schema, wanted, f"structural_tag, tag {tag.begin[:40]!r}")
        begin, end = marks.lark(tag.begin[len(trigger) :]), marks.lark(tag.end)
        body = '"{}"' if _takes_nothing(tag.schema) else f"%json {json.dumps(schema)}"
        lines.append(f"tag_{index}: {begin} {body} {end}")
        bodies.setdefault(trigger, []).append(f"tag_{index}")
    for index, (trigger, names) in enumerate(bodies.items()):
        if not tags.free_text:
            lines.append(f"group_{index}: " + " | ".join(names))
            continue
        # A lazy lexeme ends where the trigger does; a special token is none of the text before it.
        lazy = "" if marks.starts_special(trigger) else "[lazy]"
        lines.append(f"trigger_{index}{lazy}: TEXT {marks.lark(trigger)}")
        lines.append(f"group_{index}: trigger_{index} ({' | '.join(names)})")
    any_tag = "(" + " | ".join(f"group_{index}" for index in range(len(bodies))) + ")"
    start = _order_of_tags(tags, any_tag, marks.lark(tags.separator))
    if tags.free_text:
        lines += ["tail: TEXT", r"TEXT: /(.|\n)*/"]
    return "\n".join([f"start: {start}", *lines])


def _takes_nothing(schema: object) -> bool:
    """True for an object that can have no property; it is written without any white space."""
    if not isinstance(schema, dict):
        return False
    open_to = (schema.get("properties"), schema.get("patternProperties"), schema.get("required"))
    closed = schema.get("type") == "object" and schema.get("additionalProperties") is False
    return closed and not any(open_to)


def _order_of_tags(tags: StructuralTag, any_tag: str, separator: str) -> str:
    if tags.free_text:
        if tags.stop_after_first:
            return any_tag if tags.at_least_one else f"{any_tag} | tail"
        return f"{any_tag}{'+' if tags.at_least_one else '*'} tail"
    some = any_tag if tags.stop_after_first else f"{any_tag} ({separator} {any_tag})*"
    return some if tags.at_least_one else f"({some})?"


def _trigger(tags: StructuralTag, begin: str) -> str:
    """The longest trigger that a tag begins with; none if there is no text before tags."""
    if not tags.free_text:
        return ""
    return max((t for t in tags.triggers if t and begin.startswith(t)), key=len)


class Marks:
    """Texts in Lark, where those of special tokens become these tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        words = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else None

    def lark(self, text: str) -> str:
        """The text as a sequence of Lark's literals."""
        parts, at = [], 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            if match.start() > at:
                parts.append(_quoted(text[at : match.start()]))
            parts.append(f"<[{self._special[match.group()]}]>")
            at = match.end()
        if at < len(text):
            parts.append(_quoted(text[at:]))
        return " ".join(parts)

    def starts_special(self, text: str) -> bool:
        """True if the text begins with a special token's."""
        return self._pattern is not None and self._pattern.match(text) is not None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
