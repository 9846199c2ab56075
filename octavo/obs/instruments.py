"""Counters, gauges and histograms in plain Python, cheap enough for the token path.

An observation is a bisection and two additions. `prometheus_client` is used for the text format
only. One thread writes (the event loop), so there are no locks. Not for: names and meaning of the
metrics (see `metrics.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

Labels = tuple[str, ...]


class Counter:
    """A sum that never falls, one for each set of label values."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], *, also: str = "", bare: bool = False
    ) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        self.also = also  # an older name under which the same values are exported
        self.bare = bare  # exported without the ending _total
        self.values: dict[Labels, float] = {}

    def add(self, amount: float, labels: Labels) -> None:
        """Raise the sum; an amount below 0 counts as 0, so that no fault makes a counter fall."""
        self.values[labels] = self.values.get(labels, 0.0) + max(0.0, amount)

    def families(self) -> Iterable[Metric]:
        for name in filter(None, (self.name, self.also)):
            family = CounterMetricFamily(name, self.text, labels=self.labels)
            for labels, value in self.values.items():
                if self.bare:
                    family.add_sample(name, dict(zip(self.labels, labels, strict=True)), value)
                else:
                    family.add_metric(labels, value)
            yield family


class Gauge:
    """A value that goes up and down, one for each set of label values."""

    def __init__(self, name: str, text: str, labels: Sequence[str], *, also: str = "") -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        self.also = also
        self.values: dict[Labels, float] = {}

    def set(self, value: float, labels: Labels) -> None:
        self.values[labels] = value

    def families(self) -> Iterable[Metric]:
        for name in filter(None, (self.name, self.also)):
            family = GaugeMetricFamily(name, self.text, labels=self.labels)
            for labels, value in self.values.items():
                family.add_metric(labels, value)
            yield family


class _Buckets:
    """The counts of one histogram with one set of label values."""

    __slots__ = ("counts", "total")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.total = 0.0


class Histogram:
    """Counts of observations by upper bound, one row for each set of label values."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        bounds: Sequence[float],
        also: str = "",
    ) -> None:
        self.name = name
        self.text = text
        self.labels = tuple(labels)
        self.also = also
        self.bounds = tuple(bounds)
        self.rows: dict[Labels, _Buckets] = {}

    def declare(self, labels: Labels) -> None:
        """Export zeros for these label values from the start."""
        self.rows.setdefault(labels, _Buckets(len(self.bounds) + 1))

    def observe(self, value: float, labels: Labels, times: int = 1) -> None:
        """Count `value` (below 0 counts as 0) `times` times."""
        row = self.rows.get(labels)
        if row is None:
            self.declare(labels)
            row = self.rows[labels]
        value = value if value > 0.0 else 0.0
        row.counts[bisect_left(self.bounds, value)] += times
        row.total += value * times

    def families(self) -> Iterable[Metric]:
        for name in filter(None, (self.name, self.also)):
            family = HistogramMetricFamily(name, self.text, labels=self.labels)
            for labels, row in self.rows.items():
                buckets, running = [], 0
                edges = [*map(_edge, self.bounds), "+Inf"]
                for edge, count in zip(edges, row.counts, strict=True):
                    running += count
                    buckets.append((edge, float(running)))
                family.add_metric(labels, buckets, row.total)
            yield family


def _edge(bound: float) -> str:
    return repr(float(bound))


Instrument = Counter | Gauge | Histogram


def exposition(registry: CollectorRegistry, instruments: Iterable[Instrument]) -> bytes:
    """The text form of a registry's metrics, in which counters that are `bare` keep their names.

    `prometheus_client` gives every counter the ending _total in the lines that describe it.
    """
    body = generate_latest(registry)
    for one in instruments:
        if isinstance(one, Counter) and one.bare:
            body = body.replace(f" {one.name}_total ".encode(), f" {one.name} ".encode())
    return body
