"""Bodies of plain answers, and that they are the fold of the streamed ones."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from tests.server.asgi import Reply, call, chat, complete
from tests.server.fake_engine import ANSWER, MAX_MODEL_LEN, FakeEngine


async def test_chat_answer_has_the_documented_shape() -> None:
    engine = FakeEngine(num_cached=16)
    reply = await chat(create_app(engine), max_tokens=200)
    answer = reply.json
    assert reply.status == 200
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "owl-1"
    assert answer["system_fingerprint"].startswith("octavo-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    prompt = engine.seen[0].prompt_ids
    made = len(engine.tokenizer.encode_plain(ANSWER)) + 1
    assert answer["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": made,
        "total_tokens": len(prompt) + made,
        "prompt_tokens_details": {"cached_tokens": 16},
    }


async def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine(generation_defaults={"temperature": 0.6, "top_k": 7, "eos_ids": [2]})
    app = create_app(engine)
    fields: dict[str, Any] = {
        "n": 2,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "seed": 11,
        "stop": ["zz"],
        "stop_token_ids": [5],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"7": -1},
        "allowed_token_ids": [1, 5, 7],
        "bad_words": ["owl"],
    }
    reply = await chat(
        app,
        **fields,
        max_tokens=9,
        max_completion_tokens=5,
        priority=3,
        cache_salt="s",
        request_id="mine",
        timeout=7,
        user="u",
        metadata={"a": 1},
        store=False,
    )
    assert reply.status == 200, reply.body
    seen = engine.seen[0]
    for name, value in fields.items():
        wanted = {7: -1.0} if name == "logit_bias" else value
        assert getattr(seen.params, name) == wanted, name
    assert seen.params.max_tokens == 5
    assert seen.params.temperature == 0.6
    assert seen.params.top_k == 7
    assert seen.options["priority"] == 3
    assert seen.options["cache_salt"] == "s"
    assert seen.options["request_id"] == "chatcmpl-mine" == reply.json["id"]
    assert seen.options["deadline"] == pytest.approx(7)


async def test_unset_max_tokens_is_what_is_left_in_chat_and_16_in_completions() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    answer = (await chat(app, ignore_eos=True)).json
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    assert answer["choices"][0]["finish_reason"] == "length"
    answer = (await complete(app)).json
    assert answer["usage"]["completion_tokens"] == 16
    answer = (await complete(app, [5] * (MAX_MODEL_LEN - 2), ignore_eos=True)).json
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("streamed", [False, True])
async def test_chat_logprobs(streamed: bool) -> None:
    app = create_app(FakeEngine())
    reply = await chat(app, max_tokens=12, logprobs=True, top_logprobs=3, stream=streamed)
    parts = reply.events[:-1] if streamed else [reply.json]
    entries = [
        entry
        for part in parts
        for choice in part["choices"]
        for entry in (choice.get("logprobs") or {"content": []})["content"]
    ]
    assert len(entries) == 12
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode("utf-8", "ignore") == ANSWER[: len(joined.decode("utf-8", "ignore"))]
    for entry in entries:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert all(-9999.0 <= value <= 0 for value in values)


async def test_chat_logprobs_without_alternatives_and_as_ids() -> None:
    app = create_app(FakeEngine())
    reply = await chat(app, max_tokens=2, logprobs=True, return_tokens_as_token_ids=True)
    content = reply.json["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]
    assert all(entry["token"].startswith("token_id:") for entry in content)


@pytest.mark.parametrize("alternatives", [0, 1, 4])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("echo", [False, True])
async def test_completion_logprobs(alternatives: int, streamed: bool, echo: bool) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    prompt = "The owls 🦉 hoot"
    reply = await complete(
        app, prompt, max_tokens=8, logprobs=alternatives, echo=echo, stream=streamed
    )
    lists: dict[str, list[Any]] = {}
    for part in reply.events[:-1] if streamed else [reply.json]:
        for choice in part["choices"]:
            for name, values in (choice["logprobs"] or {}).items():
                lists.setdefault(name, []).extend(values)
    extra = len(engine.seen[0].prompt_ids) if echo else 0
    assert {len(values) for values in lists.values()} == {8 + extra}
    sums = [sum(map(len, lists["tokens"][:place])) for place in range(8 + extra)]
    assert lists["text_offset"] == sums
    assert [value is None for value in lists["token_logprobs"]].count(True) == bool(echo)
    for place, tops in enumerate(lists["top_logprobs"]):
        if tops is None:
            assert place == 0
            continue
        assert list(tops.values()) == sorted(tops.values(), reverse=True)
        assert len(tops) in ((1,) if alternatives < 2 else range(2, alternatives + 2))
        if not alternatives:
            assert list(tops) == [lists["tokens"][place]]
    text = _text(reply, 0, streamed)
    assert text.startswith(prompt if echo else ANSWER[:4])


@pytest.mark.parametrize("streamed", [False, True])
async def test_max_tokens_zero_gives_the_prompt_alone(streamed: bool) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    options = {"stream_options": {"include_usage": True}} if streamed else {}
    reply = await complete(
        app, max_tokens=0, echo=True, logprobs=1, stream=streamed, n=2, **options
    )
    assert _text(reply, 0, streamed) == "The owls" == _text(reply, 1, streamed)
    last = reply.events[-2] if streamed else reply.json
    assert last["usage"]["completion_tokens"] == 0
    finish = [
        choice["finish_reason"]
        for part in (reply.events[:-1] if streamed else [reply.json])
        for choice in part["choices"]
        if choice["finish_reason"]
    ]
    assert finish == ["length", "length"]
    if not streamed:
        logprobs = reply.json["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(engine.seen[0].prompt_ids)
        assert logprobs["token_logprobs"][0] is None
    assert (await complete(app, max_tokens=0)).json["choices"][0]["text"] == ""


async def test_prompt_forms_and_order_of_choices() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    forms = ["The owls", [5, 6], ["The owls", "hoot", "at night"], [[5], [6, 7]]]
    for prompt in forms:
        reply = await complete(app, prompt, n=2, max_tokens=3, echo=True, return_token_ids=True)
        assert reply.status == 200, reply.body
        number = len(prompt) if isinstance(prompt[0], (str, list)) and prompt != forms[0] else 1
        choices = reply.json["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * number))
        made = [choice["token_ids"] for choice in choices]
        assert made[0::2] == made[0:1] * number
        assert made[0] != made[1]
        prompts = [choice["prompt_token_ids"] for choice in choices[::2]]
        assert sum(map(len, prompts)) == reply.json["usage"]["prompt_tokens"]
        if prompt == forms[2]:
            starts = [choice["text"] for choice in choices[::2]]
            assert all(text.startswith(one) for text, one in zip(starts, prompt, strict=True))
    assert len({seen.options["request_id"] for seen in engine.seen}) == len(engine.seen)


async def test_prompt_logprobs_in_both_routes() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    reply = await chat(app, max_tokens=1, prompt_logprobs=2, return_token_ids=True)
    values = reply.json["prompt_logprobs"]
    ids = reply.json["prompt_token_ids"]
    assert values[0] is None
    assert len(values) == len(ids)
    assert all(str(token) in entry for token, entry in zip(ids[1:], values[1:], strict=True))
    reply = await complete(app, max_tokens=1, prompt_logprobs=0)
    values = reply.json["choices"][0]["prompt_logprobs"]
    assert [len(entry) for entry in values[1:]] == [1] * (len(values) - 1)


async def test_truncation_keeps_the_end_or_the_start() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    ids = list(range(5, 15))
    for fields, left in (
        ({"truncate_prompt_tokens": 3}, ids[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids[:3]),
        ({"truncate_prompt_tokens": 100}, ids),
    ):
        assert (await complete(app, ids, max_tokens=1, **fields)).status == 200
        assert engine.seen[-1].prompt_ids == left
    long = [5] * 1000
    assert (await complete(app, long, max_tokens=6, truncate_prompt_tokens=-1)).status == 200
    assert len(engine.seen[-1].prompt_ids) == MAX_MODEL_LEN - 6
    assert (await chat(app, "owl " * 5000, truncate_prompt_tokens=-1)).status == 200
    assert len(engine.seen[-1].prompt_ids) == MAX_MODEL_LEN * 3 // 4
    assert (await complete(app, long, truncate_prompt_tokens=-1)).status == 200
    assert len(engine.seen[-1].prompt_ids) == MAX_MODEL_LEN * 3 // 4
    text = "owl " * 3000
    assert (await complete(app, text, max_tokens=1, truncate_prompt_tokens=4)).status == 200


async def test_the_default_start_token_can_be_left_out() -> None:
    engine = FakeEngine()
    engine.tokenizer.add_bos = True
    app = create_app(engine)
    with_start = (await complete(app, max_tokens=1)).json["usage"]["prompt_tokens"]
    without = (await complete(app, max_tokens=1, add_special_tokens=False)).json["usage"]
    assert with_start == without["prompt_tokens"] + 1


async def test_templates_and_their_arguments() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    base = (await chat(app, max_tokens=1)).json["usage"]["prompt_tokens"]
    closed = await chat(app, max_tokens=1, add_generation_prompt=False)
    assert closed.json["usage"]["prompt_tokens"] < base
    assert (await chat(app, max_tokens=1, continue_final_message=True)).status == 200
    both = await chat(app, continue_final_message=True, add_generation_prompt=True)
    assert both.error["param"] == "continue_final_message"
    assert (await chat(app, chat_template="{{ messages }}")).error["param"] == "chat_template"
    assert (await chat(app, reasoning_effort="low")).error["param"] == "reasoning_effort"
    assert (await chat(app, chat_template_kwargs={"x": 1})).status == 400
    trusting = create_app(engine, ServerSettings(trust_request_chat_template=True))
    mine = "{{ messages[0]['content'] }}{{ reasoning_effort }}"
    reply = await chat(trusting, "owls", chat_template=mine, reasoning_effort="!", max_tokens=1)
    assert reply.status == 200, reply.body
    assert engine.tokenizer.decode(engine.seen[-1].prompt_ids) == "owls!"
    broken = await chat(trusting, chat_template="{% if %}")
    assert broken.error["param"] == "chat_template"
    engine.chat_template = None
    assert (await chat(app)).error["param"] == "messages"


HEAVY_TEMPLATES = [
    '{{ ("a"*300000)|wordwrap(1)|length }}',
    '{{ ("a"*1000000)|list|sort|join|length }}',
    '{{ ("a "*500000)|wordwrap(2)|length }}',
    '{{ ("a.b@c.d "*100000)|urlize|length }}',
    '{{ ("ab"*500000)|unique|list|length }}',
    '{{ ("ab"*900000)|map("upper")|map("lower")|map("upper")|list|length }}',
    "{{1}}" * 7000,
]


@pytest.mark.parametrize("template", HEAVY_TEMPLATES, ids=range(len(HEAVY_TEMPLATES)))
async def test_heavy_templates_of_callers_are_refused_and_hold_up_nobody(template: str) -> None:
    trusting = create_app(FakeEngine(), ServerSettings(trust_request_chat_template=True))
    gaps, alive = [0.0], True

    async def beat() -> None:
        while alive:
            before = time.process_time()
            await asyncio.sleep(0.001)
            gaps.append(time.process_time() - before)

    task = asyncio.ensure_future(beat())
    reply = await chat(trusting, chat_template=template)
    alive = False
    await task
    assert reply.status == 400
    assert max(gaps) < 0.5, "of processor time; most of it is other threads' turns"


async def test_an_echo_is_of_what_is_left_of_the_prompt() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    prompt = "The owls hoot at night, and the crows do not."
    for side in ("left", "right"):
        fields = {"truncate_prompt_tokens": 5, "truncation_side": side, "echo": True, "logprobs": 0}
        reply = await complete(app, prompt, max_tokens=2, **fields)
        choice = reply.json["choices"][0]
        left = engine.tokenizer.decode(engine.seen[-1].prompt_ids, skip_special_tokens=False)
        assert choice["text"].startswith(left)
        assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
        assert left != prompt


async def test_harmless_values_of_unsupported_fields_are_accepted() -> None:
    app = create_app(FakeEngine())
    for fields in (
        {"tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"tools": None, "functions": None, "response_format": None, "audio": None},
        {"best_of": 1, "use_beam_search": False, "modalities": ["text"]},
        {"parallel_tool_calls": False, "service_tier": "auto", "safety_identifier": "x"},
    ):
        reply = await chat(app, max_tokens=1, **fields)
        assert reply.status == 200, reply.body
        assert "tool_calls" not in reply.json["choices"][0]["message"]
    assert (await complete(app, suffix="", max_tokens=1)).status == 200


async def test_lenient_mode_lists_what_it_passes_over() -> None:
    app = create_app(FakeEngine(), ServerSettings(strict_fields=False))
    reply = await chat(app, max_tokens=1, temprature=0.1, **{"wü\nrd,": 2})
    assert reply.status == 200
    assert reply.headers["x-ignored-params"] == "temprature, w??rd?"
    many = {f"unknown{number}": 1 for number in range(20)}
    assert "and 12 more" in (await chat(app, max_tokens=1, **many)).headers["x-ignored-params"]
    assert (await chat(app, max_tokens=1, tools=[{"type": "function"}])).status == 400
    streamed = await chat(app, max_tokens=1, temprature=0.1, stream=True)
    assert streamed.headers["x-ignored-params"] == "temprature"


async def test_large_bodies_are_decoded_in_a_thread() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    parts = ["owl " * 30_000, "end"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    body["metadata"] = {"long": parts}
    raw = json.dumps(body).encode()
    reply = await call(app, "POST", "/v1/chat/completions", raw=raw, pieces=7)
    assert reply.status == 200
    reply = await chat(app, "   " * 20_000, truncate_prompt_tokens=5, max_tokens=1)
    assert reply.status == 200, reply.body


def _text(reply: Reply, index: int, streamed: bool) -> str:
    parts = reply.events[:-1] if streamed else [reply.json]
    return "".join(
        choice.get("text")
        or (choice.get("message") or choice.get("delta") or {}).get("content")
        or ""
        for part in parts
        for choice in part["choices"]
        if choice["index"] == index
    )


fields = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 60), "n": st.integers(1, 3)},
    optional={
        "stop": st.lists(st.sampled_from(["hoot", "🦉 h", "zz", "1, 2", "本"]), max_size=3),
        "min_tokens": st.integers(0, 1),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "return_token_ids": st.booleans(),
    },
)


@settings(deadline=None, max_examples=60)
@given(fields=fields, is_chat=st.booleans(), logprobs=st.booleans(), each=st.booleans())
async def test_a_plain_answer_is_the_fold_of_the_stream(
    fields: dict[str, Any], is_chat: bool, logprobs: bool, each: bool
) -> None:
    app = create_app(FakeEngine(num_cached=3))
    ask = chat if is_chat else complete
    if logprobs:
        fields = (
            {**fields, "logprobs": True, "top_logprobs": 2}
            if is_chat
            else {
                **fields,
                "logprobs": 2,
            }
        )
    plain = (await ask(app, **fields)).json
    options = {"include_usage": True, "continuous_usage_stats": each}
    reply = await ask(app, stream=True, stream_options=options, **fields)
    events = reply.events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == plain["usage"]
    assert all(("usage" in event) == each for event in events[:-2])
    for choice in plain["choices"]:
        index = choice["index"]
        news = [one for event in events[:-2] for one in event["choices"] if one["index"] == index]
        whole = choice["message"]["content"] if is_chat else choice["text"]
        assert _text(reply, index, True) == whole
        assert [one["finish_reason"] for one in news][-1] == choice["finish_reason"]
        assert news[-1]["stop_reason"] == choice["stop_reason"]
        if fields.get("return_token_ids"):
            joined = [token for one in news for token in one.get("token_ids") or []]
            assert joined == choice["token_ids"]
        if logprobs and is_chat:
            entries = [one.get("logprobs") or {"content": []} for one in news]
            joined = [entry for one in entries for entry in one["content"]]
            assert joined == choice["logprobs"]["content"]
