"""Bad inputs over all routes: refused as the caller's fault, in words that help, with no harm done.

Each refusal names the field, what was wrong with its value, and what to do. In process here;
against a real server, with a good stream beside it, in the slow test and in
`tests/cases/test_bad_input_live.py`.
"""

from __future__ import annotations

import random
import re
import threading
from typing import Any

import pytest

from octavo.server.app import create_app
from tests.cases.client import COMPLETIONS, Box
from tests.hostile.bad_inputs import CHAT, ENTRIES
from tests.server import test_bad_input as tables
from tests.server.asgi import call
from tests.server.fake_engine import FakeEngine

# What a caller can do is said in one of these ways.
REMEDY = re.compile(
    r"\b(use|send|mend|yourself|must|expected|leave|at most|did you mean|only|allow|shorten|"
    r"lists all|name|set|known (are|is)|goes? with|does not go with|mixes|is read|are read|missing|"
    r"takes|inside|each text has|choose|put|give|is off|are off|unknown field|"
    r"unset|there is no|are \d+ to)\b",
    re.IGNORECASE,
)


def test_there_are_at_least_250() -> None:
    distinct = {str(entry) for entry in ENTRIES}
    for table in (tables.RAW, tables.BOTH, tables.ONLY_CHAT, tables.ONLY_COMPLETIONS):
        distinct |= {f"{table is tables.ONLY_CHAT} {entry}" for entry in table}
    distinct |= {str(entry) for entry in tables.HEADERS}
    print(len(distinct), "distinct bad inputs")
    assert len(distinct) >= 250


def message_of(body: Any) -> tuple[str, str]:
    """The words of a refusal and the field it names, in any of the two forms."""
    error = body["error"]
    return (error, "") if isinstance(error, str) else (error["message"], str(error["param"]))


def check_words(body: Any, field: str, what: str) -> None:
    message, param = message_of(body)
    assert field in message or param.startswith(field), (what, message, param)
    assert REMEDY.search(message), f"no remedy: {message!r} for {what}"
    assert 10 < len(message) < 1000, (what, message)
    assert message[-1] in ".?", (what, message)
    for leaked in ("Traceback", "object at 0x", "octavo/", ".py", "msgspec", "None"):
        assert leaked not in message, (what, message)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: str(entry)[:70])
async def test_entries(entry: tuple[str, str, dict[str, Any]]) -> None:
    path, field, body = entry
    engine = FakeEngine()
    app = create_app(engine)
    path = path.replace("{model}", engine.model_names[0])
    reply = await call(app, "POST", path, body)
    assert reply.status == 400, (reply.status, reply.body[:300])
    check_words(reply.json, field, str(entry)[:200])
    assert engine.seen == []
    good = await call(app, "POST", COMPLETIONS, {"prompt": "The owls", "max_tokens": 1})
    assert good.status == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_words_of_the_other_tables(path: str) -> None:
    app = create_app(FakeEngine())
    good = {"messages": [tables.USER]} if path == CHAT else {"prompt": "The owls"}
    own = tables.ONLY_CHAT if path == CHAT else tables.ONLY_COMPLETIONS
    for field, fields in tables.BOTH + own:
        reply = await call(app, "POST", path, {**good, **fields})
        assert reply.status == 400, (field, str(fields)[:200], reply.body[:200])
        check_words(reply.json, field, str(fields)[:200])


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_entries_live(target: Box) -> None:
    over = threading.Event()
    body = {"prompt": "Far away", "max_tokens": 30, "ignore_eos": True, "seed": 5}
    alone = target.stream(COMPLETIONS, body).text()
    beside: list[str] = []

    def again() -> None:
        while not over.is_set():
            beside.append(target.stream(COMPLETIONS, body).text())

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    trusted = ("chat_template",)  # this server takes templates of callers
    for path, field, entry in random.sample(ENTRIES, len(ENTRIES)):
        if field in trusted:
            continue
        reply = target.post(path.replace("{model}", "small"), entry)
        assert reply.status_code == 400, (path, str(entry)[:200], reply.text[:300])
        check_words(reply.json(), field, str(entry)[:200])
        assert target.complete("x", max_tokens=1)["choices"]
    over.set()
    thread.join(60)
    assert set(beside) == {alone}
    target.check_alive()
