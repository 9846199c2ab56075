"""docs/compatibility.md says what the code says, and each of its lines is tried."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.cli.flags import Parser, add_options
from octavo.errors import ConfigError, InvalidRequest
from octavo.fields import options_of
from octavo.options import EngineArgs, ServerArgs
from octavo.sampling_params import UNSUPPORTED, SamplingParams
from octavo.server.app import create_app
from octavo.server.openapi import BODIES
from octavo.server.settings import ServerSettings
from tests.server.asgi import call
from tests.server.fake_engine import FakeEngine

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "compatibility.py"
MESSAGES = [{"role": "user", "content": "Hi"}]
# A body that is enough for a route, and values of fields that need more than their type says.
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/completions": {"prompt": "The owls"},
    "/v1/embeddings": {"input": "The owls"},
    "/v1/score": {"text_1": "The owls", "text_2": ["a", "b"]},
    "/v1/rerank": {"query": "The owls", "documents": ["a", "b"]},
    "/tokenize": {"messages": MESSAGES},
    "/detokenize": {"tokens": [5]},
    "/v2/models/{name}/generate": {"text_input": "The owls"},
}
NOT_HERE = ("is not supported here", "is not a known field")


def module() -> Any:
    spec = importlib.util.spec_from_file_location("compatibility", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


TEXT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """The lines below a heading, up to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found, title
    return found.group(1)


def rows(title: str) -> list[list[str]]:
    """The cells of the table below a heading, without marks of code."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")][2:]
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in lines]
    assert cells, title
    return [[cell.strip().replace("\\|", "|") for cell in row] for row in cells]


def bare(cell: str) -> str:
    return cell.strip("`")


def test_the_file_is_what_the_code_says() -> None:
    assert module().document() == TEXT, "run `python scripts/compatibility.py` and commit the file"


async def test_routes_that_work_are_there() -> None:
    app = create_app(FakeEngine())
    for path, methods, _ in rows("Routes that work"):
        for method in methods.split(", "):
            real = bare(path).replace("{name:path}", "owl-1").replace("{version}", "1")
            reply = await call(app, method, real, {} if method == "POST" else None)
            assert "There is no route" not in reply.body.decode(), path
            assert reply.status != 405, path


async def test_routes_refused_say_so() -> None:
    app = create_app(FakeEngine())
    for path, words in rows("Routes refused"):
        reply = await call(app, "POST", bare(path), {})
        assert (reply.status, reply.error["message"]) == (404, words)


def refusals() -> Iterator[tuple[str, str, str, str]]:
    for path in re.findall(r"^### Fields of `(\S+)` refused$", TEXT, re.MULTILINE):
        for name, harmless, words in rows(f"Fields of `{path}` refused"):
            yield path, bare(name), harmless, words


async def test_fields_refused_say_so_unless_they_ask_for_nothing() -> None:
    app = create_app(FakeEngine())
    tried = 0
    for path, name, harmless, words in refusals():
        real = path.replace("{name}", "owl-1")
        reply = await call(app, "POST", real, {**LEAST[path], name: {"a": 1}})
        said = reply.json["error"]
        assert reply.status == 400
        assert (said if isinstance(said, str) else said["message"]) == words
        for value in [] if harmless == "none" else re.findall("`(.*?)`", harmless):
            reply = await call(app, "POST", real, {**LEAST[path], name: json.loads(value)})
            assert reply.status == 200, (path, name, value, reply.body)
        tried += 1
    assert tried > 60


@pytest.mark.parametrize("path", BODIES)
async def test_fields_that_work_are_known(path: str) -> None:
    """Each is sent with a value of its type: it may be refused for its value, not for its name."""
    app = create_app(FakeEngine(), ServerSettings(trust_request_chat_template=True))
    types = {one.encode_name: one.type for one in msgspec.inspect.type_info(BODIES[path]).fields}
    names = [bare(name) for name in section(f"Fields of `{path}` that work").strip().split(", ")]
    assert set(names) == set(types) - module().REFUSED.get(path, {}).keys()
    taken = 0
    for name in names:
        least = LEAST.get(path, {})
        value = "owl-1" if name == "model" else least.get(name, sample(types[name]))
        reply = await call(app, "POST", path, {**least, name: value})
        assert reply.status in (200, 400), (name, value, reply.body)
        if reply.status == 200:
            taken += 1
        else:
            assert not any(words in reply.error["message"] for words in NOT_HERE), reply.body
    assert taken >= len(names) * 0.6, "most are taken with the plainest value of their type"


def sample(kind: Any) -> Any:
    """A plain value of a type."""
    inspect = msgspec.inspect
    if isinstance(kind, inspect.UnionType):
        return sample(next(one for one in kind.types if not isinstance(one, inspect.NoneType)))
    if isinstance(kind, inspect.Metadata):
        return sample(kind.type)
    plain = {inspect.BoolType: True, inspect.IntType: 1, inspect.FloatType: 0.5}
    plain |= {inspect.StrType: "x", inspect.ListType: [], inspect.DictType: {}}
    if isinstance(kind, inspect.LiteralType):
        return kind.values[0]
    return plain.get(type(kind), {})


def parser() -> Parser:
    made = Parser("serve", "x")
    add_options(made, EngineArgs, ServerArgs)
    return made


def test_flags_refused_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    made = parser()
    for flag, words in rows("Flags refused"):
        with pytest.raises(SystemExit):
            made.parse([bare(flag), "1"])
        said = capsys.readouterr().err
        assert f"{bare(flag)} is not an option of this version: {words}" in said


def test_flags_with_few_values_take_these_alone() -> None:
    for flag, accepted, words in rows("Flags of which some values only are accepted"):
        name = bare(flag)[2:].replace("-", "_")
        record = EngineArgs if name in options_of(EngineArgs) else ServerArgs
        for value in [] if accepted == "none" else re.findall("`(.*?)`", accepted):
            made = record(**{name: json.loads(value)})
            assert made.__dict__[name] == json.loads(value)
            made.check()
        with pytest.raises(ConfigError, match=re.escape(words)):
            record(**{name: 987_654}).check()


def test_flags_that_work_are_parsed() -> None:
    known = {**options_of(EngineArgs), **options_of(ServerArgs)}
    made = parser()
    for flag, _, _ in rows("Flags that work"):
        name = bare(flag)[2:].replace("-", "_")
        values = {"bool": [], "json": ["{}"], "int": ["1"], "size": ["1K"], "float": ["0.5"]}
        words = values.get(known[name].kind, [(*known[name].choices, "x")[0]])
        assert name in vars(made.parse([bare(flag), *words]))


def test_variables_refused_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, words in rows("Variables refused"):
        with monkeypatch.context() as patch:
            patch.setenv(bare(name), "1")
            with pytest.raises(ConfigError, match=re.escape(words)):
                EngineArgs()


async def test_metrics_are_exported() -> None:
    body = (await call(create_app(FakeEngine()), "GET", "/metrics")).body.decode()
    exported = set(re.findall(r"^# HELP (\S+)", body, re.MULTILINE))
    for name, kind, _ in rows("Metrics that work"):
        assert bare(name) in exported
        assert f"# TYPE {bare(name)} {kind}" in body
    for name, _ in rows("Metrics of vLLM that are missing"):
        assert bare(name) not in exported


def test_methods_are_there_or_missing_with_their_words() -> None:
    for name, owner, _ in module().PYTHON:
        works = re.search(r"Works: (.*)", section(f"`{name}`"))
        assert works
        assert all(bare(one) in vars(owner) for one in works.group(1).split(", "))
        for method, words in rows(f"Of `{name}` missing"):
            with pytest.raises(AttributeError, match=re.escape(words)):
                getattr(owner.__new__(owner), bare(method))


def test_settings_that_are_refused() -> None:
    for name in UNSUPPORTED:
        assert f"`{name}`" in section("`SamplingParams`").partition("Refused")[2]
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: {"a": 1}})
