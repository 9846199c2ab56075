"""GET /v1/requests/{id}/timeline: where the time of one of the last requests went.

With keys a tenant sees its own requests, and a key with the scope `admin` sees all. Not for: what
is written down (`obs/timeline.py`).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import NotFound
from octavo.obs.timeline import Viewer
from octavo.server.context import serving_of
from octavo.server.errors import json_response
from octavo.server.exchange import exchange_of


async def show(request: Request) -> Response:
    """Where the time of one of the last requests went, and why the prefix cache missed."""
    timelines = serving_of(request).timelines
    if timelines is None:
        raise NotFound("Timelines are not kept; start the server with --timeline-requests N.")
    viewer, name = viewer_of(request), request.path_params["id"]
    found = timelines.find(name, viewer)
    if found is None:
        raise NotFound(
            f"No request {name[:200]} is among the last {timelines.size}; ask with the id of an "
            "answer or with its X-Request-Id."
        )
    return json_response(timelines.body(found, viewer))


def viewer_of(request: Request) -> Viewer:
    """Who asks, by the key of the request."""
    exchange = exchange_of(request.scope)
    key = None if exchange is None else exchange.key
    if key is None:
        return Viewer()
    return Viewer(key.name, key.may("admin"))
