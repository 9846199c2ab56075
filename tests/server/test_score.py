"""/v1/score and /v1/rerank: cosines of the vectors that /v1/embeddings gives."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from octavo.server.app import create_app
from tests.server.asgi import Reply, call
from tests.server.fake_engine import FakeEngine

WORDS = ("owl", "hoots", "at", "night", "crème", "brûlée", "日本語", "🦉", "1, 2, 3")


def texts(count: int) -> list[str]:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, 9))) for _ in range(count)]


async def ask(path: str, body: dict[str, Any]) -> Reply:
    return await call(create_app(FakeEngine()), "POST", path, body)


async def cosines(one: str, others: list[str], **fields: Any) -> list[float]:
    reply = await ask("/v1/embeddings", {"input": [one, *others], **fields})
    first, *rest = (entry["embedding"] for entry in reply.json["data"])
    return [math.fsum(a * b for a, b in zip(first, other, strict=True)) for other in rest]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_one_text_against_many(path: str, pooling: str) -> None:
    query, *others = texts(6)
    reply = await ask(path, {"text_1": query, "text_2": others, "pooling": pooling})
    assert reply.status == 200
    assert reply.json["object"] == "list"
    assert reply.json["id"].startswith("score-")
    assert [entry["index"] for entry in reply.json["data"]] == list(range(5))
    assert {entry["object"] for entry in reply.json["data"]} == {"score"}
    found = [entry["score"] for entry in reply.json["data"]]
    assert found == pytest.approx(await cosines(query, others, pooling=pooling), abs=1e-6)
    assert reply.json["usage"]["total_tokens"] == reply.json["usage"]["prompt_tokens"] > 6


async def test_pairs_and_what_is_no_pair() -> None:
    ones, others = texts(3), texts(3)
    reply = await ask("/v1/score", {"text_1": ones, "text_2": others})
    expected = [(await cosines(one, [other]))[0] for one, other in zip(ones, others, strict=True)]
    assert [e["score"] for e in reply.json["data"]] == pytest.approx(expected, abs=1e-6)
    single = await ask("/v1/score", {"text_1": ones[0], "text_2": ones[0]})
    assert single.json["data"][0]["score"] == pytest.approx(1, abs=1e-6)
    for body in (
        {"text_1": ones, "text_2": others[:2]},
        {"text_1": ones[:2], "text_2": others[0]},
        {"text_1": [], "text_2": []},
        {"text_1": [[1, 2]], "text_2": "x"},
        {"text_1": "x"},
        {"text_1": "", "text_2": "x"},
    ):
        reply = await ask("/v1/score", body)
        assert reply.status == 400, body
        assert reply.error["param"], body


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_nearest_first(path: str) -> None:
    query, *documents = texts(8)
    reply = await ask(path, {"query": query, "documents": documents})
    results = reply.json["results"]
    expected = await cosines(query, documents)
    assert sorted(one["index"] for one in results) == list(range(7))
    for one in results:
        assert one["document"] == {"text": documents[one["index"]]}
        assert one["relevance_score"] == pytest.approx(expected[one["index"]], abs=1e-6)
    values = [one["relevance_score"] for one in results]
    assert values == sorted(values, reverse=True)
    top = await ask(path, {"query": query, "documents": documents, "top_n": 3})
    assert top.json["results"] == results[:3]
    more = await ask(path, {"query": query, "documents": documents, "top_n": 99})
    assert more.json["results"] == results
    assert (await ask(path, {"query": query, "documents": [], "top_n": 1})).status == 400
    wrong = await ask(path, {"query": query, "documents": documents, "top_n": -1})
    assert wrong.error["param"] == "top_n"
