"""Health, keys, origins, models, tokens, and what operators read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.server.app import ROUTES, create_app
from octavo.server.middleware import OPEN_PATHS
from octavo.server.settings import ServerSettings
from tests.server.asgi import Exchange, call, chat, complete
from tests.server.fake_engine import ANSWER, FakeEngine, Faults

API = [("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("GET", "/v1/models")]
API += [("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/reset_prefix_cache")]
API += [("GET", "/v1/models/owl-1")]


async def statuses(app: Any) -> dict[str, int]:
    paths = ["/health", "/health/live", "/health/ready", "/health/progress", "/ping"]
    found = {path: (await call(app, "GET", path)).status for path in paths}
    assert (await call(app, "POST", "/ping")).status == found["/ping"]
    return found


@pytest.mark.parametrize(
    ("health", "red", "reason"),
    [
        ({}, set(), ""),
        ({"phase": "running", "stalled_for": 9.0}, set(), ""),
        (
            {"phase": "running", "stalled_for": 11.0},
            {"/health", "/health/ready", "/health/progress", "/ping"},
            "no progress for 11 seconds; the limit is 10",
        ),
        (
            {"phase": "loading", "detail": "weights 40%", "ready": False, "stalled_for": 99.0},
            {"/health", "/health/ready", "/health/progress", "/ping"},
            "",
        ),
        ({"phase": "draining", "ready": False}, {"/health", "/health/ready", "/ping"}, ""),
        (
            {"phase": "dead", "alive": False, "ready": False},
            {"/health", "/health/live", "/health/ready", "/health/progress", "/ping"},
            "the engine is not running",
        ),
    ],
)
async def test_health(health: dict[str, Any], red: set[str], reason: str) -> None:
    engine = FakeEngine()
    engine.set_health(**health)
    app = create_app(engine)
    found = await statuses(app)
    assert {path for path, status in found.items() if status == 503} == red
    assert set(found.values()) <= {200, 503}
    reply = await call(app, "GET", "/health/ready")
    assert reply.json["phase"] == engine.health.phase
    assert reply.json["detail"] == engine.health.detail
    if red:
        assert reply.headers["retry-after"] == "2"
        assert reply.json["reason"]
    assert reason in (await call(app, "GET", "/health/ready")).json["reason"]


@pytest.mark.parametrize(
    "health",
    [
        {"phase": "loading", "detail": "weights 40%", "ready": False},
        {"phase": "draining", "ready": False},
        {"phase": "dead", "alive": False, "ready": False},
    ],
)
@pytest.mark.parametrize(("method", "path"), API)
async def test_api_routes_wait_for_the_engine(
    health: dict[str, Any], method: str, path: str
) -> None:
    engine = FakeEngine()
    engine.set_health(**health)
    reply = await call(create_app(engine), method, path, {})
    assert reply.status == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.error["type"] == "ServiceUnavailableError"
    if engine.health.detail:
        assert "weights 40%" in reply.error["message"]


async def test_other_routes_do_not_wait_for_the_engine() -> None:
    engine = FakeEngine()
    engine.set_health(phase="loading", ready=False)
    app = create_app(engine)
    for path in ("/version", "/metrics", "/server_info", "/docs", "/openapi.json", "/load"):
        assert (await call(app, "GET", path)).status == 200, path


async def test_every_route_but_the_probes_is_closed_by_a_key() -> None:
    app = create_app(FakeEngine(), ServerSettings(api_keys=("sk-right", "sk-other")))
    wrong: list[list[tuple[str, str]]] = [
        [],
        [("Authorization", "Bearer sk-wrong")],
        [("Authorization", "Bearer sk-righ")],
        [("Authorization", "Bearer sk-rightx")],
        [("Authorization", "Bearer SK-RIGHT")],
        [("Authorization", "Bearer")],
        [("Authorization", "Basic sk-right")],
        [("Authorization", "sk-right")],
        [("Authorization", "Bearer sk-rïght")],
        [("Authorization", "Bearer sk-right"), ("Authorization", "Bearer sk-right")],
        [("X-Api-Key", "sk-right")],
    ]
    paths = [(path.replace("{name:path}", "owl-1"), methods) for path, methods, _ in ROUTES]
    paths += [("/nothing", ["GET"]), ("/health/../metrics", ["GET"]), ("//health", ["GET"])]
    paths += [("/metrics/", ["GET"]), ("/health/x", ["GET"]), ("/healthx", ["GET"])]
    for path, methods in paths:
        for method in [*methods, "OPTIONS"]:
            for headers in wrong:
                reply = await call(app, method, path, {}, headers=headers)
                if path in OPEN_PATHS:
                    assert reply.status in (200, 405)
                    continue
                assert reply.status == 401, (path, headers)
                assert reply.error["type"] == "AuthenticationError"
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.headers["x-request-id"]
    for key in ("sk-right", "sk-other"):
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {key}"}
            assert (await call(app, "GET", "/v1/models", headers=headers)).status == 200


async def test_other_origins() -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    closed = create_app(FakeEngine())
    reply = await call(closed, "OPTIONS", "/v1/completions", headers=ask)
    assert reply.status == 405
    settings = ServerSettings(allowed_origins=("https://a.example",), api_keys=("sk",))
    app = create_app(FakeEngine(), settings)
    reply = await call(app, "OPTIONS", "/v1/completions", headers=ask)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    ask["Origin"] = "https://b.example"
    reply = await call(app, "OPTIONS", "/v1/completions", headers=ask)
    assert "access-control-allow-origin" not in reply.headers
    reply = await call(app, "GET", "/v1/models", headers={"Origin": "https://a.example"})
    assert reply.status == 401
    assert reply.headers["access-control-allow-origin"] == "https://a.example"


async def test_models() -> None:
    app = create_app(FakeEngine())
    cards = (await call(app, "GET", "/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["owl-1", "owl/alias"]
    assert {card["root"] for card in cards} == {"owl-1"}
    assert cards[0]["max_model_len"] == 256
    for card in cards:
        assert (await call(app, "GET", f"/v1/models/{card['id']}")).json == card


async def test_tokens_there_and_back() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    answer = (await call(app, "POST", "/tokenize", {"prompt": ANSWER})).json
    assert answer["tokens"] == engine.tokenizer.encode(ANSWER)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    assert "token_strs" not in answer
    body = {"tokens": answer["tokens"], "model": "owl-1"}
    assert (await call(app, "POST", "/detokenize", body)).json == {"prompt": ANSWER}
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "return_token_strs": True}
    answer = (await call(app, "POST", "/tokenize", body)).json
    await chat(app, max_tokens=1)
    assert answer["tokens"] == engine.seen[-1].prompt_ids
    assert len(answer["token_strs"]) == answer["count"]
    long = (await call(app, "POST", "/tokenize", {"prompt": "owl " * 9000})).json
    assert long["count"] > 9000
    plain = {"prompt": "Hi", "add_special_tokens": False}
    assert (await call(app, "POST", "/tokenize", plain)).status == 200


async def test_what_operators_read() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    assert (await call(app, "GET", "/version")).json == {"version": "0.1.0"}
    info = (await call(app, "GET", "/server_info")).json
    assert info["settings"][0] == {"name": "max_num_seqs", "value": 8, "source": "flag"}
    assert (await call(app, "POST", "/reset_prefix_cache")).json == {"done": "reset_prefix_cache"}
    assert engine.controls == ["reset_prefix_cache"]


async def test_load_counts_while_answers_last() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    app = create_app(engine)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 2}).encode()
    exchanges = [Exchange(app, "POST", "/v1/completions", body=body) for _ in range(3)]
    while engine.running < 3:
        await call(app, "GET", "/version")
    assert (await call(app, "GET", "/load")).json == {"server_load": 3}
    engine.gate.set()
    for exchange in exchanges:
        await exchange.end()
    assert (await call(app, "GET", "/load")).json == {"server_load": 0}


async def test_description_and_page() -> None:
    app = create_app(FakeEngine())
    document = (await call(app, "GET", "/openapi.json")).json
    assert set(document["paths"]) == {path for path, _, _ in ROUTES}
    for methods in document["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith(".")
    chat_fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(chat_fields)
    page = (await call(app, "GET", "/docs")).body.decode()
    for outside in ("http://", "https://", "//cdn", "src=", "@import"):
        assert outside not in page


async def test_http_metrics_name_routes_and_never_paths() -> None:
    engine = FakeEngine()
    app = create_app(engine)
    await complete(app, max_tokens=2)
    await complete(app, max_tokens=-1)
    await call(app, "GET", "/v1/models/owl-1")
    for number in range(5):
        await call(app, "GET", f"/secret{number}")
        await call(app, f"ODD{number}", f"/secret{number}")
    await call(app, "GET", "/health")
    body = (await call(app, "GET", "/metrics")).body.decode()
    values: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(body):
        for sample in family.samples:
            if sample.name == "http_requests_total":
                labels = sample.labels
                key = (labels["method"], labels["status"], labels["handler"])
                values[key] = sample.value
    assert values == {
        ("POST", "2xx", "/v1/completions"): 1,
        ("POST", "4xx", "/v1/completions"): 1,
        ("GET", "2xx", "/v1/models/{name:path}"): 1,
        ("any", "4xx", "none"): 10,
    }


async def test_what_nobody_foresaw_stays_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    app = create_app(engine)
    engine.settings = None  # type: ignore[assignment]
    reply = await call(app, "GET", "/server_info")
    assert reply.status == 500
    assert reply.error["message"] == "Internal server error."
    assert reply.headers["x-request-id"]
    assert "unexpected_error" in caplog.text


async def test_a_failing_request_leaves_the_others_alone() -> None:
    engine = FakeEngine(faults=Faults(refuse=None))
    app = create_app(engine)
    good = await complete(app)
    engine.faults = Faults(end_after=2)
    assert (await complete(app)).status == 500
    engine.faults = Faults()
    assert (await complete(app)).json["choices"] == good.json["choices"]
