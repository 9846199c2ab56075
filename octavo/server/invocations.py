"""POST /invocations, SageMaker's one door: a body goes to the route that its fields belong to.

It stands under the same key as all other routes. Not for: bodies of routes that do not generate.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from octavo.errors import InvalidRequest
from octavo.server.body import check_media, read_bytes, unhurried
from octavo.server.context import serving_of
from octavo.server.decode import parse_object

Handler = Callable[[Request], Awaitable[Response]]

THREAD_FROM = 64 * 1024  # bytes


def invocations(by_field: Mapping[str, Handler]) -> Handler:
    """The handler; `by_field` says which field of a body belongs to which route's handler."""

    async def invoke(request: Request) -> Response:
        """Chat for a body with messages, a completion for one with a prompt."""
        serving = serving_of(request)
        serving.require_ready()
        check_media(request.headers)
        data = await read_bytes(request, serving.settings.max_body_bytes)

        def found() -> list[str]:
            body = parse_object(data)
            return [name for name in by_field if name in body]

        names = await unhurried(found, large=len(data) >= THREAD_FROM)
        if len(names) != 1:
            raise InvalidRequest(f"Send one of {', '.join(by_field)}.", names[1] if names else None)
        return await by_field[names[0]](Request(request.scope, _again(request, data)))

    return invoke


def _again(request: Request, data: bytes) -> Callable[[], Awaitable[Message]]:
    """Receives the body a second time, then whatever the client does next."""
    left: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Message:
        return left.pop() if left else await request.receive()

    return receive
