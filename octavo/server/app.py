"""`create_app`: the ASGI application, routes as a list and middleware as a list.

Not for: sockets and processes (`run.py`).
Next file: `chat.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo.errors import OctavoError
from octavo.obs.timeline import Timelines
from octavo.server import (
    health,
    kserve,
    models,
    openapi,
    operate,
    resume,
    score,
    timeline,
    triton,
)
from octavo.server.auth import Auth
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.context import Serving
from octavo.server.embeddings import embeddings
from octavo.server.engine import Engine
from octavo.server.errors import on_http_exception, on_octavo_error
from octavo.server.invocations import invocations
from octavo.server.keys import keys_of
from octavo.server.middleware import Edge
from octavo.server.responses import create_response
from octavo.server.settings import ServerSettings

# headers of answers that browsers may read
EXPOSED = ("X-Request-Id", "X-Ignored-Params", "X-Octavo-Resume", "Retry-After", "Server-Timing")

Handler = Callable[[Request], Awaitable[Response]]

# of a model of /v2: last part of the path, method, handler; the one without a last part comes last
KSERVE_ACTIONS: list[tuple[str, str, Handler]] = [
    ("/generate", "POST", triton.generate),
    ("/generate_stream", "POST", resume.resumable(triton.generate_stream)),
    ("/infer", "POST", triton.infer),
    ("/ready", "GET", kserve.model_ready),
    ("/config", "GET", kserve.model_config),
    ("/stats", "GET", kserve.model_stats),
    ("", "GET", kserve.model_metadata),
]

# the field of a body to /invocations, and who answers it
INVOKED: dict[str, Handler] = {
    "messages": chat_completions,
    "prompt": completions,
    "input": embeddings,
}

# path, methods, handler
ROUTES: list[tuple[str, list[str], Handler]] = [
    ("/v1/chat/completions", ["POST"], resume.resumable(chat_completions)),
    ("/v1/completions", ["POST"], resume.resumable(completions)),
    ("/v1/responses", ["POST"], resume.resumable(create_response)),
    ("/v1/embeddings", ["POST"], embeddings),
    *((path, ["POST"], score.score) for path in ("/v1/score", "/score")),
    *((path, ["POST"], score.rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    ("/v1/models", ["GET"], models.list_models),
    ("/v1/models/{name:path}", ["GET"], models.show_model),
    ("/v1/requests/{id}/timeline", ["GET"], timeline.show),
    ("/v1/requests/{id}/stream", ["GET"], resume.show),
    ("/invocations", ["POST"], resume.resumable(invocations(INVOKED))),
    ("/tokenize", ["POST"], models.tokenize),
    ("/detokenize", ["POST"], models.detokenize),
    ("/health", ["GET"], health.ready),
    ("/health/live", ["GET"], health.live),
    ("/health/ready", ["GET"], health.ready),
    ("/health/progress", ["GET"], health.progress),
    ("/ping", ["GET", "POST"], health.ping),
    ("/load", ["GET"], health.load),
    ("/version", ["GET"], operate.version),
    ("/metrics", ["GET"], operate.metrics),
    ("/server_info", ["GET"], operate.server_info),
    ("/reset_prefix_cache", ["POST"], operate.reset_prefix_cache),
    ("/v2", ["GET"], kserve.server_metadata),
    ("/v2/health/live", ["GET"], kserve.live),
    ("/v2/health/ready", ["GET"], kserve.ready),
    ("/v2/repository/index", ["POST"], kserve.repository_index),
    ("/v2/models/stats", ["GET"], kserve.model_stats),
    *(
        (f"/v2/models/{{name:path}}{version}{action}", [method], handler)
        for action, method, handler in KSERVE_ACTIONS
        for version in ("/versions/{version}", "")
    ),
    ("/openapi.json", ["GET"], openapi.openapi_json),
    ("/docs", ["GET"], openapi.docs),
]


def create_app(engine: Engine, settings: ServerSettings | None = None) -> Starlette:
    """The application over an engine, which may still be loading its model."""
    settings = settings or ServerSettings()
    serving = Serving(engine, settings)
    if settings.timelines:
        serving.timelines = Timelines(settings.timelines)
    app = Starlette(
        routes=[Route(path, handler, methods=methods) for path, methods, handler in ROUTES],
        middleware=_middleware(serving),
        exception_handlers={OctavoError: on_octavo_error, HTTPException: on_http_exception},
    )
    # It would send callers, with their key and body, to wherever the Host header says.
    app.router.redirect_slashes = False
    app.state.serving = serving
    app.state.openapi = openapi.document(
        {
            path: {method.lower(): _summary(handler) for method in methods}
            for path, methods, handler in ROUTES
        }
    )
    return app


def _middleware(serving: Serving) -> list[Middleware]:
    """From the outside in."""
    settings = serving.settings
    stack = [Middleware(Edge, serving)]
    if settings.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=EXPOSED,
        )
        stack.append(cors)
    if keys := (*keys_of(settings.api_keys), *settings.keys):
        stack.append(Middleware(Auth, keys))
    return stack


def _summary(handler: Handler) -> str:
    return (inspect.getdoc(handler) or "").partition("\n")[0]
