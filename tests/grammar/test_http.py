"""What `response_format` and `structured_outputs` of a request become, and how they are refused."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from octavo.grammar.request import StructuralTag, StructuredOutputs, Tag
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from tests.server.asgi import chat, complete
from tests.server.fake_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
TAG_RECORD = StructuralTag(tags=[Tag(begin="<f>", schema=SCHEMA, end="</f>")], triggers=["<f"])
NEWER = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [
        {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
    ],
}
TEXT: dict[str, Any] = {"type": "text"}
MEANINGS: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": TEXT}, None),
    (
        {"response_format": TEXT, "structured_outputs": {"regex": "a+"}},
        StructuredOutputs(regex="a+"),
    ),
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "strict": True, "schema": SCHEMA},
            }
        },
        StructuredOutputs(json=SCHEMA),
    ),
    (
        {"response_format": {"type": "structural_tag", **TAGS}},
        StructuredOutputs(structural_tag=TAG_RECORD),
    ),
    (
        {"response_format": {"type": "structural_tag", "format": NEWER}},
        StructuredOutputs(structural_tag=TAG_RECORD),
    ),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputs(grammar='start: "a"')),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    ),
]


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(("fields", "meaning"), MEANINGS)
async def test_what_fields_mean(
    ask: Any, fields: dict[str, Any], meaning: StructuredOutputs | None
) -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings())
    for stream in (False, True):
        reply = await ask(app, max_tokens=2, stream=stream, **fields)
        assert reply.status == 200, reply.body
        assert engine.seen[-1].params.structured_outputs == meaning


@pytest.mark.parametrize("ask", [chat, complete])
@pytest.mark.parametrize(
    ("param", "says", "fields"),
    [
        ("response_format", "json_object", {"response_format": {"type": "jsn"}}),
        ("response_format", "json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format",
            "response_format.json_schema: uniqueItems",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"uniqueItems": True}},
                }
            },
        ),
        (
            "response_format",
            "one of them",
            {
                "response_format": {"type": "json_object"},
                "structured_outputs": {"regex": "a"},
            },
        ),
        ("structured_outputs", "structured_outputs.regex", {"structured_outputs": {"regex": "("}}),
        ("structured_outputs", "exactly one", {"structured_outputs": {}}),
        ("structured_outputs", "regexp", {"structured_outputs": {"regexp": "a"}}),
        ("ignore_eos", "ignore_eos", {"structured_outputs": {"regex": "a"}, "ignore_eos": True}),
        ("guided_json", "structured_outputs with json", {"guided_json": SCHEMA}),
        ("guided_decoding_backend", "one backend", {"guided_decoding_backend": "outlines"}),
    ],
)
async def test_what_is_refused(ask: Any, param: str, says: str, fields: dict[str, Any]) -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings())
    for stream in (False, True):
        reply = await ask(app, stream=stream, **fields)
        assert reply.status == 400
        assert reply.error["param"] == param
        assert says in reply.error["message"]
    assert not engine.seen


async def test_others_are_served_while_a_grammar_compiles() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings())
    await complete(app, structured_outputs={"regex": "a"}, max_tokens=1)  # starts the process
    values = [f"value {random.random()}" for _ in range(5000)]
    slow = asyncio.ensure_future(complete(app, structured_outputs={"json": {"enum": values}}))
    served = 0
    begun = time.monotonic()
    while not slow.done() and time.monotonic() - begun < 20:
        assert (await complete(app, max_tokens=1)).status == 200
        served += 1
    assert (await slow).status == 200
    assert served >= 2
