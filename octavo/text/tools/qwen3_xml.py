"""Calls of Qwen3-Coder: a tag for the function and one for each parameter.

    <tool_call>
    <function=f>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

Values are plain text. Those that the tool declares as strings are sent as they come; others wait
for their end and become JSON of the declared type, or a string if they are none.
Next file: `choose.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from octavo.text.tools.events import Calls, Event, find_marker
from octavo.text.tools.json_text import JsonText
from octavo.text.tools.machine import MAX_HEAD, Machine

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]+")


class Qwen3XmlParser(Machine):
    """`schemas` are the declared parameters by the name of their function."""

    def __init__(self, calls: Calls, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(calls)
        self._schemas = schemas
        self._index: int | None = None  # of the call that is open
        self._properties: Mapping[str, Any] = {}
        self._keys = 0
        self._begun = False  # of a streamed value

    def finish(self) -> list[Event]:
        """See `Parser`."""
        if self._index is not None:  # a call stays as far as it came
            self._buffer = self._lead = ""
        return super().finish()

    def _text(self) -> bool:
        found = self._until(OPEN, FUNCTION)
        return bool(found) and self._next(self._function if found == OPEN else self._name)

    def _function(self) -> bool:
        found = self._skip(FUNCTION)
        if found:
            return self._next(self._name)
        return found is not None and self._give_back()

    def _name(self) -> bool:
        name, found, rest = self._buffer.partition(">")
        if not _NAME.fullmatch(name.strip() or "?") or len(name) > MAX_HEAD:
            return self._give_back()
        if not found:
            return False
        if not name.strip():
            return self._give_back()
        self._buffer = rest
        self._lead = ""
        self._index = self._calls.start(name.strip())
        self._calls.arguments(self._index, "{")
        properties = self._schemas.get(name.strip(), {}).get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._keys = 0
        return self._next(self._parameter)

    def _parameter(self) -> bool:
        self._lead = ""
        found = self._skip(PARAMETER, FUNCTION_END, CLOSE)
        if found == PARAMETER:
            return self._next(self._key)
        if found is None:
            return False
        if found and self._index is not None:
            self._calls.arguments(self._index, "}")
            self._calls.end(self._index)
        self._index = None
        return self._end() if found in ("", CLOSE) else self._next(self._after_call)

    def _after_call(self) -> bool:
        self._lead = ""
        return self._skip(CLOSE) is not None and self._end()

    def _key(self) -> bool:
        key, found, rest = self._buffer.partition(">")
        if len(key) > MAX_HEAD:
            self._index = None
            self._lead = PARAMETER
            return self._give_back()
        if not found:
            return False
        self._buffer = rest
        key = key.strip()
        self._send((", " if self._keys else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys += 1
        self._begun = False
        schema = self._properties.get(key)
        return self._next(self._string if _is_string(schema) else self._whole_value)

    def _string(self) -> bool:
        """A value that is sent as it comes, without the line breaks at its ends."""
        if not self._begun:
            self._begun = True
            self._buffer = self._buffer.removeprefix("\n")
            self._send('"')
            return True
        at, marker = find_marker(self._buffer, (PARAMETER_END,))
        text = self._buffer[:at]
        if text.endswith("\n"):
            text = text[:-1]
        self._send(_escaped(text))
        if not marker:
            self._buffer = self._buffer[len(text) :]
            return False
        self._buffer = self._buffer[at + len(marker) :]
        self._send('"')
        return self._next(self._parameter)

    def _whole_value(self) -> bool:
        text, found, rest = self._buffer.partition(PARAMETER_END)
        if not found:
            return False
        self._buffer = rest
        self._send(_as_json(text.removeprefix("\n").removesuffix("\n")))
        return self._next(self._parameter)

    def _send(self, text: str) -> None:
        assert self._index is not None
        self._calls.arguments(self._index, text)


def _is_string(schema: object) -> bool:
    if not isinstance(schema, dict):
        return False
    if "type" in schema:
        return bool(schema["type"] == "string")
    choices = schema.get("enum")
    return isinstance(choices, list) and all(isinstance(one, str) for one in choices)


def _as_json(text: str) -> str:
    """The value that a text stands for, as JSON."""
    part = JsonText()
    stripped = text.strip()
    at = part.push(stripped)
    part.end()
    return part.take() if part.done and at == len(stripped) else f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
