"""/invocations goes where its body belongs, and routes of other engines say what to do instead."""

from __future__ import annotations

import pytest

from octavo.foreign import ROUTES
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from tests.server.asgi import call, chat, complete
from tests.server.fake_engine import FakeEngine

MESSAGES = [{"role": "user", "content": "Hi"}]


async def test_the_body_says_where_it_belongs() -> None:
    app = create_app(FakeEngine())
    talk = await call(app, "POST", "/invocations", {"messages": MESSAGES})
    assert talk.json["choices"][0]["message"] == (await chat(app)).json["choices"][0]["message"]
    text = await call(app, "POST", "/invocations", {"prompt": "The owls", "max_tokens": 5})
    assert text.json["choices"] == (await complete(app, max_tokens=5)).json["choices"]
    stream = await call(app, "POST", "/invocations", {"messages": MESSAGES, "stream": True})
    assert stream.events[-1] == "[DONE]"


@pytest.mark.parametrize("body", [{}, {"model": "owl-1"}, {"messages": MESSAGES, "prompt": "x"}])
async def test_a_body_that_belongs_nowhere_is_refused(body: dict[str, object]) -> None:
    reply = await call(create_app(FakeEngine()), "POST", "/invocations", body)
    assert reply.status == 400
    assert "messages" in reply.error["message"]


async def test_a_key_is_asked_for() -> None:
    app = create_app(FakeEngine(), ServerSettings(api_keys=("secret",)))
    assert (await call(app, "POST", "/invocations", {"prompt": "x"})).status == 401


async def test_routes_of_others_name_a_way_out() -> None:
    app = create_app(FakeEngine())
    for path, remedy in ROUTES.items():
        reply = await call(app, "POST", path, {})
        assert reply.status == 404
        assert reply.error["message"] == f"{path} is not served here: {remedy}."
