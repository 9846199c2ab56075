"""What an operator decides about the HTTP server, and the limits that are written down.

Frozen; made by the launcher from the options. Not for: options of the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.server.kept import KeepLimits
from octavo.server.keys import Key

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of the application. Times in seconds, sizes in bytes."""

    api_keys: tuple[str, ...] = ()  # each with all rights
    keys: tuple[Key, ...] = ()  # more of them; if there are none at all, no key is asked for
    allowed_origins: tuple[str, ...] = ()  # empty: no cross-origin headers
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    strict_fields: bool = True  # False: unknown fields are listed in X-Ignored-Params
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: tuple[tuple[str, object], ...] = ()
    force_include_usage: bool = False  # usage at the end of every stream
    response_role: str = "assistant"
    enable_auto_tool_choice: bool = False
    tool_call_parser: str = "auto"  # of `text/tools/choose.py`
    reasoning_parser: str | None = None  # of `text/reasoning.py`
    max_body_bytes: int = 32 * MIB
    max_sequences: int = 1024  # prompts times n of one request
    max_stop_strings: int = 4
    max_request_id_chars: int = 256
    request_timeout: float = 0.0  # for requests that name no deadline; 0 is none
    timelines: int = 512  # requests whose timeline is kept; 0 keeps none
    log_requests: bool = False  # a line in the log for each request that has ended
    stall_limit: float = 10.0  # /health/progress and /health/ready turn 503 after it
    slow_reader_limit: float = 30.0  # a client that takes no byte for so long is cut
    keep_alive_interval: float = 0.0  # of comments in silent streams; 0 is off
    loading_retry_after: float = 2.0
    keep: KeepLimits = field(default_factory=KeepLimits)  # streams for clients that come back


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the HTTP parser. Times in seconds, sizes in bytes."""

    max_target_bytes: int = 16 * 1024  # request line: 414
    max_header_bytes: int = 64 * 1024  # all headers together: 431
    max_headers: int = 128  # 431
    head_timeout: float = 30.0  # first byte to end of headers
    idle_timeout: float = 30.0  # silence within a body
    keep_alive: float = 5.0  # silence between requests
