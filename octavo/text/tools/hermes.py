"""Calls between tags: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`.

The form of Hermes 2 Pro, which Qwen 2.5, Qwen 3 and many others follow. Next file:
`llama3_json.py`.
"""

from __future__ import annotations

from octavo.text.tools.call_object import CallObject
from octavo.text.tools.machine import Machine

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(Machine):
    """A closing tag that is missing is no fault: the object says where a call ends."""

    def _text(self) -> bool:
        return bool(self._until(OPEN)) and self._open(CallObject(self._calls))

    def _after_call(self) -> bool:
        return self._skip(CLOSE) is not None and self._end()
