"""What a reader makes of an answer: content, reasoning and calls, in the order of the text.

A reader is fed text in pieces of any size and gives events; for the same text their joined parts
are the same, however it was cut. `Calls` is where parsers write their events. The rules for calls
are:

- `CallStart` comes once, with a name, before its `Arguments`, whose texts joined are the
  beginning of a JSON object at any moment, and a whole one when `CallEnd` comes.
- A call that ends too early has no `CallEnd`. What it sent stays as it is: closing its brackets
  would make arguments that nobody wrote, and somebody might act on them.
- What turns out to be no call before it was announced is content, markers included.
- White space beside a call is no content.

Not for: any one form of call. Next file: `json_text.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote to itself before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next piece of a call's arguments, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are complete."""

    index: int


Event: TypeAlias = Content | Reasoning | CallStart | Arguments | CallEnd


class Parser(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece."""
        ...

    def finish(self) -> list[Event]:
        """What was held back, when no more text comes."""
        ...


def call_id() -> str:
    """A new id of a call, as most clients know them."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits: the templates of Mistral models take nothing else."""
    return secrets.token_hex(5)[:9]


class Calls:
    """Collects the events of one answer, numbers its calls and joins neighbours.

    With `only_first`, calls after the first are dropped.
    """

    def __init__(self, make_id: Callable[[], str] = call_id, *, only_first: bool = False) -> None:
        self._make_id = make_id
        self._only_first = only_first
        self._events: list[Event] = []
        self._count = 0
        self._space = ""  # held back, until it is known whether a call follows
        self._after_call = False

    def take(self) -> list[Event]:
        """The events since the last call of this method."""
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        """Text of the answer; white space waits for what comes after it."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._join(Content(kept))
            self._after_call = False

    def start(self, name: str) -> int:
        """A call is certain; its index."""
        index = self._count
        self._count += 1
        self._space = ""
        self._after_call = True
        self._add(index, CallStart(index, self._make_id(), name))
        return index

    def arguments(self, index: int, text: str) -> None:
        """More of the arguments of a call."""
        if text:
            self._add(index, Arguments(index, text))

    def end(self, index: int) -> None:
        """A call is complete."""
        self._add(index, CallEnd(index))

    def finish(self) -> list[Event]:
        """The last events: white space at the end, unless it follows a call."""
        if self._space and not self._after_call:
            self._join(Content(self._space))
        self._space = ""
        return self.take()

    def _add(self, index: int, event: Event) -> None:
        if not (self._only_first and index):
            self._join(event)

    def _join(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Content) and isinstance(last, Content):
            event = Content(last.text + event.text)
        elif (
            isinstance(event, Arguments)
            and isinstance(last, Arguments)
            and event.index == last.index
        ):
            event = Arguments(event.index, last.text + event.text)
        else:
            self._events.append(event)
            return
        self._events[-1] = event


def find_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str]:
    """The first marker in `text` and its place, or "" and how much of `text` is sure to be none.

    No marker may be the beginning of another.
    """
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    if found:
        return min(found)
    sure = len(text)
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), 0, -1):
            if text.endswith(marker[:size]):
                sure = min(sure, len(text) - size)
                break
    return sure, ""
