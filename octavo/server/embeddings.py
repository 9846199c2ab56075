"""POST /v1/embeddings: texts to vectors, from the hidden states of the model that also answers.

A vector is the last hidden state of a text (`pooling: "last"`, as for models that read from left
to right) or the mean of all (`"mean"`), after the model's last norm, scaled to length 1 unless
`normalize` is false. A text is run as a prompt of one token's answer, so it shares steps, pages,
admission and deadlines with everything else. Not for: other kinds of pooling heads.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestFailed
from octavo.pooling import vector_of
from octavo.server.answer import Call, begin, finish
from octavo.server.body import read_record, unhurried
from octavo.server.completions import completion_job
from octavo.server.context import serving_of
from octavo.server.errors import json_response, named_as_sent
from octavo.server.refusals import EMBEDDING_REFUSED
from octavo.server.schema import CompletionRequest, EmbeddingRequest, Pooled
from octavo.server.stream import whole

THREAD_FROM = 16  # vectors of one answer that are written in a thread


@dataclass(frozen=True, slots=True)
class Vectors:
    """What the engine gave for some texts: f32 numbers, and the tokens of all texts."""

    pooled: list[bytes]
    prompt_tokens: int

    def units(self) -> list[array[float]]:
        """The vectors at length 1."""
        return [vector_of(pooled, normalize=True) for pooled in self.pooled]


def completion_of(body: Pooled, prompt: str | list[Any]) -> CompletionRequest:
    """The completion of one token that a request for vectors of `prompt` is run as."""
    return CompletionRequest(
        prompt=prompt,
        model=body.model,
        max_tokens=1,
        temperature=0.0,
        n=1,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        add_special_tokens=body.add_special_tokens,
        request_id=body.request_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout=body.timeout,
    )


async def vectors_of(
    request: Request, call: Call, asked: CompletionRequest, *, pooling: str | None, name: str
) -> Vectors:
    """Vectors of the prompts; `name` is what the caller calls them. Raises InvalidRequest."""
    with named_as_sent({"prompt": name}):
        job = await completion_job(call, asked)
    job.params.pooling = pooling or "last"
    choices, usage = await whole(request, call, job)
    if not all(choice.pooled for choice in choices):
        raise RequestFailed("The engine gave no hidden state.")
    return Vectors([choice.pooled for choice in choices], usage.prompt_tokens)


async def embeddings(request: Request) -> Response:
    """Texts, or lists of token ids, to vectors."""
    serving = serving_of(request)
    serving.require_ready()
    body, ignored = await read_record(
        request, serving.settings, EmbeddingRequest, EMBEDDING_REFUSED
    )
    asked = completion_of(body, body.input)
    call = begin(request, serving, asked, ignored, "embd")
    found = await vectors_of(request, call, asked, pooling=body.pooling, name="input")

    def work() -> Response:
        data = [
            {"index": index, "object": "embedding", "embedding": _written(vector, body)}
            for index, vector in enumerate(found.pooled)
        ]
        answer: dict[str, Any] = {
            "id": call.id,
            "object": "list",
            "created": call.created,
            "model": call.model,
            "data": data,
            "usage": {
                "prompt_tokens": found.prompt_tokens,
                "total_tokens": found.prompt_tokens,
            },
        }
        return json_response(answer)

    return finish(await unhurried(work, large=len(found.pooled) >= THREAD_FROM), call)


def _written(pooled: bytes, body: EmbeddingRequest) -> str | Sequence[float]:
    """The vector as a list of numbers, or as base64 of little-endian f32."""
    vector = vector_of(pooled, normalize=body.normalize is not False)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()
