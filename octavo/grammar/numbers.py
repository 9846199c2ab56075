"""`NumberGuard`: where in a number of JSON a text is, so that no number runs on for ever.

JSON bounds neither the digits of a number nor its exponent, and a grammar that did would refuse
numbers that a schema asks for. So digits are counted as they are written, and a number of many
digits is ended if anything else is allowed. Not for: the grammar.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_DIGITS = 24  # of a run: before the point or after it
MAX_EXPONENT = 2  # digits: up to 1e99, which every reader of numbers can hold

_DIGITS = frozenset(b"0123456789")
_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_EXPONENT, _SIGNS = frozenset(b"eE"), frozenset(b"+-")


class NumberGuard:
    """Reads JSON byte by byte, as far as strings and numbers go."""

    __slots__ = ("_escaped", "_exponent", "_run", "_string")

    def __init__(self) -> None:
        self._string = False
        self._escaped = False
        self._exponent = False
        self._run = 0  # digits in a row, up to here

    def feed(self, data: bytes) -> None:
        """Reads on."""
        for byte in data:
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif byte == _BACKSLASH:
                    self._escaped = True
                elif byte == _QUOTE:
                    self._string = False
            elif byte in _DIGITS:
                self._run += 1
            elif byte in _EXPONENT and self._run:
                self._exponent, self._run = True, 0
            elif not (self._exponent and byte in _SIGNS):
                self._exponent, self._run = False, 0
                self._string = byte == _QUOTE

    @property
    def left(self) -> int | None:
        """Digits that may still follow, None outside of numbers."""
        if self._exponent:
            return max(0, MAX_EXPONENT - self._run)
        return max(0, MAX_DIGITS - self._run) if self._run else None


def digit_runs(table: Sequence[bytes], size: int) -> NDArray[np.uint8]:
    """u8[size]: how many digits each token begins with."""
    runs = [min(255, len(word) - len(word.lstrip(b"0123456789"))) for word in table[:size]]
    return np.array(runs + [0] * (size - len(runs)), np.uint8)
