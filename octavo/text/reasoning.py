"""`ReasoningReader`: tells what a model thinks from what it answers.

Thought stands between `<think>` and `</think>`. Whether an answer begins inside of it depends on
the prompt, whose template may have opened the block, or closed an empty one to turn thinking off.
Line breaks at the ends of the block are no part of anything. Not for: calls, which may follow
(`tools/`). Next file: `reader.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from octavo.text.tools.events import Content, Event, Reasoning, find_marker

OPEN, CLOSE = "<think>", "</think>"
AUTO = "auto"

# Where an answer begins: in thought, in the answer, or wherever its first word says.
Place: TypeAlias = Literal["thought", "answer", "open"]


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How models of one kind think. `starts` is where answers begin if the prompt says nothing."""

    starts: Place
    open: str = OPEN
    close: str = CLOSE

    def place(self, prompt: str, continued: str | None = None) -> Place:
        """Where the answer to a prompt begins.

        `continued` is the last message if the answer goes on with it.
        """
        if continued is not None:
            before, found, after = continued.rpartition(self.open)
            if found:
                return "answer" if self.close in after else "thought"
            return "answer" if self.close in before or before.strip() else self.starts
        end = prompt.rstrip()
        if end.endswith(self.open):
            return "thought"
        return "answer" if end.endswith(self.close) else self.starts

    def reader(self, place: Place) -> ReasoningReader:
        """A reader of one answer that begins there."""
        return ReasoningReader(place, self.open, self.close)


REASONING: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily("thought"),
    "qwen3": ReasoningFamily("open"),
}
NAMES = (AUTO, *REASONING)


def reasoning_of(name: str | None, template: str) -> ReasoningFamily | None:
    """The family that an operator named; for "auto" the one of the model's template, if any."""
    if name is None:
        return None
    if name != AUTO:
        return REASONING[name]
    if CLOSE not in template:
        return None
    return REASONING["deepseek_r1" if "\uff5cAssistant\uff5c" in template else "qwen3"]


class ReasoningReader:
    """One answer. `thinking` is true while the text is thought."""

    def __init__(self, place: Place, opening: str = OPEN, closing: str = CLOSE) -> None:
        self._opening, self._closing = opening, closing
        self._buffer = ""
        self._place: Place = place
        self._fresh = True  # nothing of this place has been given yet
        self._maybe_open = place != "answer"
        self._thought = False  # an answer with line breaks before it follows a thought

    @property
    def thinking(self) -> bool:
        """True while it is not known that the thought has ended."""
        return self._place == "thought"

    def feed(self, text: str) -> list[Event]:
        """Pieces of thought and of content."""
        self._buffer += text
        if self._maybe_open and not self._find_opening():
            return []
        events: list[Event] = []
        if self._place == "thought":
            self._think(events)
        if self._place == "answer" and self._buffer:
            self._answer(events)
        return events

    def finish(self) -> list[Event]:
        """What was held back. Thought that never ended stays thought."""
        text, self._buffer = self._buffer, ""
        if self._place == "thought":
            text = text.rstrip("\n")
            return [Reasoning(text)] if text.strip() else []
        if self._thought and self._fresh:
            text = text.lstrip("\n")
        return [Content(text)] if text else []

    def _find_opening(self) -> bool:
        """The opening mark at the very beginning; true once it is known whether it is there."""
        ahead = self._buffer.lstrip()
        if ahead.startswith(self._opening):
            self._place = "thought"
            self._buffer = ahead[len(self._opening) :]
        elif self._opening.startswith(ahead):
            return False
        elif self._place == "open":
            self._place = "answer"
        self._maybe_open = False
        return True

    def _think(self, events: list[Event]) -> None:
        at, found = find_marker(self._buffer, (self._closing,))
        text = self._buffer[:at]
        if self._fresh:
            text = text.lstrip("\n")
        kept = text.rstrip("\n")
        if kept:
            self._fresh = False
            events.append(Reasoning(kept))
        if found:
            self._buffer = self._buffer[at + len(found) :]
            self._place, self._fresh, self._thought = "answer", True, True
        else:
            self._buffer = text[len(kept) :] + self._buffer[at:]

    def _answer(self, events: list[Event]) -> None:
        text = self._buffer
        if self._fresh and self._thought:
            text = text.lstrip("\n")
        self._buffer = ""
        if text:
            self._fresh = False
            events.append(Content(text))
