"""The metrics of several processes as if they were of one.

Every process can be asked for a snapshot, the families of its registry as plain records. Counters
and histograms are summed, and so are gauges: what is a property of the engine is set in one
process only, and what is not (memory, open files) adds up. Moments and facts (`_info`, times
since 1970) take the first and the largest value. Not for: collecting snapshots (`octavo/fleet.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

Labels = tuple[tuple[str, str], ...]


class Family(Struct, frozen=True, array_like=True):
    """One metric of one process: (sample name, labels, value) of each of its lines."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]]


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """The state of a registry."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(one.name, tuple(one.labels.items()), one.value) for one in metric.samples],
        )
        for metric in registry.collect()
    ]


def merge(snapshots: Sequence[Sequence[Family]]) -> list[Family]:
    """One set of families; those of the first snapshot come first."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, Labels], float]] = {}
    for one in snapshots:
        for family in one:
            families.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            largest = _is_fact(family)
            for name, labels, value in family.samples:
                before = found.get((name, labels))
                if before is None:
                    found[name, labels] = value
                else:
                    found[name, labels] = max(before, value) if largest else before + value
    return [
        Family(
            family.name,
            family.text,
            family.kind,
            [(*key, value) for key, value in values[name].items()],
        )
        for name, family in families.items()
    ]


def families_of(data: bytes) -> list[Family]:
    """A snapshot that came from another process, in msgpack."""
    return msgspec.msgpack.decode(data, type=list[Family])


def only_sums(families: Iterable[Family]) -> list[Family]:
    """The families that a process leaves behind when it ends: counts, and no state."""
    return [family for family in families if family.kind in ("counter", "histogram")]


def registry_of(families: Sequence[Family]) -> CollectorRegistry:
    """A registry that exports these families."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return registry


class _Families(Collector):
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


def _is_fact(family: Family) -> bool:
    return family.kind == "info" or family.name.endswith(
        ("_info", "_start_time_seconds", "max_fds")
    )
