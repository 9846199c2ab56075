"""`CallObject`: one call written as a JSON object with a name and arguments.

Most families write calls so, with different marks around. The keys may come in any order; the
call is announced when its name is known and its arguments have begun. Arguments that are given
as a text of JSON are unpacked, null is no arguments. Not for: what stands around the object.
Next file: `hermes.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from octavo.text.tools.events import Calls
from octavo.text.tools.json_text import JsonText

ARGUMENTS = ("arguments", "parameters")


class CallObject:
    """One object. `done` at its closing bracket, `broken` where it cannot go on.

    After `broken`, `rest` is the text that is in no event: all of it if the call was not
    announced. `keys` limits what the object may hold, so that an answer in JSON is told from a
    call early; `needs_arguments` says that an object without any is no call.
    """

    def __init__(
        self, calls: Calls, *, keys: Collection[str] = (), needs_arguments: bool = False
    ) -> None:
        self.done = False
        self.broken = False
        self._calls = calls
        self._keys = keys
        self._needs_arguments = needs_arguments
        self._raw: list[str] = []  # all text until the call is announced
        self._index: int | None = None  # of the announced call
        self._name: str | None = None
        self._key = ""
        self._part = JsonText()
        self._taken: list[str] = []  # output of `_part` that is kept here
        self._early: str | None = None  # arguments that came before the name
        self._complete = False  # all arguments have been sent
        self._state: Callable[[str, int], int] = self._open

    @property
    def announced(self) -> bool:
        """True once the call has been given as an event."""
        return self._index is not None

    @property
    def rest(self) -> str:
        """Text that is in no event; to be asked for once, when the object has broken or ended."""
        if not self.announced:
            return "".join(self._raw)
        return "" if self._complete else self._part.held

    def push(self, text: str, at: int = 0) -> int:
        """Takes `text` from `at` on; the place of the first character that is not part of it."""
        while at < len(text) and not self.done and not self.broken:
            start = at
            at = self._state(text, at)
            if not self.announced:
                self._raw.append(text[start:at])
        return at

    def _open(self, text: str, at: int) -> int:
        return self._mark(text, at, {"{": self._key_or_end})

    def _key_or_end(self, text: str, at: int) -> int:
        return self._mark(text, at, {'"': self._key_text, "}": None})

    def _next_key(self, text: str, at: int) -> int:
        return self._mark(text, at, {'"': self._key_text})

    def _colon(self, text: str, at: int) -> int:
        return self._mark(text, at, {":": self._value})

    def _comma_or_end(self, text: str, at: int) -> int:
        return self._mark(text, at, {",": self._next_key, "}": None})

    def _mark(self, text: str, at: int, after: dict[str, Callable[[str, int], int] | None]) -> int:
        """White space and one of the marks in `after`, which says what follows; None is the end."""
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        if at == len(text):
            return at
        letter = text[at]
        if letter not in after:
            self.broken = True
            return at
        following = after[letter]
        if following is None:
            self._finish()
            return at if self.broken else at + 1
        self._state = following
        if letter == '"':
            self._begin_part()
            self._part.push('"')
        elif letter == ":":
            self._begin_part()
        return at + 1

    def _begin_part(self) -> None:
        self._part = JsonText()
        self._taken.clear()

    def _key_text(self, text: str, at: int) -> int:
        at = self._part.push(text, at)
        if self._part.done:
            self._key = json.loads(self._part.take())
            self._state = self._colon
            self.broken = bool(self._keys) and self._key not in self._keys
        return at

    def _value(self, text: str, at: int) -> int:
        if self._key in ARGUMENTS and not self._complete and self._early is None:
            return self._arguments(text, at)
        at = self._part.push(text, at)
        if self._part.broken:
            self.broken = True
        elif self._part.done:
            value = self._part.take()
            if self._key == "name" and self._name is None:
                self._take_name(json.loads(value))
            self._state = self._comma_or_end
        return at

    def _take_name(self, name: object) -> None:
        if not isinstance(name, str) or not name:
            self.broken = True
            return
        self._name = name
        if self._early is not None:
            self._send_whole(self._early)

    def _arguments(self, text: str, at: int) -> int:
        at = self._part.push(text, at)
        self._taken.append(self._part.take())
        streams = self._name is not None and (
            self.announced or next(filter(None, self._taken), "").startswith("{")
        )
        if streams:
            self._announce()
            self._send()
        if self._part.broken:
            self.broken = True
        elif self._part.done:
            self._state = self._comma_or_end
            if streams:
                self._end_call()
            else:
                self._take_whole("".join(self._taken))
        return at

    def _take_whole(self, value: str) -> None:
        """Arguments that came before the name, or are no object themselves."""
        found = unpacked(value)
        if found is None:
            self.broken = True
        elif self._name is None:
            self._early = found
        else:
            self._send_whole(found)

    def _send_whole(self, arguments: str) -> None:
        self._announce()
        assert self._index is not None
        self._calls.arguments(self._index, arguments)
        self._end_call()

    def _announce(self) -> None:
        if self._index is None:
            assert self._name is not None
            self._index = self._calls.start(self._name)
            self._raw.clear()

    def _send(self) -> None:
        assert self._index is not None
        self._calls.arguments(self._index, "".join(self._taken))
        self._taken.clear()

    def _end_call(self) -> None:
        assert self._index is not None
        self._calls.end(self._index)
        self._complete = True

    def _finish(self) -> None:
        """The closing bracket: a name alone is a call without arguments."""
        if self._name is None or (self._needs_arguments and not self._complete):
            self.broken = True
            return
        if not self._complete:
            self._send_whole("{}")
        self.done = True


def unpacked(value: str) -> str | None:
    """Arguments in JSON as the text of an object; None if they are none."""
    loaded = json.loads(value)
    if loaded is None:
        return "{}"
    if isinstance(loaded, dict):
        return value
    if not isinstance(loaded, str):
        return None
    part = JsonText()
    at = part.push(loaded)
    text = part.take()
    whole = part.done and text.startswith("{") and not loaded[at:].strip()
    return text if whole else ("{}" if not loaded.strip() else None)


class NamedCall:
    """The arguments of a call whose name is known: an object, and nothing around it.

    Has what `CallObject` has. Announced at the object's opening bracket.
    """

    def __init__(self, calls: Calls, name: str) -> None:
        self.done = False
        self.broken = False
        self._calls = calls
        self._name = name
        self._index: int | None = None
        self._part = JsonText()
        self._space = ""

    @property
    def announced(self) -> bool:
        """True once the call has been given as an event."""
        return self._index is not None

    @property
    def rest(self) -> str:
        """Text that is in no event, after the object has broken."""
        return self._part.held if self.announced else self._space

    def push(self, text: str, at: int = 0) -> int:
        """Takes `text` from `at` on; the place of the first character that is not part of it."""
        if self._index is None:
            start = at
            while at < len(text) and text[at].isspace():
                at += 1
            self._space += text[start:at]
            if at == len(text):
                return at
            if text[at] != "{":
                self.broken = True
                return at
            self._index = self._calls.start(self._name)
        at = self._part.push(text, at)
        self._calls.arguments(self._index, self._part.take())
        self.done, self.broken = self._part.done, self._part.broken
        if self.done:
            self._calls.end(self._index)
        return at
