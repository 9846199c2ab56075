"""What handlers share: the engine, the settings, and the checks that come before any work.

Not for: routes (`app.py`) or bodies (`decode.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request

from octavo import __version__
from octavo.errors import EngineDead, InvalidRequest, NotFound
from octavo.obs.timeline import Timelines
from octavo.server.decode import shorten
from octavo.server.engine import Engine
from octavo.server.errors import UnavailableError
from octavo.server.kept import Streams
from octavo.server.logprobs import ChatLogprobs
from octavo.server.settings import ServerSettings

MAX_PRIORITY = 2**31
MAX_TIMEOUT = 1e9  # seconds


class Everybody(Protocol):
    """Asks all processes of this server, this one too, or the one of number `to`."""

    async def __call__(self, op: str, to: int = 0) -> list[bytes]:
        """What those have said that had something to say."""
        ...


@dataclass(slots=True)
class Serving:
    """One engine behind HTTP. `in_flight` counts generating requests, for /load."""

    engine: Engine
    settings: ServerSettings
    in_flight: int = 0
    timelines: Timelines | None = None  # None: requests are not written down
    everybody: Everybody | None = None  # None if there is one process
    index: int = 0  # of this process, from 1, if there are several
    started: int = field(default_factory=lambda: int(time.time()))
    streams: Streams = field(init=False)
    chat_logprobs: dict[bool, ChatLogprobs] = field(init=False)  # by `as_ids`

    def __post_init__(self) -> None:
        self.chat_logprobs = {as_ids: ChatLogprobs(as_ids=as_ids) for as_ids in (False, True)}
        self.streams = Streams(self.settings.keep, self.engine.metrics.streams)

    @property
    def fingerprint(self) -> str:
        """Tells builds apart: two answers with one fingerprint came from the same code."""
        return f"octavo-{__version__}"

    def require_ready(self) -> None:
        """Raises EngineDead or UnavailableError unless requests can be taken."""
        health = self.engine.health
        if not health.alive:
            raise EngineDead("The engine is not running.")
        if not health.ready:
            detail = f" ({health.detail})" if health.detail else ""
            raise UnavailableError(
                f"The engine does not take requests now: {health.phase}{detail}.",
                self.settings.loading_retry_after,
            )

    def model_name(self, wanted: str | None) -> str:
        """The name that answers carry. Raises NotFound for a model that is not served."""
        names = self.engine.model_names
        if wanted is not None and wanted not in names:
            raise NotFound(
                f"The model `{shorten(wanted)}` does not exist. Served here: {', '.join(names)}.",
                "model",
            )
        return names[0]


def serving_of(request: Request) -> Serving:
    """The application's `Serving`."""
    serving = request.app.state.serving
    assert isinstance(serving, Serving)
    return serving


def request_id_of(headers: Headers, limit: int) -> str | None:
    """The caller's `X-Request-Id`, if it sent one. Raises InvalidRequest if it cannot be echoed."""
    values = headers.getlist("x-request-id")
    if len(set(values)) > 1:
        raise InvalidRequest(
            f"X-Request-Id is there {len(values)} times; send one.", "X-Request-Id"
        )
    value = values[0] if values else None
    if value is None or value == "":
        return None
    return checked_id(value, "X-Request-Id", limit)


def checked_id(value: str, name: str, limit: int) -> str:
    """An id of 1 to `limit` printable ASCII characters without spaces."""
    if len(value) > limit:
        raise InvalidRequest(f"{name} has {len(value)} characters; use at most {limit}.", name)
    if not value or not all("!" <= letter <= "~" for letter in value):
        raise InvalidRequest(f"{name} must be printable ASCII without spaces.", name)
    return value


def deadline_of(
    headers: Headers, timeout: float | None, arrival: float, *, default: float = 0.0
) -> float:
    """The moment by which the answer must be complete, 0 for none.

    The header `X-Request-Deadline-Ms` (milliseconds) and the field `timeout` (seconds) both count
    from arrival; the earliest one holds. `default` seconds hold for a request that names neither.
    """
    limits: list[float] = []
    for text in headers.getlist("x-request-deadline-ms"):
        if not (text.isascii() and text.isdigit() and len(text) <= 12 and int(text) > 0):
            raise InvalidRequest(
                f"X-Request-Deadline-Ms = {shorten(text)} is not a positive whole number.",
                "X-Request-Deadline-Ms",
            )
        limits.append(int(text) / 1000)
    if timeout is not None:
        if not 0 < timeout <= MAX_TIMEOUT:
            raise InvalidRequest(
                f"timeout = {timeout:g} must be above 0 and at most {MAX_TIMEOUT:g} seconds.",
                "timeout",
            )
        limits.append(timeout)
    if not limits and default:
        limits.append(default)
    return arrival + min(limits) if limits else 0.0


def checked_priority(priority: int | None) -> int:
    """The priority, 0 if unset."""
    if priority is None:
        return 0
    if not -MAX_PRIORITY <= priority < MAX_PRIORITY:
        raise InvalidRequest(f"priority = {priority} must fit 32 bits.", "priority")
    return priority
