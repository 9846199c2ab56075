"""Metrics of streams that are kept for clients whose connection broke.

Not for: keeping them (`server/kept.py`).
"""

from __future__ import annotations

from octavo.obs.instruments import Counter, Gauge, Instrument

REASONS = ("expired", "count", "size")


class StreamMetrics:
    """How many are held, how large they are, and what became of them."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name,)
        labels = ("model_name",)
        self._held = Gauge("octavo:streams_held", "Kept streams that nobody reads now.", labels)
        self._bytes = Gauge("octavo:streams_kept_bytes", "Bytes of events that are kept.", labels)
        self._resumes = Counter("octavo:stream_resumes", "Streams that went on.", labels)
        self._losses = Counter(
            "octavo:streams_lost", "Kept streams that nobody came back for.", (*labels, "reason")
        )
        self.instruments: list[Instrument] = [
            self._held,
            self._bytes,
            self._resumes,
            self._losses,
        ]
        self.held(0, 0)
        self._resumes.add(0, self._labels)
        for reason in REASONS:
            self._losses.add(0, (model_name, reason))

    def held(self, count: int, size: int) -> None:
        """So many streams are held without a reader, and all kept ones have `size` bytes."""
        self._held.set(count, self._labels)
        self._bytes.set(size, self._labels)

    def resumed(self) -> None:
        """A client came back."""
        self._resumes.add(1, self._labels)

    def lost(self, reason: str) -> None:
        """A stream was given up: its seconds are over, or a bound was reached."""
        self._losses.add(1, (*self._labels, reason))
