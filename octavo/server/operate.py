"""Routes for whoever runs the server: metrics, version, effective configuration, cache."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.obs.merge import families_of
from octavo.server.context import serving_of
from octavo.server.errors import json_response


async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text form."""
    serving = serving_of(request)
    own = serving.engine.metrics
    if serving.everybody is None:
        body, media_type = own.render()
    else:
        answers = await serving.everybody("metrics")
        body, media_type = own.render_merged([families_of(answer) for answer in answers])
    return Response(body, headers={"Content-Type": media_type})


async def version(request: Request) -> Response:
    """The version of this server."""
    return json_response({"version": __version__})


async def server_info(request: Request) -> Response:
    """Every setting with its value and where the value came from."""
    serving = serving_of(request)
    engine = serving.engine
    rows = [
        {"name": name, "value": value, "source": source} for name, value, source in engine.settings
    ]
    return json_response(
        {"version": __version__, "models": list(engine.model_names), "settings": rows}
    )


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes; running sequences keep their own pages."""
    serving = serving_of(request)
    serving.require_ready()
    return json_response(await serving.engine.control("reset_prefix_cache"))
