"""Tools and reasoning over HTTP: what is refused, what the model sees, what the client gets."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from octavo.grammar.request import StructuralTag, StructuredOutputs
from octavo.options import ServerArgs
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.text import reasoning
from octavo.text.chat import ChatTemplate
from octavo.text.tools import choose
from tests.server.asgi import Reply, call, chat
from tests.server.fake_engine import FakeEngine
from tests.text.samples import CHATML
from tests.text.templates import DEEPSEEK, QWEN

PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTE = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
LOOK = {"type": "function", "function": {"name": "look", "description": "At the sea."}}
NAMED = {"type": "function", "function": {"name": "note"}}
CALL = '<tool_call>\n{"name": "note", "arguments": {"text": "a 🦉 \\"b\\""}}\n</tool_call>'
AUTO = ServerSettings(enable_auto_tool_choice=True)
THINKING = ServerSettings(enable_auto_tool_choice=True, reasoning_parser="qwen3")


def engine_saying(text: str, template: str = QWEN) -> FakeEngine:
    engine = FakeEngine()
    ids = [*engine.tokenizer.encode_plain(text), 2]
    engine.script = lambda prompt, index: ids
    engine.limits = replace(engine.limits, max_model_len=4096)
    engine.chat_template = ChatTemplate(template, engine.tokenizer)
    return engine


def prompt_of(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt_ids, skip_special_tokens=False)


def form_of(engine: FakeEngine) -> StructuredOutputs:
    form = engine.seen[-1].params.structured_outputs
    assert isinstance(form, StructuredOutputs)
    return form


def folded(reply: Reply, index: int = 0) -> dict[str, Any]:
    """A stream as the choice that a plain answer has, after a check of the order of its parts."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    calls: list[dict[str, Any]] = []
    reason = None
    events = reply.events
    assert events.pop() == "[DONE]"
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert reason is None, "something follows the finish reason"
            delta = dict(choice["delta"])
            delta.pop("role", None)
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta.pop(name)
            for part in delta.pop("tool_calls", []):
                if "id" in part:
                    assert part["index"] == len(calls)
                    assert set(part) == {"index", "id", "type", "function"}
                    calls.append({"id": "", "type": part["type"], "function": part["function"]})
                else:
                    assert part["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += part["function"]["arguments"]
            assert not delta
            reason = choice["finish_reason"]
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    elif message.get("reasoning") and not message["content"]:
        message["content"] = None
    return {"message": message, "finish_reason": reason}


def plain(reply: Reply, index: int = 0) -> dict[str, Any]:
    choice = reply.json["choices"][index]
    message = choice["message"]
    ids = [call["id"] for call in message.get("tool_calls", [])]
    assert len(set(ids)) == len(ids)
    for call_ in message.get("tool_calls", []):
        call_["id"] = ""
    if message.get("reasoning", 0) is None:
        del message["reasoning"], message["reasoning_content"]
    return {"message": message, "finish_reason": choice["finish_reason"]}


async def both(engine: FakeEngine, settings: ServerSettings, **fields: Any) -> dict[str, Any]:
    """The choice of a plain answer, once the streamed one has been found to be the same."""
    app = create_app(engine, settings)
    reply = await chat(app, **fields)
    assert reply.status == 200, reply.body
    streamed = await chat(app, stream=True, **fields)
    found, told = plain(reply), folded(streamed)
    if fields.get("tool_choice", "auto") not in (
        "auto",
        "none",
    ):  # a stream has begun before it is known
        told["message"]["content"] = told["message"]["content"] or None
    assert told == found
    return found


BAD = [
    ({"tools": [NOTE, NOTE]}, "tools[1].function.name"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [LOOK, {"type": "function", "function": {}}]}, "tools[1].function.name"),
    ({"tools": [{"function": {"name": "two words"}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "f", "paramters": {}}}]}, "tools[0].function.paramters"),
    ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [{"function": {"name": "f", "description": 3}}]}, "tools[0].function.description"),
    ({"tools": [LOOK] * 513}, "tools"),
    ({"tools": [NOTE], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [NOTE], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [NOTE], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {"tools": [NOTE], "tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": NAMED}, "tool_choice.function.name"),
]
SCHEMAS: list[tuple[Any, str]] = [
    ([], ""),
    ({"type": "strin"}, ".type"),
    ({"properties": []}, ".properties"),
    ({"properties": {"a": 3}}, ".properties.a"),
    ({"properties": {"a": {"type": "strin"}}}, ".properties.a.type"),
    ({"properties": {"a": {"type": []}}}, ".properties.a.type"),
    ({"properties": {"a": {"items": 3}}}, ".properties.a.items"),
    ({"properties": {"a": {"anyOf": []}}}, ".properties.a.anyOf"),
    ({"properties": {"a": {"anyOf": [{"enum": []}]}}}, ".properties.a.anyOf[0].enum"),
    ({"properties": {"a": {"pattern": 3}}}, ".properties.a.pattern"),
    ({"required": "a"}, ".required"),
    ({"$defs": {"b": {"$ref": 1}}}, ".$defs.b.$ref"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_tools_are_refused_by_their_place(stream: bool) -> None:
    engine = engine_saying("x")
    app = create_app(engine, AUTO)
    for fields, param in BAD:
        reply = await chat(app, stream=stream, **fields)
        assert reply.status == 400, fields
        assert reply.error["param"] == param, fields
        assert param in reply.error["message"]
    for schema, at in SCHEMAS:
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        reply = await chat(app, stream=stream, tools=[LOOK, tool])
        if schema == []:
            assert reply.status == 400
        else:
            assert reply.error["param"] == f"tools[1].function.parameters{at}", schema
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"type": "object", "properties": {"a": deep}}
    reply = await chat(app, tools=[{"function": {"name": "f", "parameters": deep}}])
    assert "deep" in reply.error["message"]
    assert not engine.seen


async def test_a_choice_of_none_needs_no_tools() -> None:
    engine = engine_saying(CALL)
    for fields in (
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": [NOTE], "tool_choice": "none"},
    ):
        choice = await both(engine, ServerSettings(), **fields)
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert "<tools>" in prompt_of(engine)  # of the last one, which the model may talk about


async def test_calls_are_read_and_named_as_the_reason() -> None:
    text = f"I will.\n{CALL}\n{CALL}"
    engine = engine_saying(text)
    choice = await both(engine, AUTO, tools=[NOTE, LOOK])
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I will."
    assert [json.loads(c["function"]["arguments"]) for c in message["tool_calls"]] == [
        {"text": 'a 🦉 "b"'}
    ] * 2
    assert engine.seen[-1].params.structured_outputs is None
    shown = prompt_of(engine)
    assert json.dumps(NOTE) in shown
    assert '"parameters": {"type": "object", "properties": {}' in shown
    only = await both(engine, AUTO, tools=[NOTE], parallel_tool_calls=False)
    assert len(only["message"]["tool_calls"]) == 1
    none = await both(engine_saying("Plain."), AUTO, tools=[NOTE])
    assert none == {
        "message": {"role": "assistant", "content": "Plain.", "refusal": None},
        "finish_reason": "stop",
    }


async def test_a_call_that_is_cut_is_no_finished_call() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    engine = engine_saying(CALL)
    length = len(engine.tokenizer.encode_plain(CALL))
    for tokens in random.Random(seed).sample(range(1, length), 12):
        choice = await both(engine, AUTO, tools=[NOTE], max_tokens=tokens)
        assert choice["finish_reason"] == "length"
        for made in choice["message"].get("tool_calls", []):
            assert '{"text": "a 🦉 \\"b\\""}'.startswith(made["function"]["arguments"])
    whole = await both(engine, AUTO, tools=[NOTE], max_tokens=length + 1)
    assert whole["finish_reason"] == "tool_calls"


async def test_a_forced_call_that_is_cut_before_its_name_is_no_content() -> None:
    forced = {"tools": [NOTE], "tool_choice": "required", "max_tokens": 1}
    choice = plain(await chat(create_app(engine_saying(CALL), AUTO), **forced))
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": None, "refusal": None}


async def test_streams_with_details_keep_them() -> None:
    engine = engine_saying(f"I will. {CALL}")
    fields: dict[str, Any] = {"tools": [NOTE], "n": 2, "logprobs": True, "return_token_ids": True}
    app = create_app(engine, AUTO)
    whole = (await chat(app, **fields)).json["choices"]
    events = (await chat(app, stream=True, stream_options={"include_usage": True}, **fields)).events
    for index in range(2):
        chosen = [c for e in events[:-2] for c in e["choices"] if c["index"] == index]
        ids = [token for c in chosen for token in c.get("token_ids") or ()]
        assert ids == whole[index]["token_ids"]
        entries = [one for c in chosen for one in (c.get("logprobs") or {}).get("content") or ()]
        assert entries == whole[index]["logprobs"]["content"]


async def test_forced_calls_have_a_grammar() -> None:
    engine = engine_saying(CALL)
    choice = await both(engine, ServerSettings(), tools=[NOTE, LOOK], tool_choice=NAMED)
    assert choice["finish_reason"] == "tool_calls"
    tags = form_of(engine).structural_tag
    assert isinstance(tags, StructuralTag)
    assert (tags.free_text, tags.at_least_one, tags.stop_after_first) == (False, True, True)
    (tag,) = tags.tags
    assert (tag.schema, '"note"' in tag.begin) == (PARAMETERS, True)
    await both(engine, ServerSettings(), tools=[NOTE, LOOK], tool_choice="required")
    tags = form_of(engine).structural_tag
    assert isinstance(tags, StructuralTag)
    assert (len(tags.tags), tags.stop_after_first) == (2, False)


async def test_a_strict_tool_binds_its_calls_only() -> None:
    engine = engine_saying("Hm.")
    strict = {"type": "function", "function": {**NOTE["function"], "strict": True}}  # type: ignore[dict-item]
    await both(engine, AUTO, tools=[strict, LOOK])
    tags = form_of(engine).structural_tag
    assert isinstance(tags, StructuralTag)
    assert tags.free_text
    assert [tag.schema for tag in tags.tags] == [PARAMETERS, {"type": "object"}]


async def test_auto_needs_its_flag_and_a_known_form() -> None:
    engine = engine_saying("x")
    reply = await chat(create_app(engine), tools=[NOTE])
    assert "--enable-auto-tool-choice" in reply.error["message"]
    unknown = engine_saying("x", "{{ tools }}{{ messages[0].content }}")
    reply = await chat(create_app(unknown, AUTO), tools=[NOTE])
    assert "--tool-call-parser" in reply.error["message"]
    without = engine_saying("x", CHATML)
    reply = await chat(create_app(without, AUTO), tools=[NOTE])
    assert "--chat-template" in reply.error["message"]


HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Look."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "blue"},
]


async def test_a_template_without_tools_gets_them_described() -> None:
    engine = engine_saying(CALL, CHATML)
    body = {"messages": HISTORY, "tools": [NOTE], "tool_choice": "required"}
    reply = await call(create_app(engine), "POST", "/v1/chat/completions", body)
    assert reply.json["choices"][0]["finish_reason"] == "tool_calls"
    shown = prompt_of(engine)
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions")
    assert '{"name": "note", "parameters": ' in shown
    assert 'assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im' in shown
    assert "user\n<tool_response>\nblue\n</tool_response>" in shown
    hermes = ServerSettings(enable_auto_tool_choice=True, tool_call_parser="hermes")
    choice = await both(engine, hermes, tools=[NOTE])
    assert choice["finish_reason"] == "tool_calls"
    await both(engine, ServerSettings(), tools=[NOTE], tool_choice="none")
    assert "function" not in prompt_of(engine)


@pytest.mark.parametrize(
    ("settings", "template", "text", "thought", "content"),
    [
        (THINKING, QWEN, "<think>\nHm, 🦉.\n</think>\n\nYes.", "Hm, 🦉.", "Yes."),
        (THINKING, QWEN, "Yes.", None, "Yes."),
        (THINKING, QWEN, "<think>\nHm", "Hm", None),
        (ServerSettings(reasoning_parser="auto"), QWEN, "<think>a</think>b", "a", "b"),
        (ServerSettings(reasoning_parser="auto"), DEEPSEEK, "a\n\nb\n</think>\nc", "a\n\nb", "c"),
        (ServerSettings(reasoning_parser="deepseek_r1"), DEEPSEEK, "a < b", "a < b", None),
        (ServerSettings(), QWEN, "<think>a</think>b", None, "<think>a</think>b"),
    ],
)
async def test_thought_is_told_from_the_answer(
    settings: ServerSettings, template: str, text: str, thought: str | None, content: str | None
) -> None:
    message = (await both(engine_saying(text, template), settings))["message"]
    assert message.get("reasoning") == message.get("reasoning_content") == thought
    assert message["content"] == content


async def test_reasoning_can_be_left_out_and_is_counted() -> None:
    engine = engine_saying(f"<think>\nHm, hm.\n</think>\n\nWell.\n{CALL}")
    choice = await both(engine, THINKING, tools=[NOTE], include_reasoning=False)
    assert "reasoning" not in choice["message"]
    assert choice["message"]["content"] == "Well."
    app = create_app(engine, THINKING)
    usage = (await chat(app, tools=[NOTE])).json["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    events = await chat(app, tools=[NOTE], stream=True, stream_options={"include_usage": True})
    assert events.events[-2]["usage"] == usage


async def test_thinking_is_turned_off_by_the_template() -> None:
    engine = engine_saying("a</think>b")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    choice = await both(engine, THINKING, **off)
    assert choice["message"]["content"] == "a</think>b"
    assert prompt_of(engine).endswith("<think>\n\n</think>\n\n")
    await both(engine, THINKING, tools=[NOTE], tool_choice=NAMED, **off)
    assert form_of(engine).preamble is None
    await both(engine, THINKING, tools=[NOTE], tool_choice=NAMED)
    preamble = form_of(engine).preamble
    assert preamble is not None
    assert (preamble.begin, preamble.end) == ("<think>", "</think>")
    r1 = ServerSettings(reasoning_parser="deepseek_r1", tool_call_parser="deepseek_v3")
    said = engine_saying("Hm</think>", DEEPSEEK)
    await both(said, r1, tools=[NOTE], tool_choice=NAMED)
    preamble = form_of(said).preamble
    assert preamble is not None
    assert (preamble.begin, preamble.end) == ("", "</think>")


async def test_a_message_that_is_continued_says_where_the_answer_begins() -> None:
    engine = engine_saying("b</think>c")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\na"},
    ]
    for content, found in (("<think>\na", "c"), ("Well: ", "b</think>c")):
        messages[1]["content"] = content
        body = {"messages": messages, "continue_final_message": True}
        reply = await call(create_app(engine, THINKING), "POST", "/v1/chat/completions", body)
        assert reply.json["choices"][0]["message"]["content"] == found


async def test_tokenize_counts_tools_too() -> None:
    engine = engine_saying("x")
    app = create_app(engine, AUTO)
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [NOTE]}
    reply = await call(app, "POST", "/tokenize", body)
    await chat(app, tools=[NOTE])
    assert reply.json["tokens"] == engine.seen[-1].prompt_ids


def test_flags_name_what_there_is() -> None:
    for parser in choose.NAMES:
        ServerArgs(tool_call_parser=parser).check()
    for parser in reasoning.NAMES:
        ServerArgs(reasoning_parser=parser).check()
