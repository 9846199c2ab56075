"""Every error that Octavo raises on purpose.

    OctavoError
    ├── ClientError            the caller can mend it (HTTP 4xx)
    │   ├── InvalidRequest     400: a field, its value and the remedy
    │   ├── Unauthorized       401
    │   ├── Forbidden          403: the key is right, but not for this route
    │   ├── NotFound           404: model, route or request that does not exist
    │   ├── Conflict           409: the id is in use
    │   ├── Gone               410: it was there and is not kept any more
    │   ├── TooLarge           413: body over the limit
    │   ├── Overloaded         429: queue full; carries `retry_after`
    │   └── DeadlineExceeded   504: the request's own deadline passed
    └── ServerError            the operator can mend it (HTTP 5xx, or exit code 1 at start)
        ├── ConfigError        an option that cannot be honoured; names the option
        ├── CheckpointError    weights, tokenizer or config file missing, cut or mismatched
        ├── RequestFailed      500: this one request failed in the engine
        ├── Draining           503: the server is shutting down
        └── EngineDead         503: the engine core is gone

Not for: internal invariants, which are plain asserts. Next file: `types.py`.
"""

from __future__ import annotations

# What the worker says of a request that forbids every token; it is the caller's to mend.
NO_TOKEN = (
    "no token can be chosen: structured_outputs, allowed_token_ids, bad_words, min_tokens, "
    "logit_bias and penalties together leave none; allow more tokens"
)
# The same of a grammar that goes beyond its limits in the midst of an answer.
GRAMMAR_FAILED = "structured_outputs: the grammar became too complex for this answer; simplify it"


class OctavoError(Exception):
    """Base of all errors raised on purpose. `status` is the HTTP status that it becomes."""

    status = 500
    kind = "InternalServerError"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientError(OctavoError):
    """The caller sent something that cannot be served; `param` names the field."""

    status = 400
    kind = "BadRequestError"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(ClientError):
    """A field has a value that is not allowed."""


class Unauthorized(ClientError):
    """The API key is missing or wrong."""

    status = 401
    kind = "AuthenticationError"


class Forbidden(ClientError):
    """The API key is known and may not do this; the message names the scope that is missing."""

    status = 403
    kind = "PermissionDeniedError"


class NotFound(ClientError):
    """The model, route or request named does not exist."""

    status = 404
    kind = "NotFoundError"


class Conflict(ClientError):
    """The id that the caller chose is in use."""

    status = 409
    kind = "ConflictError"


class Gone(ClientError):
    """What the caller asks for existed and is not kept any more."""

    status = 410
    kind = "GoneError"


class TooLarge(ClientError):
    """The request body is larger than the limit."""

    status = 413
    kind = "RequestTooLargeError"


class Overloaded(ClientError):
    """The waiting queue is full; try again after `retry_after` seconds."""

    status = 429
    kind = "RateLimitError"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(ClientError):
    """The request's own deadline passed before it was answered."""

    status = 504
    kind = "TimeoutError"


class ServerError(OctavoError):
    """The operator, not the caller, can mend it."""


class ConfigError(ServerError):
    """An option that cannot be honoured on this machine or with this model."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class CheckpointError(ServerError):
    """A file of the model is missing, cut short, or does not match the rest."""


class RequestFailed(ServerError):
    """The engine could not finish this one request; others are unharmed."""


class Draining(ServerError):
    """The server finishes what it has and takes nothing new."""

    status = 503
    kind = "ServiceUnavailableError"


class EngineDead(ServerError):
    """The engine core process is gone."""

    status = 503
    kind = "ServiceUnavailableError"
