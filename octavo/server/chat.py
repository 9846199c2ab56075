"""POST /v1/chat/completions.

Next file: `stream.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.answer import Call, begin, chunk_prefix, finish, head, read_request, wants_usage
from octavo.server.context import Serving, serving_of
from octavo.server.errors import json_response
from octavo.server.generation import (
    Choice,
    Counter,
    Job,
    Usage,
    check_lengths,
    deltas,
    fold,
    sampling_params,
)
from octavo.server.logprobs import chat_logprobs, prompt_logprobs_body
from octavo.server.prompts import Prompt, chat_prompt, truncate
from octavo.server.refusals import CHAT_REFUSED
from octavo.server.schema import ChatRequest
from octavo.server.stream import open_stream, until_gone
from octavo.text.assembler import Delta

encode = msgspec.json.encode


async def chat_completions(request: Request) -> Response:
    """Answer a conversation, at once or as a stream."""
    serving = serving_of(request)
    body, ignored = await read_request(request, serving, ChatRequest, CHAT_REFUSED)
    call = begin(request, serving, body, ignored, "chatcmpl")
    params = chat_params(serving, body)
    prompt = await chat_prompt(serving, body)
    prompt = Prompt(truncate(serving, prompt.ids, body, params.max_tokens), prompt.text)
    check_lengths([prompt], serving.engine.limits.max_model_len, params.max_tokens, "messages")
    job = call.job([prompt], params)
    source = deltas(serving.engine, job)
    if body.stream:
        response = await open_stream(request, source, ChatChunks(call, body, job), call)
    else:
        choices, usage = await until_gone(request, fold(source, job), call.deadline)
        response = json_response(chat_body(call, body, job, choices=choices, usage=usage))
    return finish(response, call)


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
    params = sampling_params(
        body,
        settings=serving.settings,
        defaults=serving.engine.generation_defaults,
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    limits = serving.engine.limits
    params.check_model(vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
    return params


def chat_body(
    call: Call, body: ChatRequest, job: Job, *, choices: list[Choice], usage: Usage
) -> dict[str, Any]:
    """The whole answer."""
    answer: dict[str, Any] = {
        **head(call, "chat.completion"),
        "choices": [
            _choice_body(call, body, index, choice) for index, choice in enumerate(choices)
        ],
        "usage": usage.body(),
    }
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs_body(choices[0].prompt_logprobs)
    if body.return_token_ids:
        answer["prompt_token_ids"] = job.prompts[0].ids
    return answer


def _choice_body(call: Call, body: ChatRequest, index: int, choice: Choice) -> dict[str, Any]:
    as_ids = bool(body.return_tokens_as_token_ids)
    made: dict[str, Any] = {
        "index": index,
        "message": {
            "role": call.serving.settings.response_role,
            "content": "".join(choice.texts),
            "refusal": None,
        },
        "logprobs": chat_logprobs(choice.logprobs, as_ids=as_ids) if body.logprobs else None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        made["token_ids"] = choice.token_ids
    return made


class ChatChunks:
    """Events of a streamed chat answer.

    The text of most events differs in two places only, so it is put together from parts that were
    encoded once.
    """

    def __init__(self, call: Call, body: ChatRequest, job: Job) -> None:
        self._call = call
        self._job = job
        self._prefix = chunk_prefix(call, "chat.completion.chunk")
        self._opened = [False] * job.num_choices
        self._counter = Counter(job)
        self._usage_at_end, self._usage_each = wants_usage(call, body)
        self._logprobs = bool(body.logprobs)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._ids = bool(body.return_token_ids)
        self._detailed = self._logprobs or self._ids

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta, the role first."""
        self._counter.count(index, delta)
        opening = b"" if self._opened[index] else self._open(index)
        if not (delta.text or delta.finish_reason or (self._detailed and delta.token_ids)):
            return opening
        parts = [self._prefix, b"%d" % index, b',"delta":{']
        if delta.text:
            parts += (b'"content":', encode(delta.text))
        parts.append(b"}")
        if self._logprobs:
            parts += (b',"logprobs":', encode(self._logprobs_body(delta)))
        if self._ids:
            parts += (b',"token_ids":', encode(delta.token_ids))
        if delta.finish_reason is None:
            parts.append(b',"finish_reason":null}]')
        else:
            parts += (b',"finish_reason":', encode(delta.finish_reason))
            parts += (b',"stop_reason":', encode(delta.stop_reason), b"}]")
        if self._usage_each:
            parts.append(self._usage_field())
        parts.append(b"}\n\n")
        return opening + b"".join(parts)

    def usage(self) -> bytes:
        """The last chunk, without choices."""
        if not self._usage_at_end:
            return b""
        usage = self._counter.usage.body()
        last = {**head(self._call, "chat.completion.chunk"), "choices": [], "usage": usage}
        return b"data: " + encode(last) + b"\n\n"

    def _open(self, index: int) -> bytes:
        self._opened[index] = True
        role = encode(self._call.serving.settings.response_role)
        parts = [self._prefix, b"%d" % index, b',"delta":{"role":', role]
        parts.append(b',"content":""},"finish_reason":null}]')
        if self._ids and index == 0:
            parts += (b',"prompt_token_ids":', encode(self._job.prompts[0].ids))
        if self._usage_each:
            parts.append(self._usage_field())
        parts.append(b"}\n\n")
        return b"".join(parts)

    def _usage_field(self) -> bytes:
        return b',"usage":' + encode(self._counter.usage.body())

    def _logprobs_body(self, delta: Delta) -> dict[str, Any] | None:
        if not delta.logprobs:
            return None
        return chat_logprobs(delta.logprobs, as_ids=self._as_ids)
