"""The steps that both generating routes share, from a body to a job, and what answers share.

Not for: what differs between chat and completions.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest
from octavo.obs.timeline import Timeline
from octavo.sampling_params import SamplingParams
from octavo.server.body import read_record
from octavo.server.context import (
    Serving,
    checked_id,
    checked_priority,
    deadline_of,
    request_id_of,
)
from octavo.server.decode import ignored_header
from octavo.server.exchange import Exchange, exchange_of
from octavo.server.generation import Job
from octavo.server.kept import HEADER, seconds_of
from octavo.server.prompts import Prompt
from octavo.server.refusals import Refusals
from octavo.server.schema import Generation

Request_ = TypeVar("Request_", bound=Generation)

MAX_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Call:
    """One request that has passed all checks which need no engine."""

    serving: Serving
    arrival: float
    model: str
    id: str
    created: int
    headers: dict[str, str]
    deadline: float
    priority: int
    cache_salt: str
    tenant: str = ""
    weight: float = 1.0  # of the tenant's share
    timeline: Timeline | None = None
    resume: float = 0.0  # seconds that a broken stream is kept; 0 ends it at once

    def job(self, prompts: list[Prompt], params: SamplingParams, *, silent: bool = False) -> Job:
        """What goes to the engine."""
        if self.timeline is not None:
            self.timeline.prepared = time.monotonic()
        return Job(
            id=self.id,
            prompts=prompts,
            params=params,
            arrival=self.arrival,
            priority=self.priority,
            deadline=self.deadline,
            cache_salt=self.cache_salt,
            tenant=self.tenant,
            weight=self.weight,
            timeline=self.timeline,
            silent=silent,
        )


async def read_request(
    request: Request,
    serving: Serving,
    kind: type[Request_],
    refusals: Refusals,
) -> tuple[Request_, list[str]]:
    """The record in a body, and the names of fields that were passed over (lenient mode)."""
    serving.require_ready()
    return await read_record(request, serving.settings, kind, refusals)


def begin(
    request: Request, serving: Serving, body: Generation, ignored: list[str], prefix: str
) -> Call:
    """Check what both routes have in common. Raises InvalidRequest or NotFound."""
    exchange = exchange_of(request.scope)
    arrival = time.monotonic() if exchange is None else exchange.began
    settings = serving.settings
    model = serving.model_name(body.model)
    limit = settings.max_request_id_chars
    if body.request_id is not None:
        name = checked_id(body.request_id, "request_id", limit)
    else:
        name = request_id_of(request.headers, limit) or secrets.token_hex(16)
    salt = body.cache_salt or ""
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(salt)} characters; use at most {MAX_SALT_CHARS}.", "cache_salt"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options goes with stream = true only.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs does not go with stream = true.", "prompt_logprobs")
    key = None if exchange is None else exchange.key
    if key is not None and not key.share_cache:
        salt = f"{key.name}\0{salt}"
    deadline = deadline_of(request.headers, body.timeout, arrival, default=settings.request_timeout)
    resume = seconds_of(request.headers, settings.keep.seconds)
    id = f"{prefix}-{name}"
    return Call(
        serving=serving,
        arrival=arrival,
        model=model,
        id=id,
        created=int(time.time()),
        headers={"X-Ignored-Params": ignored_header(ignored)} if ignored else {},
        deadline=deadline,
        priority=checked_priority(body.priority),
        cache_salt=salt,
        tenant="" if key is None else key.name,
        weight=1.0 if key is None else key.weight,
        timeline=begin_timeline(serving, exchange, id, request.url.path),
        resume=resume,
    )


def begin_timeline(
    serving: Serving, exchange: Exchange | None, id: str, route: str
) -> Timeline | None:
    """A request that is being written down; None if none are, or nothing is known of its edge."""
    if serving.timelines is None or exchange is None:
        return None
    tenant = "" if exchange.key is None else exchange.key.name
    timeline = Timeline(id, route[:200], tenant, exchange.began, time.monotonic())
    exchange.timeline = timeline
    serving.timelines.put(timeline)
    return timeline


def head(call: Call, kind: str) -> dict[str, object]:
    """The fields that every body and chunk of an answer begins with."""
    return {
        "id": call.id,
        "object": kind,
        "created": call.created,
        "model": call.model,
        "system_fingerprint": call.serving.fingerprint,
    }


def finish(response: Response, call: Call) -> Response:
    """Add the headers of this call."""
    response.headers.update(call.headers)
    if call.resume:
        response.headers[HEADER] = f"{call.resume:g}"
    if call.timeline is not None:
        response.headers["Server-Timing"] = call.timeline.header()
    return response
