"""Chat answers that are more than text: reasoning and calls, as a message and as events.

A streamed answer and a plain one are made of the same reader's events. `reasoning` stands under
the older name `reasoning_content` as well. A call that was cut off is shown as far as it came,
with the finish reason `length`; `tool_calls` says that all calls are complete and their arguments
are valid JSON. Not for: answers that are read as plain text (`chat.py`).
Next file: `responses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.server.answer import Call
from octavo.server.chunks import UNFINISHED, Frame, encode
from octavo.server.generation import Choice, Job
from octavo.server.reading import Plan
from octavo.server.schema import ChatRequest
from octavo.text.assembler import Delta
from octavo.text.reader import AnswerReader
from octavo.text.tools.events import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    Reasoning,
)


def finish_reason(reader: AnswerReader, reason: str | None) -> str | None:
    """Why an answer ended, as clients that call tools want to know it."""
    return "tool_calls" if reason == "stop" and reader.called else reason


@dataclass(frozen=True, slots=True)
class Message:
    """A whole answer as the API shows it. `thought` counts tokens of reasoning."""

    body: dict[str, Any]
    finish_reason: str | None
    thought: int = 0


def read_message(plan: Plan, role: str, choice: Choice) -> Message:
    """The message of a choice."""
    if not plan.reads:
        body = {"role": role, "content": "".join(choice.texts), "refusal": None}
        return Message(body, choice.finish_reason)
    events, reason, thought = read_choice(plan, choice)
    return Message(_message_body(plan, role, events), reason, thought)


def read_choice(plan: Plan, choice: Choice) -> tuple[list[Event], str | None, int]:
    """The events of a whole answer, its finish reason, and how many tokens were reasoning."""
    reader = plan.reader()
    events: list[Event] = []
    thought = 0
    for text, size in zip(choice.texts, choice.sizes, strict=True):
        events += reader.feed(text)
        thought += size if reader.thinking else 0
    events += reader.finish()
    return events, finish_reason(reader, choice.finish_reason), thought


def _message_body(plan: Plan, role: str, events: list[Event]) -> dict[str, Any]:
    """The message that events make. Content is null if something else stands, or was to stand,
    in its place."""
    content = "".join(event.text for event in events if isinstance(event, Content))
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls.append({"id": event.id, "type": "function", "function": function})
        elif isinstance(event, Arguments):
            calls[event.index]["function"]["arguments"] += event.text
    made: dict[str, Any] = {
        "role": role,
        "content": content or (None if calls or thought or plan.choice.forced else ""),
        "refusal": None,
    }
    if plan.reasoning is not None and plan.include_reasoning:
        made["reasoning"] = made["reasoning_content"] = thought or None
    if calls:
        made["tool_calls"] = calls
    return made


class ReadChunks:
    """Events of a streamed chat answer that goes through a reader; see `ChatChunks`."""

    def __init__(self, call: Call, body: ChatRequest, job: Job, plan: Plan) -> None:
        self._frame = Frame(call, body, job, "chat.completion.chunk")
        self._plan = plan
        self._readers = [plan.reader() for _ in range(job.num_choices)]
        self._role = encode(call.serving.settings.response_role)
        self._logprobs = bool(body.logprobs)
        self._writer = call.serving.chat_logprobs[bool(body.return_tokens_as_token_ids)]
        self._prompt_ids = job.prompts[0].ids if body.return_token_ids else None
        self._detailed = self._logprobs or bool(body.return_token_ids)

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta; before the first, the roles of all choices in their order."""
        frame = self._frame
        written = [] if frame.has_roles else [frame.roles(self._role, self._prompt_ids)]
        frame.count(index, delta)
        reader = self._readers[index]
        events = reader.feed(delta.text)
        if self._plan.reasoning is not None:
            self._frame.thought(len(delta.token_ids) if reader.thinking else 0)
        if delta.finish_reason is not None:
            events += reader.finish()
        bodies = [body for event in events if (body := self._delta(event))]
        detailed = self._detailed and bool(delta.token_ids)
        if not bodies and (detailed or delta.finish_reason is not None):
            bodies.append(b"")
        for place, body in enumerate(bodies, 1):
            parts = [b',"delta":{', body, b"}"]
            if place < len(bodies):
                parts.append(UNFINISHED)
            else:  # the last one has what belongs to the tokens
                parts += self._details(delta)
                parts += self._frame.tail(delta, finish_reason(reader, delta.finish_reason))
            written.append(self._frame.event(index, parts))
        return b"".join(written)

    def usage(self) -> bytes:
        """The last chunk, without choices."""
        return self._frame.usage()

    def _details(self, delta: Delta) -> list[bytes]:
        if not self._logprobs:
            return []
        entries = delta.logprobs
        return [b',"logprobs":', self._writer.write(entries) if entries else b"null"]

    def _delta(self, event: Event) -> bytes:
        """The inside of the `delta` of an event; empty if it is not shown."""
        match event:
            case Content(text):
                return b'"content":' + encode(text)
            case Reasoning(text):
                if not self._plan.include_reasoning:
                    return b""
                data = encode(text)
                return b'"reasoning":' + data + b',"reasoning_content":' + data
            case CallStart(number, id_, name):
                call: dict[str, Any] = {"index": number, "id": id_, "type": "function"}
                call["function"] = {"name": name, "arguments": ""}
                return b'"tool_calls":' + encode([call])
            case Arguments(number, text):
                call = {"index": number, "function": {"arguments": text}}
                return b'"tool_calls":' + encode([call])
            case CallEnd():
                return b""
