"""`StopMatcher`: finds stop texts in a stream and sends nothing of them by mistake.

What could still become a stop text is held back, and nothing else. The first stop text to be
complete wins; of those that end at the same place, the longest. So the result depends on the
text alone and not on how it was cut into pieces. Not for: stop token ids, which the engine
knows. Next file: `text/assembler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """One per stream; `include` keeps the stop text itself in the output."""

    __slots__ = ("_borders", "_firsts", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)  # how much of each stop the text ends with
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> str:
        """The text held back: always the beginning of a stop text, never a whole one."""
        return self._held

    def push(self, text: str, can_stop: bool = True) -> str:
        """The text that may be sent. `can_stop` false: no stop text may end in this piece.

        After a match (`matched` is set) everything more is dropped.
        """
        if self.matched is not None:
            return ""
        if not self._held and self._firsts.isdisjoint(text):
            return text  # no stop text begins here, the usual case
        for place, letter in enumerate(text):
            found = self._step(letter)
            if found is not None and can_stop:
                return self._match(found, self._held + text[: place + 1])
        text = self._held + text
        sure = len(text) - max(self._states)
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def _step(self, letter: str) -> str | None:
        """Take one letter (Knuth, Morris and Pratt 1977); the longest stop that it completes."""
        found = None
        for which, stop in enumerate(self._stops):
            borders, state = self._borders[which], self._states[which]
            while state and stop[state] != letter:
                state = borders[state - 1]
            state += stop[state] == letter
            if state == len(stop):
                found = found or stop
                state = borders[-1]
            self._states[which] = state
        return found

    def _match(self, stop: str, text: str) -> str:
        self.matched = stop
        self._held = ""
        return text if self._include else text[: -len(stop)]


def _borders(stop: str) -> list[int]:
    """For each beginning of `stop`, the length of its longest proper border."""
    borders, state = [0], 0
    for letter in stop[1:]:
        while state and stop[state] != letter:
            state = borders[state - 1]
        state += stop[state] == letter
        borders.append(state)
    return borders
