"""The real model under every form: in the caller's process, and in an event loop."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, AsyncEngineArgs, AsyncLLMEngine, SamplingParams, StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.outputs import CompletionOutput
from octavo.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.grammar.parts import random_schema

pytestmark = pytest.mark.model
# Few blocks: some of many sequences are preempted.
SIZES = {"max_model_len": 512, "num_gpu_blocks_override": 48, "max_num_seqs": 8}
PROMPT = "Write an entry of a register, as JSON."


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    made = LLM(str(smollm2_gguf), **SIZES)
    yield made
    made.shutdown()


def ask(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    messages = [[{"role": "user", "content": PROMPT}]] * len(params)
    outputs = llm.chat(messages, params, use_tqdm=False)
    return [choice for output in outputs for choice in output.outputs]


def test_random_schemas(llm: LLM) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    schemas = [random_schema(draw, depth=2) for _ in range(16)]
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.8, 1.5]),
            seed=seed,
            max_tokens=120,
            structured_outputs=StructuredOutputs(json=schema),
        )
        for schema in schemas
    ]
    ended = 0
    for schema, choice in zip(schemas, ask(llm, params), strict=True):
        if choice.finish_reason == "stop":
            ended += 1
            jsonschema.validate(json.loads(choice.text), schema)
        else:
            assert choice.finish_reason == "length"
    assert ended >= 8, f"seed {seed}"


def test_every_form_beside_plain_requests_as_alone(llm: LLM) -> None:
    seed = random.randrange(2**31)
    demands: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"\d{3}-[a-z]{4,6}"}, r"\d{3}-[a-z]{4,6}"),
        ({"regex": "[а-яё]{3,5} [漢字かな]{2}"}, "[а-яё]{3,5} [漢字かな]{2}"),
        ({"choice": ["red 🦉", "naïve", "green"]}, "red 🦉|naïve|green"),
        ({"grammar": 'root ::= "yes" | "no, " [a-z]{1,3}'}, "yes|no, [a-z]{1,3}"),
        ({"json": {"enum": ["ä", 3, None]}}, '"ä"|3|null'),
    ]
    params = [
        SamplingParams(
            temperature=1, seed=seed, max_tokens=60, n=2,
            structured_outputs=StructuredOutputsParams(**demand),
        )
        for demand, _ in demands
    ]  # fmt: skip
    params += [SamplingParams(temperature=1, seed=seed, max_tokens=40)] * 3
    together = ask(llm, params)
    alone = [choice for one in params for choice in ask(llm, [one])]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone], f"seed {seed}"
    for index, (_, pattern) in enumerate(demands):
        for choice in together[2 * index : 2 * index + 2]:
            assert choice.finish_reason == "stop", f"seed {seed}"
            assert re.fullmatch(pattern, choice.text), f"seed {seed}: {choice.text!r}"


def test_stops_and_limits_cut_a_form(llm: LLM) -> None:
    form = StructuredOutputs(regex="[a-z]{60}x[a-z]{20}")
    cut, stopped = ask(
        llm,
        [
            SamplingParams(temperature=1, max_tokens=3, structured_outputs=form),
            SamplingParams(temperature=1, max_tokens=90, stop="x", structured_outputs=form),
        ],
    )
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)
    assert stopped.finish_reason == "stop"
    assert "x" not in stopped.text


def test_what_cannot_be_is_refused_before_anything_runs(llm: LLM) -> None:
    bad = SamplingParams(structured_outputs=StructuredOutputs(json={"uniqueItems": True}))
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        llm.generate(["x", "y"], [SamplingParams(), bad], use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()
    for wrong in ({"ignore_eos": True}, {"structured_outputs": {"regex": "a", "json": {}}}):
        with pytest.raises(InvalidRequest):
            SamplingParams(**({"structured_outputs": {"regex": "a"}} | wrong))  # type: ignore[arg-type]


async def test_in_an_event_loop(smollm2_gguf: Path) -> None:
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(smollm2_gguf), **SIZES))

    async def one(number: int) -> str:
        params = SamplingParams(
            max_tokens=30,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=StructuredOutputs(json={"const": f"number {number}"}),
        )
        async for output in engine.generate("Go", params, f"r{number}"):
            if output.finished:
                return output.outputs[0].text
        raise AssertionError("no end")

    try:
        texts = await asyncio.gather(*map(one, range(8)))
        assert texts == [f'"number {number}"' for number in range(8)]
        bad = SamplingParams(structured_outputs=StructuredOutputs(regex="("))
        with pytest.raises(InvalidRequest, match="regex"):
            async for _ in engine.generate("Go", bad, "bad"):
                pass
    finally:
        await engine.close()
