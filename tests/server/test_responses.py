"""/v1/responses, and tools in chat, through the `openai` client as people use it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pydantic
import pytest

from octavo.errors import EngineDead
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.text.chat import ChatTemplate
from tests.server.asgi import call
from tests.server.fake_engine import FakeEngine, Faults
from tests.server.test_tools import AUTO, CALL, NOTE, THINKING, engine_saying, form_of, prompt_of
from tests.text.templates import QWEN

FLAT = {"type": "function", **NOTE["function"]}  # type: ignore[dict-item]
THOUGHT = f"<think>\nHm, 🦉.\n</think>\n\nI will.\n{CALL}\n{CALL}"


def client_of(engine: FakeEngine, settings: ServerSettings | None = None) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(create_app(engine, settings))
    return openai.AsyncOpenAI(
        api_key="none",
        base_url="http://box/v1",
        http_client=httpx.AsyncClient(transport=transport),
        max_retries=0,
    )


async def test_a_text() -> None:
    engine = engine_saying("Hello, 🦉 world.")
    client = client_of(engine)
    answer = await client.responses.create(
        model="owl-1", input="Hi", instructions="Be brief.", temperature=0.5, metadata={"a": "b"}
    )
    assert answer.output_text == "Hello, 🦉 world."
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "owl-1")
    assert answer.id.startswith("resp")
    assert answer.output[0].status == "completed"  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.temperature, answer.metadata) == (0.5, {"a": "b"})
    assert prompt_of(engine).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user")
    assert engine.seen[-1].params.temperature == 0.5
    cut = await client.responses.create(model="owl-1", input="Hi", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("tokens", [None, 5, 60])
async def test_a_stream_tells_what_a_plain_answer_holds(tokens: int | None) -> None:
    client = client_of(engine_saying(THOUGHT), THINKING)
    fields: dict[str, Any] = {"model": "owl-1", "input": "Hi", "tools": [FLAT]}
    if tokens:
        fields["max_output_tokens"] = tokens
    plain = await client.responses.create(**fields)
    events = [event async for event in await client.responses.create(stream=True, **fields)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{plain.status}"
    last = events[-1].response

    def plainly(output: Any) -> Any:
        items = [item.model_dump(exclude={"id", "call_id"}) for item in output]
        return json.loads(json.dumps(items))

    assert plainly(last.output) == plainly(plain.output)
    assert last.usage == plain.usage
    items: list[Any] = []
    for event in events:  # as a client keeps them
        match event.type:
            case "response.output_item.added":
                assert event.output_index == len(items)
                items.append(event.item)
                text = ""
            case "response.output_text.delta" | "response.reasoning_text.delta":
                assert event.item_id == items[-1].id
                text += event.delta
            case "response.function_call_arguments.delta":
                text += event.delta
            case "response.output_text.done" | "response.reasoning_text.done":
                assert event.text == text
            case "response.function_call_arguments.done":
                assert event.arguments == text
            case "response.output_item.done":
                assert event.item == last.output[event.output_index]
    assert [item.type for item in items] == [item.type for item in last.output]
    if tokens is None:
        shown = ["reasoning", "message", "function_call", "function_call"]
        assert [item.type for item in items] == shown
        assert json.loads(plain.output[2].arguments) == {"text": 'a 🦉 "b"'}  # type: ignore[union-attr]
        assert plain.output[0].content[0].text == "Hm, 🦉."  # type: ignore[union-attr, index]
        assert plain.usage is not None
        assert plain.usage.output_tokens_details.reasoning_tokens > 0


async def test_the_stream_helper_follows() -> None:
    client = client_of(engine_saying(THOUGHT), THINKING)
    async with client.responses.stream(model="owl-1", input="Hi", tools=[FLAT]) as stream:  # type: ignore[list-item]
        deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == "I will."
    assert [item.type for item in final.output][-1] == "function_call"


class Note(pydantic.BaseModel):
    """Write a note."""

    text: str


async def test_parsed_answers() -> None:
    engine = engine_saying('{"text": "sea"}')
    parsed = await client_of(engine).responses.parse(model="owl-1", input="Hi", text_format=Note)
    assert parsed.output_parsed == Note(text="sea")
    form = form_of(engine)
    assert isinstance(form.json, dict)
    assert form.json["required"] == ["text"]
    chat = await client_of(engine).chat.completions.parse(
        model="owl-1", messages=[{"role": "user", "content": "Hi"}], response_format=Note
    )
    assert chat.choices[0].message.parsed == Note(text="sea")
    called = engine_saying(CALL.replace("note", "Note"))
    tools = [openai.pydantic_function_tool(Note)]
    chat = await client_of(called, AUTO).chat.completions.parse(
        model="owl-1", messages=[{"role": "user", "content": "Hi"}], tools=tools
    )
    (made,) = chat.choices[0].message.tool_calls or ()
    assert made.function.parsed_arguments == Note(text='a 🦉 "b"')


async def test_a_form_and_tools_are_a_call_or_the_form() -> None:
    engine = engine_saying('{"text": "sea"}')
    parsed = await client_of(engine, AUTO).responses.parse(
        model="owl-1",
        input="Hi",
        text_format=Note,
        tools=[FLAT],  # type: ignore[list-item]
    )
    assert parsed.output_parsed == Note(text="sea")
    assert [tag.begin == "" for tag in form_of(engine).structural_tag.tags] == [False, True]


async def test_streamed_chat_calls_through_the_helper() -> None:
    client = client_of(engine_saying(f"Well.\n{CALL}\n{CALL}"), AUTO)
    messages: Any = [{"role": "user", "content": "Hi"}]
    async with client.chat.completions.stream(
        model="owl-1",
        messages=messages,
        tools=[NOTE],  # type: ignore[list-item]
    ) as stream:
        pieces = [
            event.arguments_delta
            async for event in stream
            if event.type == "tool_calls.function.arguments.delta"
        ]
        final = await stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    made = choice.message.tool_calls or []
    assert "".join(pieces) == "".join(call.function.arguments for call in made)
    assert len({call.id for call in made}) == 2


ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"text": "Hm"}]},
    {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "id": "msg_1",
        "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "note", "arguments": '{"text": "x"}'},
    {"type": "function_call", "call_id": "c2", "name": "note", "arguments": "{}", "id": "fc_1"},
    {"type": "function_call_output", "call_id": "c1", "output": "done"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": ""}],
    },
    {"role": "user", "content": "And?"},
]


async def test_items_are_the_messages_of_a_chat() -> None:
    engine = engine_saying("x")
    app = create_app(engine, AUTO)
    await call(app, "POST", "/v1/responses", {"input": ITEMS, "tools": [FLAT]})
    ids = engine.seen[-1].prompt_ids
    calls = [
        {"id": "c1", "function": {"name": "note", "arguments": '{"text": "x"}'}},
        {"id": "c2", "function": {"name": "note", "arguments": "{}"}},
    ]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "And?"},
    ]
    await call(app, "POST", "/v1/chat/completions", {"messages": messages, "tools": [NOTE]})
    assert engine.seen[-1].prompt_ids == ids
    first = await client_of(engine_saying(THOUGHT), THINKING).responses.create(
        input="Hi",
        tools=[FLAT],  # type: ignore[list-item]
    )
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in first.output
        if item.type == "function_call"
    ]
    sent = [{"role": "user", "content": "Hi"}, *(i.model_dump() for i in first.output), *results]
    body = {"input": json.loads(json.dumps(sent)), "tools": [FLAT]}
    for item in body["input"]:  # as the client sends them: fields that are unset are left out
        for name in [name for name, value in item.items() if value is None]:
            del item[name]
    reply = await call(create_app(engine, AUTO), "POST", "/v1/responses", body)
    assert reply.status == 200, reply.body


BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [FLAT], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"tools": [FLAT], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"form": 1}}, "text.form"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"inputs": "x"}, "inputs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_output_tokens": 10**60}, "max_output_tokens"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
async def test_bad_requests(fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"input": "Hi", "stream": stream, **fields}
    reply = await call(create_app(engine_saying("x"), AUTO), "POST", "/v1/responses", body)
    assert reply.status == 400
    assert reply.error["param"] == param


async def test_a_failure_is_an_error_and_an_end() -> None:
    engine = FakeEngine(faults=Faults(die_after=4))
    engine.chat_template = ChatTemplate(QWEN, engine.tokenizer)
    client = client_of(engine)
    events = [e async for e in await client.responses.create(input="Hi", stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-1].response.error.code == "server_error"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(input="Hi")
    engine.faults.refuse = EngineDead("gone")
    with pytest.raises(openai.InternalServerError):
        await client.responses.create(input="Hi", stream=True)


async def test_logprobs_stand_beside_the_text() -> None:
    client = client_of(engine_saying("The owls 🦉 hoot."))
    fields: dict[str, Any] = {
        "input": "Hi",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    plain = await client.responses.create(**fields)
    entries = plain.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert "".join(entry.token for entry in entries).startswith("The")
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    events = [e async for e in await client.responses.create(stream=True, **fields)]
    done = next(e for e in events if e.type == "response.output_text.done")
    assert len(done.logprobs) == len(events[-1].response.output[0].content[0].logprobs)
    assert done.text == plain.output_text
