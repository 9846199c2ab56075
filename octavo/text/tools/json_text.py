"""`JsonText`: takes JSON as models write it, piece by piece, and gives valid JSON.

What it gives joined is the beginning of a valid text at any moment. What models often write and
JSON does not know is mended where no meaning is lost: raw control characters in strings, escapes
that do not exist (`\\d` is a backslash and a letter), the words True, False and None, a comma
before a closing bracket, half a surrogate pair. Anything else ends the text as `broken`.
Numbers and words come in one piece, since only their end shows what they are. Not for: values in
Python; nothing here is evaluated. Next file: `call_object.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 128

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # inside a string
_SCALAR = re.compile(r"[A-Za-z0-9+.\-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {
    "true": "true",
    "false": "false",
    "null": "null",
    "True": "true",
    "False": "false",
    "None": "null",
}
_MAX_SCALAR = 512  # characters


class JsonText:
    """One value. `done` once it is complete, `broken` once it cannot become one."""

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self._out: list[str] = []
        self._held = ""  # taken, and not yet known what it is
        self._stack: list[str] = []  # closing brackets that are due
        self._high = ""  # first half of a surrogate pair, as an escape
        self._in_key = False  # of the string that is being read
        self._state: Callable[[str, int], int] = self._value

    def push(self, text: str, at: int = 0) -> int:
        """Takes `text` from `at` on; the place of the first character that is not part of it."""
        while at < len(text) and not self.done and not self.broken:
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """What is certain and was not taken before."""
        out = "".join(self._out)
        self._out.clear()
        return out

    def end(self) -> None:
        """No more text comes: a number or word that stands alone is complete now."""
        if not self.done and not self.broken and not self._stack and self._held:
            self._close_scalar()

    @property
    def held(self) -> str:
        """What was taken and is in no output, as it was written."""
        return self._high + self._held

    # Each state takes characters from `at` on and gives the place where it stopped.

    def _value(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at == len(text):
            return at
        letter = text[at]
        if letter in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._break(at)
            self._stack.append("}" if letter == "{" else "]")
            self._out.append(letter)
            self._state = self._first_key if letter == "{" else self._first_item
        elif letter == '"':
            self._out.append(letter)
            self._state = self._string
            self._in_key = False
        elif letter.isascii() and (letter.isalnum() or letter == "-"):
            self._state = self._scalar
            return at
        else:
            return self._break(at)
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at < len(text) and text[at] == "]":
            return self._close(at)
        self._state = self._first_item if at == len(text) else self._value
        return at

    def _first_key(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at < len(text) and text[at] == "}":
            return self._close(at)
        return self._key(text, at)

    def _key(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._break(at)
        self._out.append('"')
        self._in_key = True
        self._state = self._string
        return at + 1

    def _colon(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._break(at)
        self._out.append(":")
        self._state = self._value
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = self._skip(text, at)
        if at == len(text):
            return at
        if text[at] == self._stack[-1]:
            return self._close(at)
        if text[at] != ",":
            return self._break(at)
        self._held = ","  # it may stand before a closing bracket
        self._state = self._after_comma
        return at + 1

    def _after_comma(self, text: str, at: int) -> int:
        end = _run(_SPACE, text, at)
        self._held += text[at:end]
        if end == len(text):
            return end
        if text[end] == self._stack[-1]:
            self._out.append(self._held[1:])
            self._held = ""
            return self._close(end)
        self._out.append(self._held)
        self._held = ""
        self._state = self._key if self._stack[-1] == "}" else self._value
        return end

    def _scalar(self, text: str, at: int) -> int:
        end = _run(_SCALAR, text, at)
        self._held += text[at:end]
        if len(self._held) > _MAX_SCALAR:
            return self._break(end)
        if end < len(text):
            self._close_scalar()
        return end

    def _close_scalar(self) -> None:
        word = _WORDS.get(self._held)
        if word is None and _NUMBER.fullmatch(self._held):
            word = self._held
        if word is None:
            self.broken = True
            return
        self._out.append(word)
        self._held = ""
        self._end_value()

    def _string(self, text: str, at: int) -> int:
        end = _run(_PLAIN, text, at)
        if self._high and (end > at or text[end] != "\\"):
            self._lose_half()
        self._out.append(text[at:end])
        if end == len(text):
            return end
        letter = text[end]
        if letter == "\\":
            self._held = letter
            self._state = self._escape
        elif letter == '"':
            self._out.append(letter)
            if self._in_key:
                self._state = self._colon
            else:
                self._end_value()
        else:
            self._out.append(json.dumps(letter)[1:-1])
        return end + 1

    def _escape(self, text: str, at: int) -> int:
        letter = text[at]
        if letter == "u":
            self._held += letter
            self._state = self._unicode
            return at + 1
        if self._high:
            self._lose_half()
        if letter in '"\\/bfnrt':
            self._out.append("\\" + letter)
        elif letter == "'":
            self._out.append(letter)
        else:  # the letter itself is read again, as part of the string
            self._out.append("\\\\")
            at -= 1
        self._held = ""
        self._state = self._string
        return at + 1

    def _unicode(self, text: str, at: int) -> int:
        if text[at] not in _HEX:  # no escape at all; what was held is plain letters
            if self._high:
                self._lose_half()
            self._out.append("\\" + self._held)
            self._held = ""
            self._state = self._string
            return at
        self._held += text[at]
        if len(self._held) == len("\\u0000"):
            self._close_unicode(int(self._held[2:], 16))
            self._held = ""
            self._state = self._string
        return at + 1

    def _close_unicode(self, code: int) -> None:
        is_low = 0xDC00 <= code < 0xE000
        if self._high and is_low:
            self._out.append(self._high + self._held)
            self._high = ""
            return
        if self._high:
            self._lose_half()
        if 0xD800 <= code < 0xDC00:
            self._high = self._held
        else:
            self._out.append("\\ufffd" if is_low else self._held)

    def _lose_half(self) -> None:
        self._out.append("\\ufffd")
        self._high = ""

    # Shared by the states

    def _skip(self, text: str, at: int) -> int:
        """White space goes out as it is, but not before or after the value."""
        end = _run(_SPACE, text, at)
        if self._stack:
            self._out.append(text[at:end])
        return end

    def _close(self, at: int) -> int:
        self._out.append(self._stack.pop())
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._state = self._after
        self.done = not self._stack

    def _break(self, at: int) -> int:
        self.broken = True
        return at


def _run(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Where a run of what `pattern` takes ends; it takes nothing, too."""
    match = pattern.match(text, at)
    return match.end() if match else at
