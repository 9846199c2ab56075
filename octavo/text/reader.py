"""`AnswerReader`: the text of one answer as reasoning, content and calls.

Reasoning is taken off first, what is left goes to the parser of calls. Without either, text is
content. Not for: stop texts (`stops.py`), which end the text before it comes here.
Next file: `server/calls.py`.
"""

from __future__ import annotations

from octavo.text.reasoning import ReasoningReader
from octavo.text.tools.events import (
    CallEnd,
    CallStart,
    Content,
    Event,
    Parser,
)


class AnswerReader:
    """One answer; see the parts.

    `calls_only` is for answers that a grammar allows nothing but calls: what is left of one that
    was cut before its name is no content then.
    """

    def __init__(
        self, reasoning: ReasoningReader | None, calls: Parser | None, *, calls_only: bool = False
    ) -> None:
        self._reasoning = reasoning
        self._parser = calls
        self._calls_only = calls_only
        self._begun = 0  # calls
        self._ended = 0

    @property
    def thinking(self) -> bool:
        """True while what comes is thought."""
        return self._reasoning is not None and self._reasoning.thinking

    @property
    def called(self) -> bool:
        """True if the answer has calls and all of them are complete."""
        return self._begun > 0 and self._ended == self._begun

    def feed(self, text: str) -> list[Event]:
        """What is certain after this piece."""
        if self._reasoning is None:
            return self._calls([Content(text)] if text else [])
        return self._calls(self._reasoning.feed(text))

    def finish(self) -> list[Event]:
        """The rest, when no more text comes."""
        events = self._calls([] if self._reasoning is None else self._reasoning.finish())
        return [*events, *self._counted([] if self._parser is None else self._parser.finish())]

    def _calls(self, events: list[Event]) -> list[Event]:
        if self._parser is None:
            return events
        found: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                found += self._counted(self._parser.feed(event.text))
            else:
                found.append(event)
        return found

    def _counted(self, events: list[Event]) -> list[Event]:
        for event in events:
            self._begun += isinstance(event, CallStart)
            self._ended += isinstance(event, CallEnd)
        if self._calls_only:
            return [event for event in events if not isinstance(event, Content)]
        return events
