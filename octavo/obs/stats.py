"""Plain records of what happened to a request: the input of the metrics.

Times are `time.monotonic()` seconds; 0.0 means "did not happen". Not for: Prometheus (see
`metrics.py`) or state of the engine after a step (`StepStats` in `types.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimes:
    """The life of one sequence: filled in while it runs, told once, when it has ended.

    `reason` is one of `octavo.types.FinishReason`. `n` and `max_tokens` are what the request asked
    for; `max_tokens` is 0 if it asked for none.
    """

    arrival: float
    finished: float = 0.0
    reason: str = ""
    scheduled: float = 0.0  # first left the queue
    first_token: float = 0.0
    last_token: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    n: int = 1
    max_tokens: int = 0
    preemptions: int = 0

    @property
    def end_to_end(self) -> float:
        """Seconds from arrival to end."""
        return max(0.0, self.finished - self.arrival)

    @property
    def queue(self) -> float | None:
        """Seconds from arrival to the first step, None if it was never scheduled."""
        return max(0.0, self.scheduled - self.arrival) if self.scheduled else None

    @property
    def prefill(self) -> float | None:
        """Seconds from the first step to the first token, None if there was no token."""
        if not (self.scheduled and self.first_token):
            return None
        return max(0.0, self.first_token - self.scheduled)

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last, None if there was no token."""
        if not (self.first_token and self.last_token):
            return None
        return max(0.0, self.last_token - self.first_token)

    @property
    def inference(self) -> float | None:
        """Seconds from the first step to the last token, None if there was no token."""
        if not (self.scheduled and self.last_token):
            return None
        return max(0.0, self.last_token - self.scheduled)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first, None with fewer than two tokens."""
        decode = self.decode
        if decode is None or self.generation_tokens < 2:
            return None
        return decode / (self.generation_tokens - 1)
