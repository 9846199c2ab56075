"""POST /v1/score and /v1/rerank: how near texts are, as the cosine of their vectors.

As vLLM answers for a model that embeds: the vectors are those of /v1/embeddings. A model that was
not trained to embed ranks poorly; nothing here makes it better. Not for: models that look at both
texts together. Next file: `embeddings.py`.
"""

from __future__ import annotations

from array import array
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.server.answer import Call, begin, finish
from octavo.server.body import read_record, unhurried
from octavo.server.context import serving_of
from octavo.server.embeddings import Vectors, completion_of, vectors_of
from octavo.server.errors import json_response
from octavo.server.refusals import SCORE_REFUSED
from octavo.server.schema import RerankRequest, ScoreRequest


async def score(request: Request) -> Response:
    """How near texts are to each other: one to each of many, or pair by pair."""
    serving = serving_of(request)
    serving.require_ready()
    body, ignored = await read_record(request, serving.settings, ScoreRequest, SCORE_REFUSED)
    ones, others = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
    if len(ones) not in (1, len(others)):
        raise InvalidRequest(
            f"text_1 has {len(ones)} texts and text_2 has {len(others)}; send one for all, or as "
            "many.",
            "text_1",
        )
    asked = completion_of(body, [*ones, *others])
    call = begin(request, serving, asked, ignored, "score")
    found = await vectors_of(request, call, asked, pooling=body.pooling, name="text_1 or text_2")

    def work() -> Response:
        unit = found.units()
        left, right = unit[: len(ones)], unit[len(ones) :]
        left = left * len(right) if len(left) == 1 else left
        data = [
            {"index": index, "object": "score", "score": _cosine(*pair)}
            for index, pair in enumerate(zip(left, right, strict=True))
        ]
        return json_response({**_head(call), "object": "list", "data": data, **_usage(found)})

    return finish(await unhurried(work, large=True), call)


async def rerank(request: Request) -> Response:
    """Documents by how near they are to a query, nearest first."""
    serving = serving_of(request)
    serving.require_ready()
    body, ignored = await read_record(request, serving.settings, RerankRequest, SCORE_REFUSED)
    documents = _texts(body.documents, "documents")
    top = len(documents) if not body.top_n else body.top_n
    if top < 0:
        raise InvalidRequest(f"top_n = {body.top_n} must be 0 (all) or more.", "top_n")
    asked = completion_of(body, [body.query, *documents])
    call = begin(request, serving, asked, ignored, "rerank")
    found = await vectors_of(request, call, asked, pooling=body.pooling, name="query or documents")

    def work() -> Response:
        query, *rest = found.units()
        scores = [(_cosine(query, one), -index) for index, one in enumerate(rest)]
        results = [
            {"index": -place, "document": {"text": documents[-place]}, "relevance_score": value}
            for value, place in sorted(scores, reverse=True)[:top]
        ]
        return json_response({**_head(call), "results": results, **_usage(found)})

    return finish(await unhurried(work, large=True), call)


def _texts(value: str | list[str], name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise InvalidRequest(f"{name} is an empty list; send at least one text.", name)
    return texts


def _cosine(one: array[float], other: array[float]) -> float:
    """Of vectors of length 1."""
    return sum(map(float.__mul__, one, other))


def _head(call: Call) -> dict[str, Any]:
    return {"id": call.id, "created": call.created, "model": call.model}


def _usage(found: Vectors) -> dict[str, Any]:
    tokens = found.prompt_tokens
    return {"usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
