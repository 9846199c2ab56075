"""/v1/embeddings: forms of input and output, settings, refusals."""

from __future__ import annotations

import base64
import math
from array import array
from typing import Any

import pytest

from octavo.server.app import create_app
from tests.server.asgi import Reply, call
from tests.server.fake_engine import FakeEngine


async def embed(app: Any, given: Any = "The owls hoot", **fields: Any) -> Reply:
    return await call(app, "POST", "/v1/embeddings", {"input": given, **fields})


def of(ids: list[int], kind: float = 0.0) -> list[float]:
    return [kind, float(sum(ids)), float(len(ids)), float(ids[-1])]


async def test_vectors_in_the_order_of_the_texts() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    texts = ["The owls hoot", "a", "crème brûlée"]
    ids = [engine.tokenizer.encode(text) for text in texts]
    reply = (await embed(app, texts, normalize=False)).json
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    assert [entry["embedding"] for entry in reply["data"]] == [of(one) for one in ids]
    assert reply["object"] == "list"
    count = sum(map(len, ids))
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}
    by_ids = (await embed(app, ids, normalize=False)).json
    assert by_ids["data"] == reply["data"]
    one = (await embed(app, ids[0], normalize=False)).json
    assert one["data"] == reply["data"][:1]


async def test_length_one_kind_and_base64() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    ids = engine.tokenizer.encode("The owls hoot")
    plain = (await embed(app)).json["data"][0]["embedding"]
    assert math.isclose(math.hypot(*plain), 1, rel_tol=1e-6)
    assert plain[2] / plain[1] == pytest.approx(len(ids) / sum(ids), rel=1e-5)
    coded = (await embed(app, encoding_format="base64")).json["data"][0]["embedding"]
    assert array("f", base64.b64decode(coded)).tolist() == plain
    mean = (await embed(app, pooling="mean", normalize=False)).json["data"][0]["embedding"]
    assert mean == of(ids, 1.0)
    assert engine.seen[-1].params.max_tokens == 1
    cut = await embed(app, truncate_prompt_tokens=2, normalize=False)
    assert cut.json["data"][0]["embedding"] == of(ids[-2:])


async def test_it_goes_through_invocations() -> None:
    app = create_app(FakeEngine())
    reply = await call(app, "POST", "/invocations", {"input": "The owls hoot"})
    assert reply.json["data"] == (await embed(app)).json["data"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dimensions": 16}, "dimensions is not supported here"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is an empty list"),
        ({"input": [10**9]}, "outside the vocabulary"),
        ({"input": [5] * 300}, "maximum context length"),
        ({"inputs": "x"}, "did you mean input?"),
    ],
)
async def test_refusals(fields: dict[str, Any], words: str) -> None:
    reply = await call(
        create_app(FakeEngine()), "POST", "/v1/embeddings", {"input": "The owls", **fields}
    )
    assert reply.status == 400
    assert words in reply.error["message"]
