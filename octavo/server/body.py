"""Reading a request's body within its limits, and making its record without holding up the loop.

Not for: what the values mean.
Next file: `decode.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request

from octavo.errors import InvalidRequest, TooLarge
from octavo.server.decode import check_names, parse_object, to_record
from octavo.server.errors import ClientGone
from octavo.server.refusals import Refusals, refuse_unsupported
from octavo.server.settings import ServerSettings

Record = TypeVar("Record", bound=msgspec.Struct)
Result = TypeVar("Result")

THREAD_FROM = 64 * 1024  # bytes; smaller bodies are decoded faster than a thread is woken


async def read_record(
    request: Request,
    settings: ServerSettings,
    kind: type[Record],
    refusals: Refusals,
    *,
    look: Callable[[bytes], None] | None = None,
) -> tuple[Record, list[str]]:
    """The record that a request carries, and the names of fields passed over (lenient mode).

    `look` may refuse the bytes before anything is made of them. Raises InvalidRequest, TooLarge or
    ClientGone.
    """
    check_media(request.headers)
    data = await read_bytes(request, settings.max_body_bytes)

    def work() -> tuple[Record, list[str]]:
        if look is not None:
            look(data)
        body = parse_object(data)
        ignored = check_names(body, kind, refusals, strict=settings.strict_fields)
        refuse_unsupported(body, refusals)
        return to_record(body, kind), ignored

    return await unhurried(work, large=len(data) >= THREAD_FROM)


async def unhurried(work: Callable[[], Result], *, large: bool) -> Result:
    """The result of `work`; if it is large, others are served meanwhile."""
    return await asyncio.to_thread(work) if large else work()


def check_media(headers: Headers) -> None:
    """Raises InvalidRequest unless the body is plain JSON in UTF-8."""
    media = headers.get("content-type", "application/json")
    kind, *options = (part.strip().lower() for part in media.split(";"))
    if kind != "application/json":
        raise InvalidRequest(
            f"Content-Type is {kind[:80]!r}; send application/json.", "Content-Type"
        )
    for option in options:
        name, _, value = option.partition("=")
        if name.strip() == "charset" and value.strip(' "') not in ("utf-8", "utf8"):
            raise InvalidRequest("Content-Type: the charset must be utf-8.", "Content-Type")
    check_encoding(headers)


def check_encoding(headers: Headers) -> None:
    """Raises InvalidRequest for a compressed body."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise InvalidRequest("Content-Encoding: send the body uncompressed.", "Content-Encoding")


async def read_bytes(request: Request, limit: int) -> bytes:
    """The whole body, refused as soon as it is known to be larger than `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The request body is larger than the limit of {limit} bytes.")
