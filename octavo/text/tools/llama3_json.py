"""Calls as plain objects: `{"name": "f", "parameters": {...}}`, several with `;` between.

The form of Llama 3.1 and 3.2, at the beginning of an answer or after `<|python_tag|>`. An answer
that is JSON and no call is content: an object is a call only if it has a name and parameters and
nothing else. Next file: `mistral.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.text.tools.call_object import CallObject
from octavo.text.tools.events import Calls
from octavo.text.tools.machine import Machine

TAG = "<|python_tag|>"
KEYS = frozenset({"type", "name", "parameters", "arguments", "id"})


class Llama3JsonParser(Machine):
    """See the module."""

    def __init__(self, calls: Calls) -> None:
        super().__init__(calls)
        self._state: Callable[[], bool] = self._start

    def _start(self) -> bool:
        found = self._skip(TAG, "{")
        if found == "{":
            return self._begin()
        return found is not None and self._next(self._tagged if found else self._text)

    def _text(self) -> bool:
        return bool(self._until(TAG)) and self._next(self._tagged)

    def _tagged(self) -> bool:
        found = self._skip("{")
        if found:
            return self._begin()
        return found is not None and self._give_back()

    def _begin(self) -> bool:
        """The bracket has been taken already; the object wants to see it."""
        self._lead, self._buffer = self._lead[:-1], "{" + self._buffer
        return self._open(CallObject(self._calls, keys=KEYS, needs_arguments=True))

    def _after_call(self) -> bool:
        self._lead = ""
        found = self._skip(";", "{", TAG)
        if found == "{":
            return self._begin()
        if found == ";":
            self._object = None
            return self._next(self._separated)
        return found is not None and (self._retag() if found else self._end())

    def _separated(self) -> bool:
        found = self._skip("{")
        if found:
            return self._begin()
        return found is not None and self._give_back()

    def _retag(self) -> bool:
        self._object = None
        return self._next(self._tagged)
