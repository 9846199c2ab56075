"""Keys: the file, scopes on every route of the table, tenants, and caches of their own."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.server.app import ROUTES, create_app
from octavo.server.auth import OPEN_PATHS, scope_of
from octavo.server.keys import SCOPES, Key, digest_of, find, keys_of, read_keys
from octavo.server.settings import ServerSettings
from tests.server.asgi import call
from tests.server.fake_engine import FakeEngine

TEXTS = {scope: f"sk-only-{scope}" for scope in SCOPES}
KEYS = tuple(
    Key(scope, digest_of(text.encode()), frozenset({scope})) for scope, text in TEXTS.items()
)
# What each route of the table needs; a route that is added must be added here.
NEEDS = {
    "/metrics": "metrics",
    "/load": "metrics",
    "/version": "",
    "/docs": "",
    "/openapi.json": "",
    "/invocations": "inference",
    "/score": "inference",
    "/rerank": "inference",
    "/server_info": "admin",
    "/reset_prefix_cache": "admin",
}


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def filled(path: str) -> str:
    for name in ("{name:path}", "{id}", "{version}"):
        path = path.replace(name, "owl-1")
    return path


def needed(path: str) -> str:
    if path.endswith("/stats") or path == "/v2/models/stats":
        return "metrics"
    return NEEDS.get(
        path, "inference" if path.startswith(("/v1/", "/v2", "/tok", "/detok")) else "admin"
    )


async def test_every_route_asks_for_its_scope_and_for_no_other() -> None:
    app = create_app(FakeEngine(), ServerSettings(keys=KEYS))
    walked = 0
    for path, methods, _ in ROUTES:
        if path in OPEN_PATHS:
            continue
        wanted = needed(path)
        for method in methods:
            for scope, text in TEXTS.items():
                reply = await call(app, method, filled(path), {}, headers=bearer(text))
                allowed = not wanted or scope in (wanted, "admin")
                assert (reply.status == 403) != allowed, (path, scope, reply.status)
                assert reply.status != 401
                if not allowed:
                    assert reply.error["type"] == "PermissionDeniedError"
                    assert wanted in reply.error["message"]
                walked += 1
    assert walked > 60


async def test_paths_that_no_rule_knows_are_shut() -> None:
    app = create_app(FakeEngine(), ServerSettings(keys=KEYS))
    made = "".join(random.choices(string.ascii_lowercase, k=8))
    for path in (f"/{made}", "/metrics/", "//metrics", "/V1/models", "/health/../server_info"):
        assert scope_of(path) == "admin"
        assert (await call(app, "GET", path)).status == 401
        reply = await call(app, "GET", path, headers=bearer(TEXTS["inference"]))
        assert reply.status == 403, path
        assert (await call(app, "GET", path, headers=bearer(TEXTS["admin"]))).status == 404


async def test_a_host_header_changes_nothing() -> None:
    app = create_app(FakeEngine(), ServerSettings(keys=KEYS))
    for host in ("localhost/health", "x?/health", "/health", "a b"):
        reply = await call(app, "GET", "/server_info", headers={"Host": host})
        assert reply.status == 401, host


def test_every_key_is_compared() -> None:
    texts = [f"sk-{number}" for number in random.sample(range(10**9), 20)]
    keys = keys_of(texts)
    for place, text in enumerate(texts):
        found = find(keys, text.encode())
        assert found is not None
        assert found.name == f"key-{place + 1}"
        assert find(keys, text[:-1].encode()) is None
        assert find(keys, (text + "0").encode()) is None
    assert find(keys, b"") is None
    assert not any(text in repr(keys) for text in texts)


async def test_whose_request_it_is_reaches_the_engine() -> None:
    engine = FakeEngine()
    keys = (
        Key("crow", digest_of(b"sk-crow"), frozenset({"inference"}), 2.5, share_cache=False),
        Key("heron", digest_of(b"sk-heron"), frozenset({"inference"})),
    )
    app = create_app(engine, ServerSettings(keys=keys))
    body = {"prompt": "x", "max_tokens": 1, "cache_salt": "s"}
    for text in ("sk-crow", "sk-heron"):
        reply = await call(app, "POST", "/v1/completions", body, headers=bearer(text))
        assert reply.status == 200
    assert engine.callers == [("crow", 2.5), ("heron", 1.0)]
    salts = [seen.options["cache_salt"] for seen in engine.seen]
    assert salts == ["crow\0s", "s"]
    open_app = create_app(engine)
    await call(open_app, "POST", "/v1/completions", body)
    assert engine.callers[-1] == ("", 1.0)


TOML = """
[[keys]]
name = "team-a"
key = "sk-team-a-1"
scopes = ["inference", "metrics"]
weight = 3

[[keys]]
name = "operator"
key_sha256 = "%s"
scopes = ["admin"]
share_cache = true
"""


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(TOML % digest_of(b"sk-operator").hex())
    first, second = read_keys(str(path))
    assert (first.name, first.weight, first.share_cache) == ("team-a", 3.0, False)
    assert first.scopes == {"inference", "metrics"}
    assert find((first, second), b"sk-team-a-1") is first
    assert find((first, second), b"sk-operator") is second
    assert (second.scopes, second.share_cache) == ({"admin"}, True)
    assert second.may("inference")
    assert not first.may("admin")
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": "x", "key": "sk-x-12345"}]}))
    assert read_keys(str(path))[0].scopes == {"inference"}


def entry(**changes: Any) -> str:
    made = {"name": "x", "key": "sk-x-12345", **changes}
    return json.dumps({"keys": [{k: v for k, v in made.items() if v is not None}]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "one list, keys"),
        ("[]", "one list, keys"),
        ('{"keys": []}', "at least one"),
        ('{"keys": [1]}', "entry 1 is not a table"),
        ("{", "not JSON"),
        (entry(name=None), "name must be"),
        (entry(name="a b"), "name must be"),
        (entry(name="x" * 65), "name must be"),
        (entry(key=None), "either key or key_sha256"),
        (entry(key="short"), "at least 8"),
        (entry(key="with a space"), "at least 8"),
        (entry(key_sha256="00"), "either key or key_sha256"),
        (entry(key=None, key_sha256="00"), "64 hexadecimal"),
        (entry(scopes=["root"]), "scopes must be"),
        (entry(scopes=[]), "scopes must be"),
        (entry(scopes="inference"), "scopes must be"),
        (entry(weight=0), "weight must be"),
        (entry(weight=True), "weight must be"),
        (entry(weight="1"), "weight must be"),
        (entry(weight=1e9), "weight must be"),
        (entry(share_cache=1), "share_cache must be"),
        (entry(wieght=1), "'wieght' is none of"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_keys(str(path))
    assert str(path) in refused.value.message
    assert "sk-x-12345" not in refused.value.message


def test_names_and_keys_that_clash(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made: Callable[..., None] = lambda *entries: path.write_text(json.dumps({"keys": entries}))  # noqa: E731
    one = {"name": "x", "key": "sk-x-12345"}
    made(one, {**one, "name": "y"})
    with pytest.raises(ConfigError, match="twice"):
        read_keys(str(path))
    made(one, {**one, "key": "sk-x-67890", "weight": 2})
    with pytest.raises(ConfigError, match="different weights"):
        read_keys(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none.toml"))
