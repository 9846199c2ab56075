"""Routes that say how the engine is, from its heartbeats and not from hope.

/health/live: the engine has not died. /health/ready and /health: requests are taken, and what
waits moves. /health/progress: work moves, or there is none. While the model loads the port is
open, live is 200 and the others are 503 with the phase. Load alone never turns any of them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import Serving, serving_of
from octavo.server.errors import json_response, retry_header


async def live(request: Request) -> Response:
    """503 if the engine is dead."""
    serving = serving_of(request)
    health = serving.engine.health
    return _answer(serving, "" if health.alive else "the engine is not running")


async def ready(request: Request) -> Response:
    """503 unless requests are taken and what waits moves."""
    serving = serving_of(request)
    return _answer(serving, not_ready(serving))


async def progress(request: Request) -> Response:
    """503 if work waits and nothing has moved for longer than the limit."""
    serving = serving_of(request)
    return _answer(serving, _dead(serving) or _stalled(serving) or _loading(serving))


async def ping(request: Request) -> Response:
    """As /health, for SageMaker; the body is empty."""
    return Response(status_code=503 if not_ready(serving_of(request)) else 200)


async def load(request: Request) -> Response:
    """How many generating requests are being served."""
    serving = serving_of(request)
    if serving.everybody is None:
        return json_response({"server_load": serving.in_flight})
    counts = map(int, await serving.everybody("load"))
    return json_response({"server_load": sum(counts)})


def not_ready(serving: Serving) -> str:
    """Why no request should be sent here; empty if one may be."""
    return _dead(serving) or _stalled(serving) or _closed(serving)


def _dead(serving: Serving) -> str:
    return "" if serving.engine.health.alive else "the engine is not running"


def _stalled(serving: Serving) -> str:
    seconds, limit = serving.engine.health.stalled_for, serving.settings.stall_limit
    if seconds <= limit or _loading(serving):
        return ""
    return f"no progress for {seconds:.0f} seconds; the limit is {limit:g}"


def _loading(serving: Serving) -> str:
    return "the model is loading" if serving.engine.health.phase == "loading" else ""


def _closed(serving: Serving) -> str:
    return "" if serving.engine.health.ready else "requests are not taken now"


def _answer(serving: Serving, problem: str) -> Response:
    health = serving.engine.health
    body = {
        "status": "unavailable" if problem else "ok",
        "phase": health.phase,
        "detail": health.detail,
        "reason": problem,
        "stalled_for_seconds": round(health.stalled_for, 3),
    }
    if not problem:
        return json_response(body)
    retry = retry_header(serving.settings.loading_retry_after)
    return json_response(body, status=503, headers=retry)
