"""`Items`: the events of a reader as the output items of a response, and as its stream events.

One item is open at a time: a message, a call or reasoning. A plain answer is made by the same
code, which then nobody listens to. Not for: the response around the items (`responses.py`, the
next file).
"""

from __future__ import annotations

import secrets
from typing import Any

from octavo.text.tools.events import (
    Arguments,
    CallStart,
    Content,
    Event,
    Reasoning,
)

Made = dict[str, Any]


class Items:
    """Output items, as far as they have come, and the events that tell of them."""

    def __init__(self, *, include_reasoning: bool = True) -> None:
        self.output: list[Made] = []
        self._include_reasoning = include_reasoning
        self._open: Made | None = None
        self._logprobs: list[Any] = []  # of the next piece of text

    def take(self, event: Event) -> list[Made]:
        """Stream events for an event of the answer."""
        match event:
            case Content(text):
                return [*self._be("message"), self._text("response.output_text.delta", text)]
            case Reasoning(text) if self._include_reasoning:
                return [*self._be("reasoning"), self._text("response.reasoning_text.delta", text)]
            case CallStart(_, id_, name):
                return [*self.close("completed"), *self._begin(_call(id_, name))]
            case Arguments(_, text):
                assert self._open is not None
                self._open["arguments"] += text
                return [self._of("response.function_call_arguments.delta", delta=text)]
        return []

    def add_logprobs(self, entries: list[Any]) -> None:
        """Log-probs that go with the next text."""
        self._logprobs += entries

    def close(self, status: str) -> list[Made]:
        """Ends the item that is open."""
        item = self._open
        if item is None:
            return []
        item["status"] = status
        events = self._ends(item)
        events.append(self._about("response.output_item.done", item=_copy(item)))
        self._open = None
        return events

    def _be(self, kind: str) -> list[Made]:
        """Makes sure that an item of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return []
        item = _message() if kind == "message" else _reasoning()
        part = item["content"][0]
        events = [*self.close("completed"), *self._begin({**item, "content": []})]
        assert self._open is not None
        self._open["content"] = [part]
        return [
            *events,
            self._of("response.content_part.added", content_index=0, part=dict(part)),
        ]

    def _begin(self, item: Made) -> list[Made]:
        self.output.append(item)
        self._open = item
        return [self._about("response.output_item.added", item=_copy(item))]

    def _text(self, kind: str, text: str) -> Made:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        event = self._of(kind, content_index=0, delta=text)
        if part["type"] == "output_text":
            entries, self._logprobs = self._logprobs, []
            event["logprobs"] = entries
            part["logprobs"] = [*part["logprobs"], *entries]
        return event

    def _ends(self, item: Made) -> list[Made]:
        if item["type"] == "function_call":
            arguments = item["arguments"]
            done = self._of("response.function_call_arguments.done", arguments=arguments)
            return [{**done, "name": item["name"]}]
        part = item["content"][0]
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        done = self._of(f"response.{kind}.done", content_index=0, text=part["text"])
        if kind == "output_text":
            done["logprobs"] = part["logprobs"]
        return [
            done,
            self._of("response.content_part.done", content_index=0, part=dict(part)),
        ]

    def _of(self, kind: str, **fields: Any) -> Made:
        assert self._open is not None
        return self._about(kind, item_id=self._open["id"], **fields)

    def _about(self, kind: str, **fields: Any) -> Made:
        return {"type": kind, "output_index": len(self.output) - 1, **fields}


def _copy(item: Made) -> Made:
    return {**item, "content": [*item["content"]]} if "content" in item else dict(item)


def _message() -> Made:
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [part],
    }


def _reasoning() -> Made:
    return {
        "id": f"rs_{secrets.token_hex(12)}",
        "type": "reasoning",
        "status": "in_progress",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": ""}],
    }


def _call(id_: str, name: str) -> Made:
    return {
        "id": f"fc_{secrets.token_hex(12)}",
        "type": "function_call",
        "status": "in_progress",
        "call_id": id_,
        "name": name,
        "arguments": "",
    }
