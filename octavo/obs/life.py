"""The life of one sequence, from arrival to end, written down and told to the metrics.

Used by `TextEngine` and `LLM`, so that both count alike. Not for: what the metrics are called
(`metrics.py`), or text.
"""

from __future__ import annotations

from octavo.obs.metrics import Metrics
from octavo.obs.stats import RequestTimes
from octavo.types import SequenceOutput


class Life:
    """Follows one sequence. Times are `time.monotonic()` seconds."""

    __slots__ = ("_last_news", "_metrics", "times")

    def __init__(self, metrics: Metrics, times: RequestTimes) -> None:
        self.times = times
        self._metrics = metrics
        self._last_news = 0.0

    def news(self, output: SequenceOutput, shown: int, now: float) -> None:
        """The core's news of a step; `shown` tokens of it are the caller's."""
        times, count = self.times, len(output.new_ids)
        times.generation_tokens += shown
        if output.trace:
            times.events += output.trace
        if output.preemptions > times.preemptions:
            times.preemptions = output.preemptions
        if times.first_token:  # the usual case: one more token
            if count:
                gap = now - self._last_news
                if gap > times.longest_gap:
                    times.longest_gap = gap
                self._metrics.token_gap(gap, count)
                times.last_token = self._last_news = now
            return
        times.scheduled = output.scheduled_at or times.scheduled
        times.cached_tokens = max(times.cached_tokens, output.num_cached)
        if not count:
            return
        times.first_token = times.last_token = self._last_news = now
        self._metrics.first_token(
            now - times.arrival,
            prompt_tokens=times.prompt_tokens,
            cached_tokens=times.cached_tokens,
        )

    def end(self, reason: str, now: float) -> None:
        """It has ended, for whatever reason; comes once and last."""
        self.times.finished = now
        self.times.reason = reason
        self._metrics.finished(self.times)
