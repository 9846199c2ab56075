"""Bad requests: each answers 4xx in OpenAI's shape, names the field, and harms nobody."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from starlette.applications import Starlette

from octavo.server.app import create_app
from octavo.server.refusals import CHAT_REFUSED, COMPLETION_REFUSED
from octavo.server.settings import ServerSettings
from tests.server.asgi import Reply, call, chat, complete
from tests.server.fake_engine import MAX_MODEL_LEN, FakeEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "Hi"}

# (raw body, status): anything that is no JSON object as we read it
RAW: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"   \n", 400),
    (b"null", 400),
    (b"[]", 400),
    (b'"text"', 400),
    (b"17", 400),
    (b"true", 400),
    (b"{", 400),
    (b'{"prompt"', 400),
    (b'{"prompt": "x"', 400),
    (b'{"prompt": "x"}}', 400),
    (b'{"prompt": "x"} {"prompt": "x"}', 400),
    (b"{'prompt': 'x'}", 400),
    (b'{"prompt": "x",}', 400),
    (b'{"prompt": "x" /* no */}', 400),
    (b'\xef\xbb\xbf{"prompt": "x"}', 400),
    ('{"prompt": "x"}'.encode("utf-16"), 400),
    ('{"prompt": "x"}'.encode("utf-32"), 400),
    (b'{"prompt": "a\xff\xfeb"}', 400),
    (b'{"prompt": "a\xed\xa0\x80b"}', 400),
    (b'{"prompt": "a\\ud800b"}', 400),
    (b'{"prompt": "a\\udc00b"}', 400),
    (b'{"prompt": "a\\ud83d"}', 400),
    (b'{"prompt": "x", "user": "\\\\\\ud83d"}', 400),
    (b'{"prompt": "a\x00b"}', 400),
    (b'{"prompt": "a", "stop": "\\u0000b"}', 400),
    (b'{"prompt": "x", "metadata": {"a\\u0000": 1}}', 400),
    (b'{"a\\u0000b": 1, "prompt": "x"}', 400),
    (b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400),
    (b'{"prompt": "x", "max_tokens": ' + b"9" * 10_000 + b"}", 400),
    (b'{"prompt": "x", "temperature": NaN}', 400),
    (b'{"prompt": "x", "temperature": Infinity}', 400),
    (b'{"prompt": "x", "temperature": -Infinity}', 400),
    (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b'{"prompt": "x", "top_p": 1e999}', 400),
    (b'{"prompt": "x", "metadata": {"a\\u0000": ' + b"[" * 980 + b"]" * 980 + b"}}", 400),
    (b'{"prompt": "x", "metadata": {"a": ' + b"[" * 960 + b'"\\u0000"' + b"]" * 960 + b"}}", 400),
    (b'["\\u0000"]', 400),
    (b'{"prompt": "x", "top_p": 1.2.3, "max_tokens": 3}', 400),
    (b'{"prompt": "x", "max_tokens": 01}', 400),
    (b'{"prompt": "x", "max_tokens": +1}', 400),
    (b'{"prompt": "x", "max_tokens": 1e3}', 400),
]

# (field that must be named, fields of a request to both routes)
BOTH: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 10**18}),
    ("max_tokens", {"max_tokens": 10**30}),
    ("max_tokens", {"max_tokens": MAX_MODEL_LEN + 1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.5e38}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": True}),
    ("temperature", {"temperature": []}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_p", {"top_p": -0.5}),
    ("top_k", {"top_k": -5}),
    ("top_k", {"top_k": 1.5}),
    ("min_p", {"min_p": -0.1}),
    ("min_p", {"min_p": 1.1}),
    ("presence_penalty", {"presence_penalty": 99}),
    ("presence_penalty", {"presence_penalty": -2.01}),
    ("frequency_penalty", {"frequency_penalty": 2.01}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": -1}),
    ("repetition_penalty", {"repetition_penalty": 5e-324}),
    ("n", {"n": 0}),
    ("n", {"n": -1}),
    ("n", {"n": 129}),
    ("n", {"n": 10**6}),
    ("n", {"n": "2"}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": "x"}),
    ("seed", {"seed": 0.5}),
    ("stop", {"stop": ["a", "b", "c", "d", "e"]}),
    ("stop", {"stop": [f"x{number}" for number in range(10_000)]}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": {"a": 1}}),
    ("stop", {"stop": "x" * 5000}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [10**6]}),
    ("stop_token_ids", {"stop_token_ids": ["1"]}),
    ("stop_token_ids", {"stop_token_ids": 5}),
    ("stop_token_ids", {"stop_token_ids": list(range(2000))}),
    ("logit_bias", {"logit_bias": {"49152": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"x": 1}}),
    ("logit_bias", {"logit_bias": {"1.5": 1}}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {"5": -101}}),
    ("logit_bias", {"logit_bias": {"5": "a"}}),
    ("logit_bias", {"logit_bias": {"5": None}}),
    ("logit_bias", {"logit_bias": [[5, 1]]}),
    ("logit_bias", {"logit_bias": {str(token): 0.5 for token in range(20_000)}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [10**6]}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": "word"}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("ignore_eos", {"ignore_eos": "yes"}),
    ("skip_special_tokens", {"skip_special_tokens": 1}),
    ("logprob_token_ids", {"logprob_token_ids": [1]}),
    ("prompt_logprobs", {"prompt_logprobs": 21}),
    ("prompt_logprobs", {"prompt_logprobs": -2}),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    ("truncate_prompt_tokens", {"truncate_prompt_tokens": MAX_MODEL_LEN + 1}),
    ("truncation_side", {"truncation_side": "middle"}),
    ("stream", {"stream": "true"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream_options": {}, "stream": False}),
    ("stream_options", {"stream_options": {"usage": True}, "stream": True}),
    ("stream_options", {"stream_options": [], "stream": True}),
    ("priority", {"priority": "high"}),
    ("priority", {"priority": 2**40}),
    ("request_id", {"request_id": ""}),
    ("request_id", {"request_id": "x" * 300}),
    ("request_id", {"request_id": "a\nb"}),
    ("cache_salt", {"cache_salt": "x" * 300}),
    ("timeout", {"timeout": 0}),
    ("timeout", {"timeout": -1}),
    ("user", {"user": 5}),
    ("metadata", {"metadata": "x"}),
    ("model", {"model": 5}),
    ("temprature", {"temprature": 1}),
    ("x" * 77, {"x" * 5000: 1}),
    ("best_of", {"best_of": 10_000}),
    ("best_of", {"best_of": True}),
    ("guided_json", {"guided_json": {}}),
    ("guided_regex", {"guided_regex": "a*"}),
    ("guided_choice", {"guided_choice": ["a"]}),
    ("guided_grammar", {"guided_grammar": "root"}),
    ("structured_outputs", {"structured_outputs": {"regex": "("}}),
    ("response_format", {"response_format": {"type": "json_schema"}}),
    ("response_format", {"response_format": {"type": "jsn"}}),
    ("use_beam_search", {"use_beam_search": True}),
    ("logits_processors", {"logits_processors": ["x"]}),
    ("suffix", {"suffix": "end"}),
]

ONLY_CHAT: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "Hi"}),
    ("messages", {"messages": {"role": "user"}}),
    ("messages", {"messages": ["Hi"]}),
    ("messages", {"messages": [[]]}),
    ("messages", {"messages": [{}]}),
    ("messages", {"messages": [{"role": "user"}]}),
    ("messages", {"messages": [{"content": "Hi"}]}),
    ("messages", {"messages": [{"role": "king", "content": "Hi"}]}),
    ("messages", {"messages": [{"role": 1, "content": "Hi"}]}),
    ("messages", {"messages": [{"role": "user", "content": None}]}),
    ("messages", {"messages": [{"role": "user", "content": 5}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"text": "x"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": "Hi", "colour": 1}]}),
    ("messages", {"messages": [{"role": "tool", "content": "blue"}]}),
    ("messages", {"messages": [USER] * 5000}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": 0, "max_tokens": 5}),
    ("max_completion_tokens", {"max_completion_tokens": MAX_MODEL_LEN - 5}),
    ("max_completion_tokens", {"max_completion_tokens": 3, "min_tokens": 4}),
    ("max_completion_tokens", {"max_completion_tokens": "5"}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3, "logprobs": False}),
    ("top_logprobs", {"top_logprobs": -2, "logprobs": True}),
    ("top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools", {"tools": "none"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("modalities", {"modalities": ["text", "audio"]}),
    ("audio", {"audio": {"voice": "x"}}),
    ("web_search_options", {"web_search_options": {}}),
    ("echo", {"echo": True}),
    ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
    ("add_generation_prompt", {"add_generation_prompt": "yes"}),
    ("prompt", {"prompt": "x"}),
]

ONLY_COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [""]}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [[], [5]]}),
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"text": "x"}}),
    ("prompt", {"prompt": [0, 49152]}),
    ("prompt", {"prompt": [-3]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [None]}),
    ("prompt", {"prompt": [5, "x"]}),
    ("prompt", {"prompt": ["x", 5]}),
    ("prompt", {"prompt": [[5], 5]}),
    ("prompt", {"prompt": [[5], "x"]}),
    ("prompt", {"prompt": [[[5]]]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": ["word"] * 100_000}),
    ("prompt", {"prompt": ["word"] * 300, "n": 4}),
    ("prompt", {"prompt": [5] * MAX_MODEL_LEN}),
    ("prompt", {"prompt": [5] * (MAX_MODEL_LEN + 1)}),
    ("prompt", {"prompt": [5] * 100_000}),
    ("prompt", {"prompt": "one two three four " * 25_000}),
    ("logprobs", {"logprobs": True}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -2}),
    ("echo", {"echo": "yes"}),
    ("min_tokens", {"max_tokens": 0, "min_tokens": 1}),
    ("messages", {"messages": [USER]}),
]


def check(reply: Reply, field: str | None, *, status: int = 400) -> None:
    """The answer is this refusal, in the right form."""
    assert reply.status == status, (reply.status, reply.body[:200])
    assert reply.headers["content-type"] == "application/json"
    error = reply.error
    assert len(error["message"]) < 1000
    if field is not None:
        assert field in error["message"] or str(error["param"]).startswith(field), error


async def check_alive(app: Starlette, engine: FakeEngine) -> None:
    assert engine.running == 0
    assert (await complete(app, max_tokens=1)).status == 200
    assert (await call(app, "GET", "/health/ready")).status == 200


def case_name(case: Any) -> str:
    return str(case)[:60]


def test_there_are_many() -> None:
    assert len(RAW) + len(ONLY_CHAT) + len(ONLY_COMPLETIONS) + 2 * len(BOTH) >= 250


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("raw", "status"), RAW, ids=case_name)
async def test_raw_bodies(path: str, raw: bytes, status: int) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    if path == CHAT:
        raw = raw.replace(b'"prompt": "', b'"user": "')
    check(await call(app, "POST", path, raw=raw), None, status=status)
    assert engine.seen == []
    await check_alive(app, engine)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("field", "fields"), BOTH + ONLY_CHAT, ids=case_name)
async def test_chat_fields(field: str, fields: dict[str, Any], streamed: bool) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    body = {"messages": [USER], **({"stream": True} if streamed else {}), **fields}
    if streamed and list(fields) == ["stream_options"] and fields["stream_options"] != []:
        body["stream"] = False
    check(await call(app, "POST", CHAT, body), field)
    assert engine.seen == []
    await check_alive(app, engine)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("field", "fields"), BOTH + ONLY_COMPLETIONS, ids=case_name)
async def test_completion_fields(field: str, fields: dict[str, Any], streamed: bool) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    body = {"prompt": "The owls", **({"stream": True} if streamed else {}), **fields}
    if streamed and list(fields) == ["stream_options"] and fields["stream_options"] != []:
        body["stream"] = False
    check(await call(app, "POST", COMPLETIONS, body), field)
    assert engine.seen == []
    await check_alive(app, engine)


@pytest.mark.parametrize("ask", [chat, complete])
async def test_required_fields(ask: Any) -> None:
    app = create_app(FakeEngine())
    path, field = (CHAT, "messages") if ask is chat else (COMPLETIONS, "prompt")
    check(await call(app, "POST", path, {}), field)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("ask", [chat, complete])
async def test_unknown_models_are_404(ask: Any, streamed: bool) -> None:
    app = create_app(FakeEngine())
    check(await ask(app, model="nothing", stream=streamed), "nothing", status=404)
    for name in ("owl-1", "owl/alias", None):
        assert (await ask(app, model=name, max_tokens=1)).json["model"] == "owl-1"


async def test_refused_fields_name_what_to_do() -> None:
    app = create_app(FakeEngine())
    for ask, table in ((chat, CHAT_REFUSED), (complete, COMPLETION_REFUSED)):
        for name, (harmless, remedy) in table.items():
            for value in harmless:
                assert (await ask(app, max_tokens=1, **{name: value})).status == 200, name
            reply = await ask(app, **{name: {"asks": "something"}})
            check(reply, name)
            assert remedy in reply.error["message"]
            assert reply.error["param"] == name
    assert "structured_outputs" in (await chat(app, guided_regex="a")).error["message"]


async def test_the_context_message_has_the_numbers() -> None:
    app = create_app(FakeEngine())
    ids = [5] * 8
    assert (await complete(app, ids, max_tokens=MAX_MODEL_LEN - 8)).status == 200
    reply = await complete(app, ids, max_tokens=MAX_MODEL_LEN - 7)
    for number in (MAX_MODEL_LEN, 8, MAX_MODEL_LEN - 7):
        assert str(number) in reply.error["message"]
    assert reply.error["message"].startswith("This model's maximum context length is")
    reply = await chat(app, "owl " * 300)
    assert reply.error["param"] == "messages"
    assert str(MAX_MODEL_LEN) in reply.error["message"]
    reply = await chat(app, "owl " * 300_000)
    assert reply.error["param"] == "messages"


async def test_of_a_key_given_twice_the_last_value_counts() -> None:
    engine = FakeEngine()
    raw = b'{"prompt": "x", "max_tokens": 1, "max_tokens": 2, "ignore_eos": true}'
    reply = await call(create_app(engine), "POST", COMPLETIONS, raw=raw)
    assert reply.json["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("prompt", ["a\0b", ["a", "\0"]])
async def test_a_nul_in_a_prompt_is_a_token_like_others(prompt: Any) -> None:
    """Benchmarks send texts of random tokens."""
    assert (await complete(create_app(FakeEngine()), prompt)).status == 200
    for field in ({"stop": "\0"}, {"user": "\0"}):
        assert (await complete(create_app(FakeEngine()), prompt, **field)).status == 400


async def test_an_escaped_backslash_before_u0000_is_no_nul() -> None:
    app = create_app(FakeEngine())
    raw = b'{"prompt": "a\\\\u0000b", "max_tokens": 1, "metadata": {"a": [1, "x"]}}'
    assert (await call(app, "POST", COMPLETIONS, raw=raw)).status == 200


HEADERS: list[tuple[str, dict[str, str]]] = [
    ("Content-Type", {"Content-Type": "text/plain"}),
    ("Content-Type", {"Content-Type": "application/x-www-form-urlencoded"}),
    ("Content-Type", {"Content-Type": "multipart/form-data; boundary=x"}),
    ("Content-Type", {"Content-Type": ""}),
    ("charset", {"Content-Type": "application/json; charset=latin-1"}),
    ("Content-Encoding", {"Content-Encoding": "gzip"}),
    ("X-Request-Id", {"X-Request-Id": "i" * 257}),
    ("X-Request-Id", {"X-Request-Id": "a b"}),
    ("X-Request-Id", {"X-Request-Id": "naïve"}),
    ("X-Request-Deadline-Ms", {"X-Request-Deadline-Ms": "soon"}),
    ("X-Request-Deadline-Ms", {"X-Request-Deadline-Ms": "0"}),
    ("X-Request-Deadline-Ms", {"X-Request-Deadline-Ms": "-5"}),
    ("X-Request-Deadline-Ms", {"X-Request-Deadline-Ms": "1.5"}),
    ("X-Request-Deadline-Ms", {"X-Request-Deadline-Ms": "9" * 40}),
]


@pytest.mark.parametrize(("field", "headers"), HEADERS, ids=case_name)
async def test_headers(field: str, headers: dict[str, str]) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    body = {"prompt": "x"}
    check(await call(app, "POST", COMPLETIONS, body, headers=headers), field)
    await check_alive(app, engine)


async def test_messages_name_what_is_wrong() -> None:
    app = create_app(FakeEngine())
    for path, body, words in (
        (COMPLETIONS, {"prompt": "x", "timeout": 1e300}, "at most 1e+09 seconds"),
        ("/v1/responses", {"input": "x", "top_logprobs": -1}, "top_logprobs = -1"),
        ("/v1/embeddings", {"input": "x", "pooling": "max"}, "use one of last, mean."),
        (CHAT, {"messages": [USER], "truncation_side": "up"}, "use one of left, right."),
    ):
        body = {**body, "include": ["message.output_text.logprobs"]} if "input" in body else body
        body = (
            body if path == "/v1/responses" else {k: v for k, v in body.items() if k != "include"}
        )
        reply = await call(app, "POST", path, body)
        assert reply.status == 400
        assert words in reply.error["message"]
    for raw in (b'{"user": "\\ud800", "prompt": "hi"}', b'{"prompt": "hi", "user": "a\\uDBFF"}'):
        reply = await call(app, "POST", COMPLETIONS, raw=raw)
        assert "surrogate pair (byte " in reply.error["message"]
    cut = await call(app, "POST", COMPLETIONS, raw=b'{"prompt": "hi", "user": "\\\\ud800')
    assert "truncated" in cut.error["message"]


async def test_headers_that_are_there_twice() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    for times in (("50", "99999"), ("99999", "50")):
        headers = [("X-Request-Deadline-Ms", value) for value in times]
        await call(app, "POST", COMPLETIONS, {"prompt": "x"}, headers=headers)
        assert engine.seen[-1].options["deadline"] == pytest.approx(0.05), "the earliest holds"
    headers = [("X-Request-Id", "a"), ("X-Request-Id", "b")]
    check(await call(app, "POST", COMPLETIONS, {"prompt": "x"}, headers=headers), "X-Request-Id")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{}]),
        ("chat_template", "x"),
        ("chat_template_kwargs", {"zzz": 1}),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
async def test_a_plain_text_to_tokenize_has_no_chat_fields(name: str, value: Any) -> None:
    body = {"prompt": "x", name: value}
    check(await call(create_app(FakeEngine()), "POST", "/tokenize", body), name)


async def test_good_headers() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    for headers in (
        {"Content-Type": "application/json; charset=UTF-8; x=y"},
        {"X-Request-Id": "", "Content-Encoding": "identity"},
        {"X-Request-Id": "i" * 256},
    ):
        reply = await call(app, "POST", COMPLETIONS, {"prompt": "x"}, headers=headers)
        assert reply.status == 200
        assert reply.headers["x-request-id"]
    headers = {"X-Request-Deadline-Ms": "1500"}
    body = {"prompt": "x", "timeout": 9}
    assert (await call(app, "POST", COMPLETIONS, body, headers=headers)).status == 200
    assert engine.seen[-1].options["deadline"] == pytest.approx(1.5)


async def test_bodies_over_the_limit_are_refused_early() -> None:
    engine = FakeEngine()
    app = create_app(engine, ServerSettings(max_body_bytes=1000))
    raw = json.dumps({"prompt": "x" * 2000}).encode()
    declared = {"Content-Length": str(len(raw))}
    for headers, pieces in ((declared, 1), ({}, 20), ({"Content-Length": "9" * 30}, 1)):
        reply = await call(app, "POST", COMPLETIONS, raw=raw, headers=headers, pieces=pieces)
        check(reply, "1000", status=413)
        assert reply.headers["connection"] == "close"
    odd = await call(app, "POST", COMPLETIONS, raw=raw, headers={"Content-Length": "many"})
    check(odd, None, status=413)
    assert engine.seen == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", COMPLETIONS, 405),
        ("DELETE", CHAT, 405),
        ("GET", "/nothing", 404),
        ("POST", "/v1", 404),
        ("GET", "/v1/models/nothing", 404),
        ("POST", "/v1/models", 405),
        ("GET", "//v1/models", 404),
        ("GET", "/" + "x" * 5000, 404),
    ],
)
async def test_paths_and_methods(method: str, path: str, status: int) -> None:
    check(await call(create_app(FakeEngine()), method, path), None, status=status)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": 5},
        {"tokens": "x"},
        {"tokens": [-1]},
        {"tokens": [10**9]},
        {"tokens": [True]},
        {"prompt": "x", "messages": [USER]},
        {"messages": []},
        {"prompt": "x", "tokens": [1]},
        {"prompt": "x", "unknown": 1},
        {"messages": [{"role": "user", "content": "owl " * 300_000}]},
    ],
    ids=case_name,
)
async def test_tokenizer_routes(path: str, body: dict[str, Any]) -> None:
    check(await call(create_app(FakeEngine()), "POST", path, body), None)


def mutated(dice: random.Random, body: dict[str, Any]) -> bytes:
    """A body with one to three of its values, keys or bytes changed."""
    odd: list[Any] = [None, True, -1, 0, 1.5, 10**20, "", "x", [], {}, [[]], [None], {"a": []}]
    names = [field for field, _ in BOTH + ONLY_CHAT + ONLY_COMPLETIONS]
    for _ in range(dice.randint(1, 3)):
        body = {**body, dice.choice(names): dice.choice(odd)}
    raw = bytearray(json.dumps(body).encode())
    if dice.random() < 0.3:
        raw[dice.randrange(len(raw))] = dice.randrange(256)
    return bytes(raw)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_mutated_requests_never_give_5xx(path: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    dice = random.Random(seed)
    engine = FakeEngine()
    app = create_app(engine)
    good: dict[str, Any] = {"max_tokens": 3}
    good |= {"messages": [USER]} if path == CHAT else {"prompt": "The owls"}

    async def one() -> None:
        raw = mutated(dice, good)
        reply = await call(app, "POST", path, raw=raw)
        assert reply.status in (200, 400, 404), (raw, reply.body)
        if reply.status != 200:
            assert reply.error

    for _ in range(60):
        await asyncio.gather(*(one() for _ in range(10)))
    await check_alive(app, engine)


async def test_the_vocabulary_ends_where_it_ends() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    size = engine.limits.vocab_size
    for last, status in ((size - 1, 200), (size, 400)):
        for fields in (
            {"prompt": [5, last]},
            {"logit_bias": {str(last): 1}},
            {"stop_token_ids": [last]},
            {"allowed_token_ids": [last, 5]},
            {"logprobs": 1, "logprob_token_ids": [last]},
        ):
            reply = await complete(app, **{"prompt": "x", "max_tokens": 1, **fields})
            assert reply.status == status, (fields, reply.body)
        reply = await call(app, "POST", "/detokenize", {"tokens": [last]})
        assert reply.status == status
