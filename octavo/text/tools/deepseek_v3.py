"""Calls of DeepSeek V3 and R1, and of V3.1: marks of special tokens around name and arguments.

V3 writes, after the mark that begins a call, `function`, a separator, the name on a line of its
own and the arguments in a fence of json; V3.1 writes the name, the separator and the arguments.
All calls stand between two more marks. Next file: `qwen3_xml.py`.
"""

from __future__ import annotations

from octavo.text.tools.call_object import NamedCall
from octavo.text.tools.events import find_marker
from octavo.text.tools.machine import MAX_HEAD, Machine

# The bars are U+FF5C, the low lines U+2581.
CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
FENCE = "```"
MARKS = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)


class DeepSeekV3Parser(Machine):
    """Both forms, told apart by what follows the separator."""

    _name = ""

    def _text(self) -> bool:
        found = self._until(CALLS_BEGIN, CALL_BEGIN)
        return bool(found) and self._next(self._calls_open if found == CALLS_BEGIN else self._head)

    def _calls_open(self) -> bool:
        found = self._skip(CALL_BEGIN)
        if found:
            return self._next(self._head)
        return found is not None and self._give_back()

    def _head(self) -> bool:
        """The kind (V3) or the name (V3.1), up to the separator."""
        at, found = find_marker(self._buffer, (SEPARATOR,))
        head = self._buffer[:at].strip()
        if at > MAX_HEAD or (found and not head):
            return self._give_back()
        if not found:
            return False
        self._take(at + len(SEPARATOR))
        self._name = head
        return self._next(self._body)

    def _body(self) -> bool:
        ahead = self._buffer.lstrip()
        if not ahead:
            return False
        if ahead[0] == "{":
            return self._open(NamedCall(self._calls, self._name))
        line, found, rest = ahead.partition("\n")
        if len(line) > MAX_HEAD:
            return self._give_back()
        if not found:
            return False
        self._take(len(self._buffer) - len(rest))
        self._name = line.strip()
        return self._next(self._fence)

    def _fence(self) -> bool:
        found = self._skip(FENCE + "json", "{")
        if found == "{":
            self._lead, self._buffer = self._lead[:-1], "{" + self._buffer
        if found:
            return self._open(NamedCall(self._calls, self._name))
        return found is not None and self._give_back()

    def _after_call(self) -> bool:
        self._lead = ""
        found = self._skip(FENCE, CALL_END)
        if found == FENCE:
            return True
        return found is not None and (self._next(self._following) if found else self._end())

    def _following(self) -> bool:
        """After a call: another one, the end of all, or text."""
        self._lead = ""
        found = self._skip(CALL_BEGIN, CALLS_END)
        if found == CALL_BEGIN:
            self._object = None
            return self._next(self._head)
        return found is not None and self._end()

    def _take(self, count: int) -> None:
        self._lead += self._buffer[:count]
        self._buffer = self._buffer[count:]
