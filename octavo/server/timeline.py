"""GET /v1/requests/{id}/timeline: where the time of one of the last requests went.

With keys a tenant sees its own requests, and a key with the scope `admin` sees all. Not for: what
is written down (`obs/timeline.py`).
"""

from __future__ import annotations

from msgspec.json import decode, encode
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFound
from octavo.obs.timeline import Viewer
from octavo.server.context import Serving, serving_of
from octavo.server.errors import json_response
from octavo.server.exchange import exchange_of

_QUESTION = "timeline "  # of one API process to the others


async def show(request: Request) -> Response:
    """Where the time of one of the last requests went, and why the prefix cache missed."""
    serving = serving_of(request)
    timelines = serving.timelines
    if timelines is None:
        raise NotFound("Timelines are not kept; start the server with --timeline-requests N.")
    viewer, name = viewer_of(request), request.path_params["id"]
    found = timelines.find(name, viewer)
    if found is None and serving.everybody is not None:  # one of the others may have served it
        for answer in await serving.everybody(_QUESTION + encode((name, viewer)).decode()):
            return Response(answer, media_type="application/json")
    if found is None:
        raise NotFound(
            f"No request {name[:200]} is among the last {timelines.size}; ask with the id of an "
            "answer or with its X-Request-Id."
        )
    return json_response(timelines.body(found, viewer))


def answer(serving: Serving, question: str) -> bytes:
    """What this process has to say to another that was asked; empty if nothing."""
    name, viewer = decode(question.removeprefix(_QUESTION), type=tuple[str, Viewer])
    found = None if serving.timelines is None else serving.timelines.find(name, viewer)
    if serving.timelines is None or found is None:
        return b""
    return encode(serving.timelines.body(found, viewer))


def viewer_of(request: Request) -> Viewer:
    """Who asks, by the key of the request."""
    exchange = exchange_of(request.scope)
    key = None if exchange is None else exchange.key
    if key is None:
        return Viewer()
    return Viewer(key.name, key.may("admin"))
