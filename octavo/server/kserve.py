"""Metadata of the KServe v2 protocol: health, the server, the model, its counts.

Not for: inference (`triton.py`). Errors under /v2 are `{"error": "..."}`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from octavo import __version__
from octavo.errors import NotFound, OctavoError
from octavo.log import Log
from octavo.server.context import Serving, serving_of
from octavo.server.decode import shorten
from octavo.server.errors import describe, error_response, json_response
from octavo.server.health import not_ready

Handler = Callable[[Request], Awaitable[Response]]

VERSION = "1"
EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "statistics")

# name, datatype, shape, may be left out
INPUTS = (
    ("text_input", "BYTES", [-1], False),
    ("sampling_parameters", "BYTES", [1], True),
    ("exclude_input_in_output", "BOOL", [1], True),
    ("return_finish_reason", "BOOL", [1], True),
    ("return_num_input_tokens", "BOOL", [1], True),
    ("return_num_output_tokens", "BOOL", [1], True),
    ("max_tokens", "INT32", [1], True),
    ("temperature", "FP32", [1], True),
    ("seed", "UINT64", [1], True),
)
OUTPUTS = (
    ("text_output", "BYTES", [-1]),
    ("finish_reason", "BYTES", [-1]),
    ("num_input_tokens", "UINT32", [1]),
    ("num_output_tokens", "UINT32", [1]),
)

log = Log(__name__)


def in_triton_words(handler: Handler) -> Handler:
    """The handler, whose refusals are `{"error": text}`."""

    @functools.wraps(handler)
    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except OctavoError as error:
            if error.status >= 500:
                log.warning("request_failed", path=request.url.path[:200], error=error.message)
            plain = error_response(error)
            kept = ("retry-after", "www-authenticate", "connection")
            headers = {name: plain.headers[name] for name in kept if name in plain.headers}
            return json_response(described(error), status=plain.status_code, headers=headers)

    return wrapped


def described(error: Exception) -> dict[str, object]:
    """The error body; the text of an unforeseen one stays in the log."""
    if not isinstance(error, OctavoError):
        log.error("stream_failed", error=repr(error))
    inner = describe(error)["error"]
    assert isinstance(inner, dict)
    return {"error": inner["message"]}


def served_model(request: Request) -> str:
    """The model of the path. Raises NotFound for another model or version, or if not ready."""
    serving = serving_of(request)
    serving.require_ready()
    return named_model(request, serving)


def named_model(request: Request, serving: Serving) -> str:
    """The model of the path. Raises NotFound for another model or version."""
    name: str = request.path_params["name"]
    serving.model_name(name)
    version = request.path_params.get("version", VERSION)
    if version != VERSION:
        raise NotFound(
            f"The model `{name}` has no version {shorten(version)}; there is {VERSION}.", "version"
        )
    return name


async def live(request: Request) -> Response:
    """200 while the engine lives, with an empty body."""
    return Response(status_code=200 if serving_of(request).engine.health.alive else 503)


async def ready(request: Request) -> Response:
    """200 if requests are taken, with an empty body."""
    return Response(status_code=503 if not_ready(serving_of(request)) else 200)


async def server_metadata(request: Request) -> Response:
    """Name, version and extensions of the server."""
    return json_response({"name": "octavo", "version": __version__, "extensions": EXTENSIONS})


@in_triton_words
async def model_ready(request: Request) -> Response:
    """As /v2/health/ready, for one model."""
    serving = serving_of(request)
    named_model(request, serving)
    return Response(status_code=503 if not_ready(serving) else 200)


@in_triton_words
async def model_metadata(request: Request) -> Response:
    """The tensors that a model takes and gives."""
    name = served_model(request)
    return json_response(
        {
            "name": name,
            "versions": [VERSION],
            "platform": "octavo",
            "inputs": [
                {"name": one, "datatype": kind, "shape": shape} for one, kind, shape, _ in INPUTS
            ],
            "outputs": [
                {"name": one, "datatype": kind, "shape": shape} for one, kind, shape in OUTPUTS
            ],
        }
    )


@in_triton_words
async def model_config(request: Request) -> Response:
    """The same as a Triton model configuration; batches are formed by the engine itself."""
    name = served_model(request)
    inputs = [
        {
            "name": one,
            "data_type": _config_type(kind),
            "dims": shape,
            "optional": optional,
        }
        for one, kind, shape, optional in INPUTS
    ]
    outputs = [
        {"name": one, "data_type": _config_type(kind), "dims": shape}
        for one, kind, shape in OUTPUTS
    ]
    return json_response(
        {
            "name": name,
            "platform": "",
            "backend": "octavo",
            "version_policy": {"latest": {"num_versions": 1}},
            "max_batch_size": 0,
            "input": inputs,
            "output": outputs,
            "model_transaction_policy": {"decoupled": True},
        }
    )


@in_triton_words
async def model_stats(request: Request) -> Response:
    """Counts and times since the start; those of all models without a name."""
    serving = serving_of(request)
    serving.require_ready()
    if "name" in request.path_params:
        names = [named_model(request, serving)]
    else:
        names = [serving.engine.model_names[0]]
    counts = serving.engine.metrics.triton.statistics()
    entries = [{"name": name, "version": VERSION, **counts} for name in names]
    return json_response({"model_stats": entries})


@in_triton_words
async def repository_index(request: Request) -> Response:
    """The models and whether each can be used."""
    serving = serving_of(request)
    reason = not_ready(serving)
    state = "UNAVAILABLE" if reason else "READY"
    return json_response(
        [
            {"name": name, "version": VERSION, "state": state, "reason": reason}
            for name in serving.engine.model_names
        ]
    )


def _config_type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
