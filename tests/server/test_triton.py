"""The KServe v2 routes: text in, text out, in every spelling; metadata; refusals in their form."""

from __future__ import annotations

import asyncio
import json
import random
import struct
from typing import Any

import pytest

from octavo.errors import Overloaded
from octavo.server.app import create_app
from octavo.server.tensors import HEAD_LENGTH
from octavo.server.triton import TRITON_REFUSED
from tests.server.asgi import Exchange, Reply, call, complete
from tests.server.fake_engine import ANSWER, FakeEngine, Faults, strict_loads

MODEL = "/v2/models/owl-1"
TEXT = {"text_input": "The owls"}


def bytes_of(*texts: str) -> bytes:
    parts = [text.encode() for text in texts]
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def tensor(*texts: str, shape: list[int] | None = None) -> dict[str, Any]:
    shape = [len(texts)] if shape is None else shape
    return {"name": "text_input", "datatype": "BYTES", "shape": shape, "data": list(texts)}


async def infer(app: Any, *inputs: dict[str, Any], **fields: Any) -> Reply:
    return await call(app, "POST", f"{MODEL}/infer", {"inputs": list(inputs), **fields})


def refusal(reply: Reply, status: int = 400) -> str:
    assert reply.status == status, reply.body
    assert set(reply.json) == {"error"}
    return str(reply.json["error"])


async def test_generate_is_a_completion() -> None:
    app = create_app(FakeEngine())
    plain = (await complete(app, max_tokens=9)).json["choices"][0]["text"]
    for fields in (
        {"max_tokens": 9},
        {"parameters": {"max_tokens": 9}},
        {"parameters": {"sampling_parameters": {"max_tokens": 9}}},
        {"sampling_parameters": json.dumps({"max_tokens": 9}), "parameters": {"stream": False}},
    ):
        reply = await call(app, "POST", f"{MODEL}/generate", {**TEXT, **fields})
        assert reply.json == {"model_name": "owl-1", "model_version": "1", "text_output": plain}
    version = await call(app, "POST", f"{MODEL}/versions/1/generate", {**TEXT, "id": "a 7"})
    assert version.json["id"] == "a 7"
    many = await call(app, "POST", f"{MODEL}/generate", {**TEXT, "n": 2, "max_tokens": 3})
    assert [len(many.json["text_output"]), many.status] == [2, 200]


async def test_what_else_can_be_asked_for() -> None:
    app = create_app(FakeEngine())
    wishes = dict.fromkeys(
        ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"), True
    )
    asked = {**TEXT, **wishes, "exclude_input_in_output": False, "max_tokens": 4}
    reply = (await call(app, "POST", f"{MODEL}/generate", asked)).json
    assert reply["text_output"].startswith("The owls The owls")
    assert reply["finish_reason"] == "length"
    assert reply["num_output_tokens"] == 4
    assert reply["num_input_tokens"] > 0


async def test_a_stream_joins_to_the_answer() -> None:
    app = create_app(FakeEngine())
    asked = {**TEXT, "max_tokens": 100, "return_finish_reason": True, "id": "s"}
    reply = await call(app, "POST", f"{MODEL}/generate_stream", asked)
    assert "[DONE]" not in reply.body.decode()
    events = reply.events
    assert "".join(event["text_output"] for event in events) == ANSWER
    assert {event["id"] for event in events} == {"s"}
    assert [event.get("finish_reason") for event in events][-1] == "stop"
    assert len(events) > 3
    once = await call(app, "POST", f"{MODEL}/generate_stream", {**asked, "stream": False})
    assert [event["text_output"] for event in once.events] == [ANSWER]


async def test_a_stream_that_fails_says_so() -> None:
    engine = FakeEngine(faults=Faults(die_after=3))
    reply = await call(create_app(engine), "POST", f"{MODEL}/generate_stream", TEXT)
    assert reply.events[-1] == {"error": "the engine core is gone"}
    engine = FakeEngine(faults=Faults(die_after=0))
    reply = await call(create_app(engine), "POST", f"{MODEL}/generate_stream", TEXT)
    assert refusal(reply, 503) == "the engine core is gone"


async def test_infer_in_json() -> None:
    app = create_app(FakeEngine())
    limit = {"name": "max_tokens", "datatype": "INT32", "shape": [1], "data": [5]}
    plain = (await complete(app, max_tokens=5)).json["choices"][0]["text"]
    reply = await infer(app, tensor("The owls", shape=[1, 1]), limit, id="q")
    output = {"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": [plain]}
    assert reply.json == {
        "model_name": "owl-1",
        "model_version": "1",
        "id": "q",
        "outputs": [output],
    }
    several = await infer(app, tensor("a b", "c d", "e"), parameters={"max_tokens": 2})
    assert several.json["outputs"][0]["shape"] == [3]
    assert len(several.json["outputs"][0]["data"]) == 3
    wanted = [{"name": "num_output_tokens"}]
    flag = {"name": "return_num_output_tokens", "datatype": "BOOL", "shape": [1], "data": [True]}
    counted = await infer(app, tensor("a b"), flag, limit, outputs=wanted)
    assert [one["data"] for one in counted.json["outputs"]] == [[5]]


async def test_infer_in_binary() -> None:
    app = create_app(FakeEngine())
    dice = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    texts = ["".join(dice.choices("aé猫🦉 ", k=dice.randint(1, 9))) for _ in range(3)]
    data = bytes_of(*texts)
    size = {"binary_data_size": len(data)}
    seven = struct.pack("<i", 7)
    inputs = [
        {"name": "text_input", "datatype": "BYTES", "shape": [3], "parameters": size},
        {"name": "max_tokens", "datatype": "INT32", "shape": [1]},
    ]
    inputs[1]["parameters"] = {"binary_data_size": len(seven)}
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    headers = {HEAD_LENGTH: str(len(head))}
    reply = await call(
        app, "POST", f"{MODEL}/infer", raw=head + data + seven, headers=headers, pieces=5
    )
    assert reply.status == 200, reply.body
    length = int(reply.headers[HEAD_LENGTH.lower()])
    answer = strict_loads(reply.body[:length])
    plain = await infer(app, tensor(*texts), parameters={"max_tokens": 7})
    assert isinstance(answer, dict)
    (output,) = answer["outputs"]
    assert output["parameters"]["binary_data_size"] == len(reply.body) - length
    assert reply.body[length:] == bytes_of(*plain.json["outputs"][0]["data"])


HUGE = {"name": "text_input", "datatype": "BYTES", "shape": [2**40, 2**40], "data": []}
BAD_INPUTS: list[tuple[Any, str]] = [
    ([], "send text_input"),
    ([{**tensor("a"), "datatype": "FP32"}], "no FP32"),
    ([{**tensor("a"), "datatype": "TEXT"}], "datatype TEXT"),
    ([tensor("a", shape=[2])], "needs 2 elements and has 1"),
    ([tensor("a", shape=[-1])], "sizes of 0 or more"),
    ([tensor("a", shape=[1] * 9)], "at most 8"),
    ([HUGE], "elements; send at most"),
    ([tensor(shape=[0])], "text_input is empty"),
    ([tensor("a"), tensor("b")], "given twice"),
    ([{**tensor("a"), "data": None}], "binary_data_size"),
    ([{**tensor("a"), "data": [7]}], "no BYTES"),
    ([{**tensor("a"), "parameters": {"shared_memory_region": "x"}}], "shared memory"),
    ([tensor("a"), {**tensor("1", "2"), "name": "seed"}], "seed has 2 elements"),
    ([tensor("a"), {**tensor("x"), "name": "wings"}], "wings is not a known field"),
    ([tensor("a"), {**tensor("x"), "name": "max_tokens"}], "max_tokens"),
]


@pytest.mark.parametrize(("inputs", "words"), BAD_INPUTS)
async def test_bad_tensors(inputs: list[Any], words: str) -> None:
    assert words in refusal(await infer(create_app(FakeEngine()), *inputs))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"outputs": [{"name": "wings"}]}, "there is text_output"),
        ({"outputs": [{"name": "num_input_tokens"}]}, "num_input_tokens is not made"),
        ({"outputs": [{"name": "text_output", "parameters": {"classification": 1}}]}, "leave it"),
        ({"outputs": [{"name": "text_output", "parameters": {"binary_data": "no"}}]}, "= no must"),
        ({"parameters": {"binary_data_output": 0}}, "binary_data_output = 0 must be true or"),
    ],
)
async def test_bad_outputs_cost_no_answer(fields: dict[str, Any], words: str) -> None:
    engine = FakeEngine()
    assert words in refusal(await infer(create_app(engine), tensor("a"), **fields))
    assert not engine.seen


async def test_mutated_binary_bodies_never_break_it() -> None:
    app = create_app(FakeEngine())
    dice = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    data = bytes_of("one", "two")
    item = {"name": "text_input", "datatype": "BYTES", "shape": [2]}
    item["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({"inputs": [item], "parameters": {"max_tokens": 1}}).encode()
    body = head + data
    for _ in range(300):
        raw = bytearray(body)
        for _ in range(dice.randint(1, 4)):
            at = dice.randrange(len(raw))
            if dice.random() < 0.3:
                del raw[at : at + dice.randint(1, 5)]
            else:
                raw[at] = dice.randrange(256)
        length = str(len(head) + dice.choice((0, 0, 0, 1, -1, 99999)))
        headers = {HEAD_LENGTH: length}
        reply = await call(app, "POST", f"{MODEL}/infer", raw=bytes(raw), headers=headers)
        assert reply.status in (200, 400), reply.body
        if reply.status == 400:
            refusal(reply)


BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({}, "text_input must be a text"),
    ({"text_input": ["a"]}, "text_input must be a text"),
    ({"text_input": ""}, "text_input is empty"),
    ({**TEXT, "id": 7}, "id must be a text"),
    ({**TEXT, "parameters": []}, "parameters must be an object"),
    ({**TEXT, "temperature": 2, "parameters": {"temperature": 1}}, "temperature is given twice"),
    ({**TEXT, "temperatur": 2}, "did you mean temperature?"),
    ({**TEXT, "parameters": {"temperature": -1}}, "temperature"),
    ({**TEXT, "sampling_parameters": "{"}, "cannot be read"),
    ({**TEXT, "stream": True}, "generate_stream"),
    ({**TEXT, "stream": "yes"}, "stream"),
    ({**TEXT, "max_tokens": 10_000}, "maximum context length"),
]


@pytest.mark.parametrize(("body", "words"), BAD_GENERATE)
async def test_bad_generate_requests(body: dict[str, Any], words: str) -> None:
    reply = await call(create_app(FakeEngine()), "POST", f"{MODEL}/generate", body)
    assert words in refusal(reply)


async def test_refused_settings_name_what_to_do() -> None:
    app = create_app(FakeEngine())
    for name, (_, remedy) in TRITON_REFUSED.items():
        reply = await call(app, "POST", f"{MODEL}/generate", {**TEXT, name: {"a": 1}})
        assert refusal(reply) == f"{name} is not supported here: {remedy}."
    for asked in ({"n": 2}, {"exclude_input_in_output": False}):
        reply = await call(app, "POST", f"{MODEL}/generate_stream", {**TEXT, **asked})
        assert "does not go with a stream" in refusal(reply)


async def test_other_models_and_versions() -> None:
    app = create_app(FakeEngine())
    for path in ("/v2/models/cat", f"{MODEL}/versions/2", f"{MODEL}/versions/2/ready"):
        assert refusal(await call(app, "GET", path), 404)
    assert refusal(await call(app, "POST", "/v2/models/cat/generate", TEXT), 404)
    alias = await call(app, "POST", "/v2/models/owl/alias/versions/1/generate", TEXT)
    assert alias.json["model_name"] == "owl/alias"


async def test_overload_keeps_its_header() -> None:
    engine = FakeEngine(faults=Faults(refuse=Overloaded("busy", 3.2)))
    reply = await call(create_app(engine), "POST", f"{MODEL}/generate", TEXT)
    assert refusal(reply, 429) == "busy"
    assert reply.headers["retry-after"] == "4"


async def test_metadata() -> None:
    app = create_app(FakeEngine())
    server = (await call(app, "GET", "/v2")).json
    assert server["name"] == "octavo"
    assert "generate" in server["extensions"]
    for path in (MODEL, f"{MODEL}/versions/1"):
        card = (await call(app, "GET", path)).json
        assert card["versions"] == ["1"]
        assert card["inputs"][0] == {"name": "text_input", "datatype": "BYTES", "shape": [-1]}
        assert card["outputs"][0]["name"] == "text_output"
    config = (await call(app, "GET", f"{MODEL}/config")).json
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    assert config["model_transaction_policy"] == {"decoupled": True}
    index = (await call(app, "POST", "/v2/repository/index")).json
    assert [entry["name"] for entry in index] == ["owl-1", "owl/alias"]


async def test_counts() -> None:
    app = create_app(FakeEngine())
    await call(app, "POST", f"{MODEL}/generate", {**TEXT, "n": 3, "max_tokens": 2})
    await complete(app, max_tokens=2)
    for path in ("/v2/models/stats", f"{MODEL}/stats"):
        (entry,) = (await call(app, "GET", path)).json["model_stats"]
        assert entry["inference_count"] == 4
        assert entry["inference_stats"]["success"]["count"] == 4


@pytest.mark.parametrize(
    ("health", "live", "ready"),
    [
        ({}, 200, 200),
        ({"phase": "loading", "ready": False}, 200, 503),
        ({"phase": "draining", "ready": False}, 200, 503),
        ({"phase": "dead", "alive": False, "ready": False}, 503, 503),
    ],
)
async def test_health(health: dict[str, Any], live: int, ready: int) -> None:
    engine = FakeEngine()
    engine.set_health(**health)
    app = create_app(engine)
    assert (await call(app, "GET", "/v2/health/live")).status == live
    assert (await call(app, "GET", "/v2/health/ready")).status == ready
    assert (await call(app, "GET", f"{MODEL}/ready")).status == ready
    reply = await call(app, "POST", f"{MODEL}/generate", TEXT)
    assert reply.status == ready
    if ready == 503:
        assert refusal(reply, 503)


async def test_what_generates_is_counted_as_load() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    app = create_app(engine)
    body = json.dumps(TEXT).encode()
    ends = [
        Exchange(app, "POST", f"{MODEL}/{action}", body=body)
        for action in ("generate", "generate_stream", "versions/1/generate")
    ]
    while engine.running < len(ends):
        await asyncio.sleep(0)
    assert (await call(app, "GET", "/load")).json == {"server_load": 3}
    engine.gate.set()
    for exchange in ends:
        await exchange.end()
    assert (await call(app, "GET", "/load")).json == {"server_load": 0}


async def test_a_client_that_leaves_ends_its_request() -> None:
    engine = FakeEngine(step_seconds=0.01)
    body = json.dumps({**TEXT, "max_tokens": 200, "ignore_eos": True}).encode()
    for action in ("generate", "generate_stream"):
        exchange = Exchange(create_app(engine), "POST", f"{MODEL}/{action}", body=body)
        while not engine.running:
            await asyncio.sleep(0)
        exchange.gone.set()
        await asyncio.wait_for(exchange.task, 5)
        assert engine.running == 0
    assert engine.aborted == 2
