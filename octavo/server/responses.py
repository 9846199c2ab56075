"""POST /v1/responses, in its plain form: text, reasoning and calls; nothing is stored.

The request is answered as the chat that means the same. A stream begins with `response.created`
and ends with `response.completed`, `response.incomplete` (cut at `max_output_tokens`) or, after an
`error` event, `response.failed`. Next file: `stream.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.answer import Call, begin, finish
from octavo.server.body import read_record
from octavo.server.calls import read_choice
from octavo.server.chat import prepare
from octavo.server.context import serving_of
from octavo.server.errors import describe, json_response
from octavo.server.feed import Framing
from octavo.server.generation import Counter, Job, Usage
from octavo.server.logprobs import chat_logprobs
from octavo.server.reading import Plan
from octavo.server.refusals import CHAT_REFUSED, RESPONSES_REFUSED
from octavo.server.response_input import NAMES, chat_request
from octavo.server.response_items import Items
from octavo.server.schema import ChatRequest, ResponsesRequest
from octavo.server.stream import log, stream, whole
from octavo.text.assembler import Delta, TokenLogprob

REFUSED = {
    name: refusal
    for name, refusal in {**CHAT_REFUSED, **RESPONSES_REFUSED}.items()
    if name not in ResponsesRequest.__struct_fields__
}


async def create_response(request: Request) -> Response:
    """Answer an input, at once or as a stream of typed events."""
    serving = serving_of(request)
    serving.require_ready()
    body, ignored = await read_record(request, serving.settings, ResponsesRequest, REFUSED)
    asked = chat_request(body)
    call = begin(request, serving, asked, ignored, "resp")
    job, reading = await _prepare(call, asked)
    frame = ResponseFrame(call, body, job)
    if body.stream:
        chunks = ResponseChunks(frame, reading)
        return await stream(request, call, job, chunks, Framing(b"", chunks.error))
    (choice,), usage = await whole(request, call, job)
    events, _, thought = read_choice(reading, choice)
    items = Items(include_reasoning=reading.include_reasoning)
    items.add_logprobs(_logprobs(choice.logprobs))
    for event in events:
        items.take(event)
    status = "incomplete" if choice.finish_reason == "length" else "completed"
    items.close(status)
    usage.reasoning_tokens = thought
    return finish(json_response(frame.body(status, items.output, usage)), call)


async def _prepare(call: Call, asked: ChatRequest) -> tuple[Job, Plan]:
    try:
        job, reading = await prepare(call, asked, NAMES)
    except InvalidRequest as error:  # tools are written one level flatter here
        message = error.message.replace(".function.", ".")
        raise InvalidRequest(
            message, (error.param or "").replace(".function", "") or None
        ) from None
    if job.params.logprobs is not None and reading.reads:
        raise InvalidRequest(
            "include: message.output_text.logprobs does not go with tools or reasoning here; use "
            "/v1/chat/completions.",
            "include",
        )
    return job, reading


class ResponseFrame:
    """The response around its items."""

    def __init__(self, call: Call, body: ResponsesRequest, job: Job) -> None:
        self._head: dict[str, Any] = {
            "id": call.id,
            "object": "response",
            "created_at": call.created,
            "background": False,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": call.model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": job.params.temperature,
            "text": {"format": (body.text or {}).get("format") or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": job.params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }
        self.job = job

    def body(
        self,
        status: str,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The response in this state."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "error": error,
            "incomplete_details": cut,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        }


class ResponseChunks:
    """The events of a streamed response, numbered."""

    def __init__(self, frame: ResponseFrame, reading: Plan) -> None:
        self._frame = frame
        self._reader = reading.reader()
        self._items = Items(include_reasoning=reading.include_reasoning)
        self._counter = Counter(frame.job)
        self._counter.usage.reasoning_tokens = 0
        self._number = 0
        self._status = "in_progress"

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta, those that open the response first."""
        written = [] if self._number else [self._open()]
        self._counter.count(index, delta)
        events = self._reader.feed(delta.text)
        if self._reader.thinking:
            usage = self._counter.usage
            usage.reasoning_tokens = (usage.reasoning_tokens or 0) + len(delta.token_ids)
        self._items.add_logprobs(_logprobs(delta.logprobs))
        if delta.finish_reason is not None:
            events += self._reader.finish()
        written += [self._event(made) for event in events for made in self._items.take(event)]
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            written += [self._event(made) for made in self._items.close(self._status)]
        return b"".join(written)

    def usage(self) -> bytes:
        """The event that ends the response."""
        body = self._frame.body(self._status, self._items.output, self._counter.usage)
        return self._event({"type": f"response.{self._status}", "response": body})

    def error(self, error: Exception) -> bytes:
        """The events of a response that failed."""
        told: Any = describe(error)["error"]
        if told["type"] == "InternalServerError" and told["message"] == "Internal server error.":
            log.error("stream_failed", error=repr(error))
        code = "rate_limit_exceeded" if told["code"] == 429 else "server_error"
        fault = {"code": code, "message": told["message"]}
        body = self._frame.body("failed", self._items.output, error=fault)
        opening = b"" if self._number else self._open()
        return (
            opening
            + self._event({"type": "error", "param": told["param"], **fault})
            + self._event({"type": "response.failed", "response": body})
        )

    def _open(self) -> bytes:
        body = self._frame.body("in_progress", [])
        return self._event({"type": "response.created", "response": body}) + self._event(
            {"type": "response.in_progress", "response": body}
        )

    def _event(self, event: dict[str, Any]) -> bytes:
        data = msgspec.json.encode({**event, "sequence_number": self._number})
        kind: str = event["type"]
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _logprobs(entries: list[TokenLogprob] | None) -> list[Any]:
    shown: Any = chat_logprobs(entries, as_ids=False)["content"] if entries else []
    return list(shown)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
