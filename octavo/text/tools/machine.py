"""`Machine`: what the parsers have in common, a buffer and the state that looks at it.

A state is a method. It takes what it can from the front of `_buffer` and may name the next state;
it gives False when more text is needed. `_lead` is what was taken of a call before its object, to
be given back as content if there is none. Not for: any one form. Next file: `hermes.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.text.tools.call_object import CallObject, NamedCall
from octavo.text.tools.events import Calls, Event, find_marker

MAX_HEAD = 512  # characters of a name with what surrounds it


class Machine:
    """Base of parsers of one family each, which define `_text` to begin with."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._buffer = ""
        self._lead = ""
        self._object: CallObject | NamedCall | None = None
        self._state: Callable[[], bool] = self._text

    def feed(self, text: str) -> list[Event]:
        """See `Parser`."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._calls.take()

    def finish(self) -> list[Event]:
        """See `Parser`. A call that was announced stays as it is; another is content."""
        open_call = self._object
        if open_call is None:
            self._calls.content(self._lead + self._buffer)
        elif not open_call.announced and not open_call.done:
            self._calls.content(self._lead + open_call.rest + self._buffer)
        self._buffer = self._lead = ""
        return self._calls.finish()

    def _text(self) -> bool:
        """Outside of calls."""
        raise NotImplementedError

    def _after_call(self) -> bool:
        """After the object of a call."""
        raise NotImplementedError

    def _until(self, *markers: str) -> str:
        """Gives content up to the first marker and takes it; "" if there is none yet."""
        at, marker = find_marker(self._buffer, markers)
        self._calls.content(self._buffer[:at])
        self._buffer = self._buffer[at + len(marker) :]
        self._lead = marker
        return marker

    def _next(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _skip(self, *words: str) -> str | None:
        """Takes white space and one of `words`, into `_lead`; None if more text is needed.

        "" if something else comes, and then nothing is taken.
        """
        ahead = self._buffer.lstrip()
        for word in words:
            if ahead.startswith(word):
                taken = len(self._buffer) - len(ahead) + len(word)
                self._lead += self._buffer[:taken]
                self._buffer = self._buffer[taken:]
                return word
        return None if any(word.startswith(ahead) for word in words) else ""

    def _open(self, call: CallObject | NamedCall) -> bool:
        """From here on the buffer is read by `call`."""
        self._object = call
        return self._next(self._call)

    def _call(self) -> bool:
        call = self._object
        assert call is not None
        at = call.push(self._buffer)
        self._buffer = self._buffer[at:]
        if call.done:
            self._lead = ""
            return self._next(self._after_call)
        if not call.broken:
            return False
        return self._give_back(call.rest, announced=call.announced)

    def _give_back(self, text: str = "", *, announced: bool = False) -> bool:
        """No call, or one that cannot go on: what is in no event is content."""
        self._calls.content(text if announced else self._lead + text)
        return self._end()

    def _end(self) -> bool:
        """Back to text."""
        self._object = None
        self._lead = ""
        return self._next(self._text)
