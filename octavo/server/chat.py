"""POST /v1/chat/completions.

Next file: `chunks.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.answer import Call, begin, finish, head, read_request
from octavo.server.calls import Message, ReadChunks, read_message
from octavo.server.chunks import Frame, encode
from octavo.server.context import Serving, serving_of
from octavo.server.errors import json_response, named_as_sent
from octavo.server.forms import form_names
from octavo.server.generation import (
    Choice,
    Job,
    Usage,
    check_lengths,
    sampling_params,
)
from octavo.server.logprobs import chat_logprobs, prompt_logprobs_body
from octavo.server.prompts import Prompt, chat_prompt, chosen_template, truncate
from octavo.server.reading import Plan, Wishes, apply, compiled, plan
from octavo.server.refusals import CHAT_REFUSED
from octavo.server.schema import ChatRequest
from octavo.server.stream import stream, whole
from octavo.text.assembler import Delta


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    serving = serving_of(request)
    body, ignored = await read_request(request, serving, ChatRequest, CHAT_REFUSED)
    call = begin(request, serving, body, ignored, "chatcmpl")
    job, reading = await prepare(call, body, sent_names(body))
    if body.stream:
        chunks = (
            ReadChunks(call, body, job, reading) if reading.reads else ChatChunks(call, body, job)
        )
        return await stream(request, call, job, chunks)
    choices, usage = await whole(request, call, job)
    answer = chat_body(call, body, job, reading, choices=choices, usage=usage)
    return finish(json_response(answer), call)


async def prepare(call: Call, body: ChatRequest, names: Mapping[str, str]) -> tuple[Job, Plan]:
    """What the engine is asked, and how the answer is read. Raises InvalidRequest.

    `names` are our names of settings, and what the caller calls them.
    """
    serving = call.serving
    template = await chosen_template(serving, body.chat_template)
    reading = plan(serving, wishes(body), template)
    with named_as_sent(names):
        params = chat_params(serving, body)
        prompt = await chat_prompt(serving, body, template, reading)
    reading = reading.after(prompt.text or "", prompt.continued)
    prompt = Prompt(truncate(serving, prompt.ids, body, params.max_tokens), prompt.text)
    with named_as_sent(names):
        check_lengths([prompt], serving.engine.limits.max_model_len, params.max_tokens, "messages")
        apply(reading, params, serving.engine.tokenizer)
        await compiled(reading, params, serving.engine)
    return call.job([prompt], params), reading


def wishes(body: ChatRequest) -> Wishes:
    """What a chat request asks of tools and reasoning."""
    return Wishes(
        tools=body.tools,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        include_reasoning=body.include_reasoning,
    )


def sent_names(body: ChatRequest) -> dict[str, str]:
    """Our names of settings, and what this request calls them."""
    names = form_names(body)
    if body.logprobs:
        names["logprobs"] = "top_logprobs"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    if body.tools:
        names["structured_outputs.structural_tag"] = names["structured_outputs"] = "tools"
    return names


def chat_params(serving: Serving, body: ChatRequest) -> SamplingParams:
    """The settings of a chat request. Raises InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs goes with logprobs = true only.", "top_logprobs")
    if body.top_logprobs is not None and body.top_logprobs < -1:
        raise InvalidRequest(
            f"top_logprobs = {str(body.top_logprobs)[:40]} must be 0 or more.", "top_logprobs"
        )
    max_tokens = body.max_completion_tokens
    max_tokens = body.max_tokens if max_tokens is None else max_tokens
    return sampling_params(
        body,
        settings=serving.settings,
        engine=serving.engine,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def chat_body(
    call: Call,
    body: ChatRequest,
    job: Job,
    reading: Plan,
    *,
    choices: list[Choice],
    usage: Usage,
) -> dict[str, Any]:
    """The whole answer."""
    role = call.serving.settings.response_role
    messages = [read_message(reading, role, choice) for choice in choices]
    if reading.reasoning is not None:
        usage.reasoning_tokens = sum(message.thought for message in messages)
    answer: dict[str, Any] = {
        **head(call, "chat.completion"),
        "choices": [
            _choice_body(body, index, choice, message)
            for index, (choice, message) in enumerate(zip(choices, messages, strict=True))
        ],
        "usage": usage.body(),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs_body(choices[0].prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = job.prompts[0].ids
    return answer


def _choice_body(body: ChatRequest, index: int, choice: Choice, message: Message) -> dict[str, Any]:
    as_ids = bool(body.return_tokens_as_token_ids)
    made: dict[str, Any] = {
        "index": index,
        "message": message.body,
        "logprobs": chat_logprobs(choice.logprobs, as_ids=as_ids) if body.logprobs else None,
        "finish_reason": message.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        made["token_ids"] = choice.token_ids
    return made


class ChatChunks:
    """Events of a streamed chat answer; the roles of all choices come first."""

    def __init__(self, call: Call, body: ChatRequest, job: Job) -> None:
        self._frame = Frame(call, body, job, "chat.completion.chunk")
        self._role = encode(call.serving.settings.response_role)
        self._logprobs = bool(body.logprobs)
        self._writer = call.serving.chat_logprobs[bool(body.return_tokens_as_token_ids)]
        self._prompt_ids = job.prompts[0].ids if body.return_token_ids else None
        self._detailed = self._logprobs or bool(body.return_token_ids)

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta; before the first, the roles of all choices in their order."""
        frame = self._frame
        opening = b"" if frame.has_roles else frame.roles(self._role, self._prompt_ids)
        frame.count(index, delta)
        if not (delta.text or delta.finish_reason or (self._detailed and delta.token_ids)):
            return opening
        parts = [b',"delta":{']
        if delta.text:
            parts += (b'"content":', encode(delta.text))
        parts.append(b"}")
        if self._logprobs:
            entries = delta.logprobs
            parts += (b',"logprobs":', self._writer.write(entries) if entries else b"null")
        parts += frame.tail(delta)
        return opening + frame.event(index, parts)

    def usage(self) -> bytes:
        """The last chunk, without choices."""
        return self._frame.usage()
