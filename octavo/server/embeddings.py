"""POST /v1/embeddings: texts to vectors, from the hidden states of the model that also answers.

A vector is the last hidden state of a text (`pooling: "last"`, as for models that read from left
to right) or the mean of all (`"mean"`), after the model's last norm, scaled to length 1 unless
`normalize` is false. A text is run as a prompt of one token's answer, so it shares steps, pages,
admission and deadlines with everything else. Not for: other kinds of pooling heads.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestFailed
from octavo.pooling import vector_of
from octavo.server.answer import begin, finish
from octavo.server.body import read_record, unhurried
from octavo.server.completions import completion_job
from octavo.server.context import serving_of
from octavo.server.errors import json_response, named_as_sent
from octavo.server.refusals import EMBEDDING_REFUSED
from octavo.server.schema import CompletionRequest, EmbeddingRequest
from octavo.server.stream import whole

THREAD_FROM = 16  # vectors of one answer that are written in a thread


async def embeddings(request: Request) -> Response:
    """Texts, or lists of token ids, to vectors."""
    serving = serving_of(request)
    serving.require_ready()
    body, ignored = await read_record(
        request, serving.settings, EmbeddingRequest, EMBEDDING_REFUSED
    )
    asked = CompletionRequest(
        prompt=body.input,
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
    call = begin(request, serving, asked, ignored, "embd")
    with named_as_sent({"prompt": "input"}):
        job = await completion_job(call, asked)
    job.params.pooling = body.pooling or "last"
    choices, usage = await whole(request, call, job)
    vectors = [choice.pooled for choice in choices]

    def work() -> Response:
        data = [
            {"index": index, "object": "embedding", "embedding": _written(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        answer: dict[str, Any] = {
            "id": call.id,
            "object": "list",
            "created": call.created,
            "model": call.model,
            "data": data,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "total_tokens": usage.prompt_tokens,
            },
        }
        return json_response(answer)

    return finish(await unhurried(work, large=len(vectors) >= THREAD_FROM), call)


def _written(pooled: bytes, body: EmbeddingRequest) -> str | Sequence[float]:
    """The vector as a list of numbers, or as base64 of little-endian f32."""
    if not pooled:
        raise RequestFailed("The engine gave no hidden state.")
    vector = vector_of(pooled, normalize=body.normalize is not False)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()
