"""Metrics as plain records, for programs that have no Prometheus: `LLM.get_metrics`.

Not for: the text form (`instruments.exposition`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from octavo.obs import instruments
from octavo.obs.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Counter:
    """A sum since the start."""

    name: str
    labels: dict[str, str]
    value: int


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that goes up and down."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by upper bound; the counts of `buckets` add up from the left."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric: TypeAlias = Counter | Gauge | Histogram


def read_metrics(metrics: Metrics) -> list[Metric]:
    """One record for each metric and set of labels; the metrics of HTTP are left out."""
    found: list[Metric] = []
    for one in metrics.instruments:
        if one.name.startswith("http_"):
            continue
        if isinstance(one, instruments.Histogram):
            found += _histograms(one)
            continue
        for values, number in one.values.items():
            labels = dict(zip(one.labels, values, strict=True))
            if isinstance(one, instruments.Counter):
                found.append(Counter(one.name, labels, int(number)))
            else:
                found.append(Gauge(one.name, labels, number))
    return found


def _histograms(one: instruments.Histogram) -> list[Metric]:
    made: list[Metric] = []
    edges = [*(f"{bound:g}" for bound in one.bounds), "+Inf"]
    for values, row in one.rows.items():
        buckets, running = {}, 0
        for edge, count in zip(edges, row.counts, strict=True):
            running += count
            buckets[edge] = running
        labels = dict(zip(one.labels, values, strict=True))
        made.append(Histogram(one.name, labels, running, row.total, buckets))
    return made
