"""Who is let in: the bound of the queue, shares of tenants, and when to try again.

Counts what is open in the engine and what of it still waits, from `enter` to `leave`, and measures
how fast it goes. Not for: the order in which the engine serves what was let in
(`engine/policy.py`). Next file: `text_engine.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.errors import Overloaded
from octavo.obs.metrics import Metrics
from octavo.obs.stats import RequestTimes

ENOUGH_ENDS = 8  # sequences; with fewer the tokens computed are a better measure
ASSUMED_PACE = 20.0  # tokens a second of each running sequence, before any were computed


@dataclass(frozen=True, slots=True)
class Admission:
    """How much may wait. `max_running` sequences run at once; what exceeds it queues.

    Where tenants have `weights`, a full queue still takes those of a tenant that has less waiting
    than its share, so that nobody can fill it for all.
    """

    max_running: int
    max_queued: int
    max_queued_tokens: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)  # by tenant

    def share(self, tenant: str) -> float:
        """Sequences that this tenant may have in the engine whatever others have; 0 is none."""
        if len(self.weights) < 2 or tenant not in self.weights:
            return 0.0
        part = self.weights[tenant] / sum(self.weights.values())
        return part * (self.max_queued + self.max_running)


@dataclass(slots=True)
class Rate:
    """Sequences finished a second, over the last minute."""

    window: float = 60.0
    _ends: deque[float] = field(default_factory=deque)

    def count(self, now: float) -> None:
        """One sequence has ended."""
        self._forget(now)
        self._ends.append(now)

    def _forget(self, now: float) -> None:
        while self._ends and now - self._ends[0] > self.window:
            self._ends.popleft()

    def is_known(self, now: float) -> bool:
        """True if enough sequences have ended lately to go by them."""
        self._forget(now)
        return len(self._ends) >= ENOUGH_ENDS

    def seconds_for(self, sequences: int, now: float) -> float:
        """How long that many take at the measured rate; between 1 and 60 seconds."""
        self._forget(now)
        if not self._ends:
            return 1.0
        per_second = len(self._ends) / max(1.0, now - self._ends[0])
        return min(60.0, max(1.0, sequences / per_second))


class Door:
    """Lets requests in, or sends them away until later."""

    def __init__(self, admission: Admission, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._limits = admission
        self._metrics = metrics
        self._clock = clock
        self._rate = Rate()
        self._queued_tokens = 0
        self._asked = 0  # max_tokens of all that are open
        self._open_of: dict[str, int] = {}  # by tenant
        self.num_open = 0  # sequences between admission and their end

    def admit(self, sequences: int, prompt_tokens: int, tenant: str = "") -> None:
        """Asks for room in the queue for all sequences of a caller's request.

        Raises Overloaded. A request that comes to an idle engine is always let in, since for one
        that is larger than the queue no later moment would be better.
        """
        limit, now = self._limits, self._clock()
        waiting = self.num_open + sequences - limit.max_running
        if self._open_of.get(tenant, 0) + sequences <= limit.share(tenant):
            return
        if waiting > limit.max_queued and self.num_open:
            self._metrics.rejected("max_num_queued_reqs", tenant)
            raise Overloaded(
                f"The engine is busy: {self.num_open} sequences are running or waiting, and at "
                f"most {limit.max_queued} may wait. Try again later.",
                self._seconds_for(waiting, now),
            )
        queued = self._queued_tokens
        if limit.max_queued_tokens is not None and queued + prompt_tokens > limit.max_queued_tokens:
            if not queued:
                return
            self._metrics.rejected("max_num_queued_tokens", tenant)
            raise Overloaded(
                f"The engine is busy: {queued} prompt tokens are waiting, and at most "
                f"{limit.max_queued_tokens} may wait. Try again later.",
                self._seconds_for(max(1, waiting), now),
            )

    def _seconds_for(self, waiting: int, now: float) -> float:
        """When so many waiting sequences will have left the queue, from what was measured.

        By the sequences that ended lately; before enough have, by the tokens that are computed a
        second, or are taken to be, and those that the waiting ones may need.
        """
        if self._rate.is_known(now):
            return self._rate.seconds_for(waiting, now)
        each = self._asked / max(1, self.num_open)
        tokens = self._queued_tokens + waiting * each
        assumed = ASSUMED_PACE * self._limits.max_running
        return self._metrics.throughput.seconds_for(tokens, now, assumed)

    def enter(self, times: RequestTimes, prompt_tokens: int) -> None:
        """A sequence is in the queue."""
        self.num_open += 1
        self._asked += times.max_tokens
        self._open_of[times.tenant] = self._open_of.get(times.tenant, 0) + 1
        self._queued_tokens += prompt_tokens

    def leave_queue(self, prompt_tokens: int) -> None:
        """A sequence waits no longer."""
        self._queued_tokens -= prompt_tokens

    def leave(self, times: RequestTimes, now: float) -> None:
        """A sequence has ended."""
        self._rate.count(now)
        self.num_open -= 1
        self._asked -= times.max_tokens
        self._open_of[times.tenant] -= 1
        if not self._open_of[times.tenant]:
            del self._open_of[times.tenant]
