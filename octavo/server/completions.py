"""POST /v1/completions.

Next file: `chunks.py`.
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.answer import Call, begin, finish, head, read_request
from octavo.server.chunks import UNFINISHED, Frame, encode
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
from octavo.server.logprobs import EVERY, CompletionLogprobs, best_of, prompt_logprobs_body
from octavo.server.prompts import Prompt, completion_prompts
from octavo.server.refusals import COMPLETION_REFUSED
from octavo.server.schema import CompletionRequest
from octavo.server.stream import stream, whole
from octavo.text.assembler import Delta, TokenLogprob
from octavo.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def completions(request: Request) -> Response:
    """Continue one prompt or several, at once or as a stream."""
    serving = serving_of(request)
    body, ignored = await read_request(request, serving, CompletionRequest, COMPLETION_REFUSED)
    call = begin(request, serving, body, ignored, "cmpl")
    job = await completion_job(call, body)
    if body.stream:
        return await stream(request, call, job, CompletionChunks(call, body, job))
    choices, usage = await whole(request, call, job)
    answer = completion_body(call, body, job, choices=choices, usage=usage)
    return finish(json_response(answer), call)


async def completion_job(call: Call, body: CompletionRequest) -> Job:
    """Prompts and settings of a completion, checked. Raises InvalidRequest."""
    serving = call.serving
    with named_as_sent(form_names(body)):
        params = completion_params(serving, body)
        await serving.engine.compile(params)
    prompts = await completion_prompts(serving, body)
    params.max_tokens = _max_tokens(serving, body, prompts)
    return call.job(prompts, params, silent=body.max_tokens == 0)


def completion_params(serving: Serving, body: CompletionRequest) -> SamplingParams:
    """The settings of a completion request. Raises InvalidRequest."""
    wanted = body.max_tokens
    if wanted == 0 and body.min_tokens:
        raise InvalidRequest("min_tokens does not go with max_tokens = 0.", "min_tokens")
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        both = (body.logprobs, prompt_logprobs or 0)
        prompt_logprobs = EVERY if EVERY in both else max(both)
    return sampling_params(
        body,
        settings=serving.settings,
        engine=serving.engine,
        max_tokens=1 if wanted == 0 else wanted,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _max_tokens(serving: Serving, body: CompletionRequest, prompts: list[Prompt]) -> int:
    """The number asked for, which must fit; unset, 16 or what is left if that is less."""
    longest = serving.engine.limits.max_model_len
    wanted = body.max_tokens
    least = None if wanted is None else max(1, wanted)
    check_lengths(prompts, longest, least, "prompt")
    if least is not None:
        return least
    room = longest - max(len(prompt.ids) for prompt in prompts)
    return min(room, max(DEFAULT_MAX_TOKENS, body.min_tokens or 0))


def completion_body(
    call: Call, body: CompletionRequest, job: Job, *, choices: list[Choice], usage: Usage
) -> dict[str, Any]:
    """The whole answer."""
    return {
        **head(call, "text_completion"),
        "choices": [
            _choice_body(call, body, job, index, choice) for index, choice in enumerate(choices)
        ],
        "usage": usage.body(),
    }


def _choice_body(
    call: Call, body: CompletionRequest, job: Job, index: int, choice: Choice
) -> dict[str, Any]:
    prompt, tokenizer = job.prompt_of(index), call.serving.engine.tokenizer
    text = "".join(choice.texts)
    made: dict[str, Any] = {
        "index": index,
        "text": prompt_text(prompt, tokenizer) + text if body.echo else text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.logprobs is not None:
        writer = CompletionLogprobs(as_ids=bool(body.return_tokens_as_token_ids))
        tokens = writer.generated(choice.logprobs)
        if body.echo:
            echoed = best_of(choice.prompt_logprobs, body.logprobs)
            tokens = _echoed(writer, prompt, echoed, tokenizer) + tokens
        made["logprobs"] = writer.write(tokens)
    if body.prompt_logprobs is not None:
        wanted = best_of(choice.prompt_logprobs, body.prompt_logprobs)
        made["prompt_logprobs"] = prompt_logprobs_body(wanted)
    if body.return_token_ids:
        made["token_ids"] = choice.token_ids
        made["prompt_token_ids"] = prompt.ids
    return made


def prompt_text(prompt: Prompt, tokenizer: Tokenizer) -> str:
    """The prompt as it was sent, or as its ids read; special tokens in ids are shown."""
    if prompt.text is not None:
        return prompt.text
    return tokenizer.decode(prompt.ids, skip_special_tokens=False)


def _echoed(
    writer: CompletionLogprobs,
    prompt: Prompt,
    entries: list[TokenLogprob | None] | None,
    tokenizer: Tokenizer,
) -> list[tuple[str, TokenLogprob | None]]:
    known = entries if entries is not None else [None] * len(prompt.ids)
    return writer.prompt(prompt.ids, known, tokenizer)


class CompletionChunks:
    """Events of a streamed completion; an echoed prompt is the first event of its choice."""

    def __init__(self, call: Call, body: CompletionRequest, job: Job) -> None:
        self._frame = Frame(call, body, job, "text_completion")
        self._body = body
        self._job = job
        self._tokenizer = call.serving.engine.tokenizer
        self._ids = bool(body.return_token_ids)
        self._detailed = self._ids or body.logprobs is not None
        as_ids = bool(body.return_tokens_as_token_ids)
        self._writers = [CompletionLogprobs(as_ids=as_ids) for _ in range(job.num_choices)]

    def write(self, index: int, delta: Delta) -> bytes:
        """Events of a delta, the echoed prompt first."""
        opening = self._open(index, delta) if self._frame.opens(index, delta) else b""
        if not (delta.text or delta.finish_reason or (self._detailed and delta.token_ids)):
            return opening
        parts = [b',"text":', encode(delta.text)]
        if delta.logprobs:
            writer = self._writers[index]
            lists = writer.write(writer.generated(delta.logprobs))
            parts += (b',"logprobs":', encode(lists))
        else:
            parts.append(b',"logprobs":null')
        parts += self._frame.tail(delta)
        return opening + self._frame.event(index, parts)

    def usage(self) -> bytes:
        """The last chunk, without choices."""
        return self._frame.usage()

    def _open(self, index: int, delta: Delta) -> bytes:
        if not (self._body.echo or self._ids):
            return b""
        prompt = self._job.prompt_of(index)
        text = prompt_text(prompt, self._tokenizer) if self._body.echo else ""
        parts = [b',"text":', encode(text)]
        if self._body.echo and self._body.logprobs is not None:
            writer = self._writers[index]
            echoed = best_of(delta.prompt_logprobs, self._body.logprobs)
            tokens = _echoed(writer, prompt, echoed, self._tokenizer)
            parts += (b',"logprobs":', encode(writer.write(tokens)))
        if self._ids:
            parts += (b',"prompt_token_ids":', encode(prompt.ids))
        return self._frame.event(index, [*parts, UNFINISHED])
