"""`RequestOutput` and its parts: what callers of the Python interface get back.

Plain records without behaviour. Not for: the wire form (`types.py`) or the server's replies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.types import FinishReason


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one mapping a token, itself first
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop text or id of the caller; None for an end token
    lora_request: object | None = None
    pooled: bytes = b""  # f32[H], if the request asks for hidden states

    def finished(self) -> bool:
        """True if this choice has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, for all of its choices together.

    `arrival_time` is `time.time()` seconds, `*_ts` are `time.monotonic()` seconds (0.0: not yet),
    `first_token_latency` is seconds from arrival to the first token.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """A text as a vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The vector of one prompt, and the prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None


class RequestOutput:
    """What is known of a request: its prompt and its choices.

    Unknown keywords are taken and dropped, so that code written for a later version still runs.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        *,
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestMetrics | None = None,
        lora_request: object | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        num_cache_creation_tokens: int | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        **later: object,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.num_cache_creation_tokens = num_cache_creation_tokens
        self.kv_transfer_params = kv_transfer_params

    def __repr__(self) -> str:
        """The fields that are set, so that a print shows the answer and not a wall of None."""
        fields = [
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if value is not None or name == "prompt"
        ]
        return f"RequestOutput({', '.join(fields)})"
