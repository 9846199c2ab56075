"""Calls after a mark: `[TOOL_CALLS] [{"name": "f", "arguments": {...}}]`, or by name.

The list is the older form of Mistral models; newer ones write `[TOOL_CALLS]f{...}`, or
`[TOOL_CALLS]f[ARGS]{...}` with an optional `[CALL_ID]` before the arguments. Their templates want
ids of nine letters and digits, so an id that the model wrote is replaced. Next file:
`deepseek_v3.py`.
"""

from __future__ import annotations

import re

from octavo.text.tools.call_object import CallObject, NamedCall
from octavo.text.tools.events import find_marker
from octavo.text.tools.machine import MAX_HEAD, Machine

MARK, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"\s*([^\s\"{}\[\]]+)\s*")


class MistralParser(Machine):
    """All three forms, told apart by what follows the mark."""

    _in_list = False
    _name = ""

    def _text(self) -> bool:
        return bool(self._until(MARK)) and self._next(self._opening)

    def _opening(self) -> bool:
        self._in_list = False
        found = self._skip("[", "{")
        if found == "[":
            self._in_list = True
            return self._next(self._item)
        if found == "{":
            return self._begin()
        return found is not None and self._next(self._head)

    def _item(self) -> bool:
        found = self._skip("{", "]")
        if found == "{":
            return self._begin()
        return found is not None and (self._end() if found else self._give_back())

    def _begin(self) -> bool:
        self._lead, self._buffer = self._lead[:-1], "{" + self._buffer
        return self._open(CallObject(self._calls))

    def _after_call(self) -> bool:
        if not self._in_list:
            return self._end()
        self._lead = ""
        found = self._skip(",", "]")
        if found == ",":
            self._object = None
            return self._next(self._item)
        return found is not None and self._end()

    def _head(self) -> bool:
        """A name, up to its arguments."""
        at, marker = find_marker(self._buffer, ("{", ARGS, CALL_ID))
        head = self._buffer[:at]
        match = _NAME.fullmatch(head)
        if (head.strip() and match is None) or len(head) > MAX_HEAD or (marker and match is None):
            return self._give_back()
        if not marker or match is None:
            return False
        self._name = match.group(1)
        taken = at if marker == "{" else at + len(marker)
        self._lead += self._buffer[:taken]
        self._buffer = self._buffer[taken:]
        if marker == CALL_ID:
            return self._next(self._id)
        return self._open(NamedCall(self._calls, self._name))

    def _id(self) -> bool:
        at, marker = find_marker(self._buffer, (ARGS,))
        if at > MAX_HEAD:
            return self._give_back()
        if not marker:
            return False
        self._lead += self._buffer[: at + len(marker)]
        self._buffer = self._buffer[at + len(marker) :]
        return self._open(NamedCall(self._calls, self._name))
