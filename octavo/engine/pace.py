"""Pace: how long the next plan can wait without the device running dry.

With two steps in flight a request that arrives while one computes would wait for the other as well.
So the next step is planned late: shortly before the one on the device ends, and with all who came
meanwhile. When that is, is learned from the steps before: how long they took, and how long the host
took to plan and launch them. A plan that came too late makes the margin wider, one in time a little
narrower: about one in twelve may be late, which costs the device a part of the margin, where a
wider margin costs every request that comes within it a whole step. On a device that computes only
while the host waits there is nothing to wait for.
Not for: what is planned (`scheduler.py`). Next file: `core.py`.
"""

from __future__ import annotations

from collections import deque

LEAST_MARGIN = 0.0001  # seconds, beside what the host takes
MOST_MARGIN = 0.004
LARGE = 64  # tokens of a step that takes noticeably longer than one of a few
UNKNOWN = 0.01  # seconds for each token of a large step, before one has been measured
SLACK = 3.0  # times what was measured
LEAST_WAIT = 0.00005  # shorter ones are not worth a sleep
WIDER, NARROWER = 1.25, 0.98
TRUST = 0.985  # of a prediction: steps differ, and early costs less than late
REMEMBERED = 32  # steps with prompts
ALIKE = 48  # tokens by which steps with prompts may differ and still take about as long
FORGETS = 0.05  # share of the newest in the mean time of the host


class Pace:
    """Predicts the time of steps from those that landed. Times are in seconds."""

    __slots__ = ("_decode", "_host", "_margin", "_prompts")

    def __init__(self) -> None:
        self._decode: tuple[int, float] | None = None  # rows and time of the last decode step
        self._prompts: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # tokens and time
        # Mean time to plan and launch a step of decode rows, and to launch a prepared one.
        self._host = [0.0, 0.0]
        self._margin = LEAST_MARGIN

    def landed(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of `rows` rows and `tokens` tokens kept the device busy for `seconds`."""
        if tokens == rows:
            self._decode = (rows, seconds)
        else:
            self._prompts.append((tokens, seconds))

    def planned(
        self, rows: int, tokens: int, seconds: float, *, late: bool, prepared: bool = False
    ) -> None:
        """The host planned and launched a step within `seconds`, or launched a `prepared` one.

        `late` if the device had nothing left to do by then. Steps with prompts tell nothing: they
        are planned as soon as a prompt comes, and launched while they already run.
        """
        if tokens > rows:
            return
        known = self._host[prepared]
        self._host[prepared] += FORGETS * (seconds - known) if known else seconds
        margin = self._margin * (WIDER if late else NARROWER)
        self._margin = min(MOST_MARGIN, max(LEAST_MARGIN, margin))

    def leaves_time(self, wait: float) -> bool:
        """True if within `wait` seconds a step can be prepared."""
        return wait > self._host[False] + LEAST_WAIT

    def patience(self, rows: int, tokens: int, elapsed: float, *, prepared: bool = False) -> float:
        """Seconds until the step after this one should be planned, 0 if now or not known.

        If it is `prepared`, until it should be launched. `elapsed` is for how long the device has
        had this step of `rows` rows and `tokens` tokens.
        """
        expected = self._decode_time(rows)
        if tokens > rows and self._prompts:
            expected = max(expected, self._prompt_time(tokens))
        wait = TRUST * expected - self._host[prepared] - self._margin - elapsed
        return wait if wait > LEAST_WAIT else 0.0

    def _decode_time(self, rows: int) -> float:
        """At least this long takes a step of so many rows; fewer than last time may be faster."""
        if self._decode is None:
            return 0.0
        known_rows, seconds = self._decode
        return seconds * min(1.0, rows / known_rows)

    def _prompt_time(self, tokens: int) -> float:
        """At least this long takes a step with prompts of so many tokens in all."""
        alike = [time for known, time in self._prompts if abs(known - tokens) <= ALIKE]
        return min(alike) if alike else tokens * min(time / known for known, time in self._prompts)


class Allowance:
    """How long a step may take because of its size alone, so that it is not taken for a stall."""

    __slots__ = ("_per_token",)

    def __init__(self) -> None:
        self._per_token = UNKNOWN

    def landed(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; slower ones count at once, faster ones slowly."""
        if tokens >= LARGE:
            measured = SLACK * seconds / tokens
            self._per_token = max(measured, 0.8 * self._per_token + 0.2 * measured)

    def seconds(self, tokens: int) -> float:
        """For steps that are under way and have so many tokens together; 0 for small ones."""
        return tokens * self._per_token if tokens >= LARGE else 0.0
