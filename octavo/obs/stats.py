"""Plain records of what happened to a request: the input of the metrics.

Times are `time.monotonic()` seconds; 0.0 means "did not happen". Not for: Prometheus (see
`metrics.py`) or state of the engine after a step (`StepStats` in `types.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from octavo.types import TraceEvent


@dataclass(slots=True)
class Throughput:
    """Tokens computed a second, of prompts and of answers, over the last minute."""

    window: float = 60.0
    _counts: deque[tuple[float, int]] = field(default_factory=deque)  # by second

    def count(self, tokens: int, now: float) -> None:
        """A step has computed so many tokens."""
        counts = self._counts
        if counts and now - counts[-1][0] < 1.0:
            counts[-1] = (counts[-1][0], counts[-1][1] + tokens)
            return
        while counts and now - counts[0][0] > self.window:
            counts.popleft()
        counts.append((now, tokens))

    def seconds_for(self, tokens: float, now: float, assumed: float) -> float:
        """How long that many take at the measured rate; between 1 and 60 seconds.

        Where nothing was computed lately the rate is `assumed`, in tokens a second.
        """
        recent = [(since, count) for since, count in self._counts if now - since <= self.window]
        per_second = assumed
        if recent:
            per_second = sum(count for _, count in recent) / max(1.0, now - recent[0][0])
        return min(60.0, max(1.0, tokens / max(per_second, 1e-3)))


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
    longest_gap: float = 0.0  # seconds between two of its tokens
    tenant: str = ""
    events: list[TraceEvent] = field(default_factory=list)  # what the core tells of it

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
