"""Prometheus metrics by tenant: the names that API keys have.

The number of label values is bounded: names come from the operator's options, and those beyond
`MAX_TENANTS` are counted together as `other`. Not for: who a tenant is (`server/keys.py`).
"""

from __future__ import annotations

from octavo.obs.instruments import Counter, Instrument
from octavo.obs.stats import RequestTimes

MAX_TENANTS = 64
OTHER = "other"


class TenantMetrics:
    """Counts of requests, tokens and waits by tenant; nothing where there are no keys."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._names: set[str] = set()
        labels = ("model_name", "tenant")
        self._requests = Counter(
            "octavo:tenant_requests", "Sequences that ended.", (*labels, "finished_reason")
        )
        self._prompt = Counter("octavo:tenant_prompt_tokens", "Prompt tokens.", labels)
        self._cached = Counter("octavo:tenant_cached_tokens", "Of them found cached.", labels)
        self._generation = Counter("octavo:tenant_generation_tokens", "Tokens generated.", labels)
        self._queue = Counter("octavo:tenant_queue_seconds", "Seconds spent in the queue.", labels)
        self._rejections = Counter("octavo:tenant_rejections", "Requests refused.", labels)
        self.instruments: list[Instrument] = [
            self._requests,
            self._prompt,
            self._cached,
            self._generation,
            self._queue,
            self._rejections,
        ]

    def finished(self, tenant: str, times: RequestTimes) -> None:
        """A sequence ended."""
        if not tenant:
            return
        labels = self._labels(tenant)
        self._requests.add(1, (*labels, times.reason))
        if times.first_token:
            self._prompt.add(times.prompt_tokens, labels)
            self._cached.add(times.cached_tokens, labels)
        self._generation.add(times.generation_tokens, labels)
        waited = times.queue
        self._queue.add(times.end_to_end if waited is None else waited, labels)

    def rejected(self, tenant: str) -> None:
        """A request was refused because the queue is full."""
        if tenant:
            self._rejections.add(1, self._labels(tenant))

    def _labels(self, tenant: str) -> tuple[str, str]:
        if tenant not in self._names:
            if len(self._names) >= MAX_TENANTS:
                return (self._model_name, OTHER)
            self._names.add(tenant)
        return (self._model_name, tenant)
