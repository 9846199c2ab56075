"""Prometheus metrics of the API process, under the names that dashboards already ask for.

The `vllm:` names, labels and buckets are those of vLLM 0.32; `octavo:` names are our own, and
`nv_inference_*` (see `triton.py`) those of Triton. One
`Metrics` object is the only writer and holds its own registry, so tests and several engines in a
process do not meet. Counting rules: `prompt_tokens` counts a sequence's prompt once, when its
first token comes; `generation_tokens` counts tokens sampled; every sequence that ends, however it
ends, counts once in `request_success` and in the end-to-end, length and parameter histograms.
Not for: deciding anything from the values.
Next file: `stats.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import chain

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from octavo.errors import ConfigError
from octavo.obs.http import HttpMetrics
from octavo.obs.instruments import Counter, Gauge, Histogram, Instrument, Labels, exposition
from octavo.obs.merge import Family, merge, registry_of, snapshot
from octavo.obs.stats import RequestTimes, Throughput
from octavo.obs.streams import StreamMetrics
from octavo.obs.tenants import TenantMetrics
from octavo.obs.triton import TritonMetrics
from octavo.types import StepStats

ALIAS_SETS = frozenset({"legacy", "seed"})
# "repetition" is not among ours; "timeout" is a deadline that passed.
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, *(2**exponent for exponent in range(4, 15)))
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20)


def one_two_five(limit: int) -> tuple[int, ...]:
    """The series 1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds: list[int] = []
    decade = 1
    while decade <= limit:
        bounds += [step * decade for step in (1, 2, 5) if step * decade <= limit]
        decade *= 10
    return tuple(bounds)


def check_aliases(names: Iterable[str]) -> frozenset[str]:
    """Names of `--metric-aliases`, or ConfigError for one that does not exist."""
    aliases = frozenset(names)
    if unknown := sorted(aliases - ALIAS_SETS):
        raise ConfigError(
            f"--metric-aliases: {', '.join(unknown)} is not known; "
            f"choose from {', '.join(sorted(ALIAS_SETS))}",
            option="metric_aliases",
        )
    return aliases


class _Instruments(Collector):
    """Hands the instruments to the registry."""

    def __init__(self, instruments: list[Instrument]) -> None:
        self._instruments = instruments

    def collect(self) -> Iterable[Metric]:
        return chain.from_iterable(one.families() for one in self._instruments)


class Metrics:
    """All metrics of one engine. Methods are called from one thread, the event loop's."""

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int,
        aliases: frozenset[str] = frozenset(),
        cache_config: dict[str, str] | None = None,
        engine: str = "0",
    ) -> None:
        """Figures of requests have the label `engine`, those of steps the engine's own."""
        self.registry = CollectorRegistry()
        self._aliases = check_aliases(aliases)
        self._labels: Labels = (model_name, engine)
        self._model_name = model_name
        self._waiting_in: dict[str, int] = {}  # sequences, by engine
        self._instruments: list[Instrument] = []
        self._lengths = one_two_five(max_model_len)
        self._make_gauges(cache_config or {})
        self._make_counters()
        self._make_latencies()
        self._make_sizes()
        self._http = HttpMetrics()
        self._instruments += self._http.instruments
        self.streams = StreamMetrics(model_name)
        self._instruments += self.streams.instruments
        self.throughput = Throughput()
        self._tenants = TenantMetrics(model_name)
        self._instruments += self._tenants.instruments
        self._triton = TritonMetrics(model_name)
        self._instruments += self._triton.instruments
        self.registry.register(_Instruments(self._instruments))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    # What the engine tells

    def step(self, stats: StepStats, engine: str = "") -> None:
        """State after a step of one of several engines, and the counts of that step."""
        labels = (self._model_name, engine) if engine else self._labels
        self._set_load(stats.running, stats.waiting, labels)
        total = stats.blocks_total
        self._set_usage(stats.blocks_used / total if total else 0.0, labels)
        self._queued_tokens.set(stats.queued_tokens, labels)
        self._cached_blocks.set(stats.blocks_cached, labels)
        self._generation_tokens.add(stats.sampled_tokens, labels)
        self._prefix_queries.add(stats.prefix_queries, labels)
        self._prefix_hits.add(stats.prefix_hits, labels)
        if self._hit_rate is not None:
            queries = self._prefix_queries.values[labels]
            hits = self._prefix_hits.values[labels]
            self._hit_rate.set(hits / queries if queries else 0.0, labels)
        self._preemptions.add(stats.preemptions, labels)
        self._recoveries.add(stats.recoveries, labels)
        if tokens := stats.prompt_tokens + stats.sampled_tokens:
            self._step_tokens.observe(tokens, labels)
            self.throughput.count(tokens, time.monotonic())
        self._waiting_in[engine] = stats.waiting
        self._triton.step(stats, sum(self._waiting_in.values()))

    def first_token(self, seconds: float, *, prompt_tokens: int, cached_tokens: int) -> None:
        """A sequence's first token came, `seconds` after the request's arrival."""
        labels = self._labels
        self._first_token.observe(seconds, labels)
        self._triton.first_token(seconds)
        self._prompt_tokens.add(prompt_tokens, labels)
        self._prompt_cached.add(cached_tokens, labels)
        self._by_source.add(prompt_tokens - cached_tokens, (*labels, "local_compute"))
        self._by_source.add(cached_tokens, (*labels, "local_cache_hit"))
        self._cached_by_source.add(cached_tokens, (*labels, "local_cache_hit"))

    def token_gap(self, seconds: float, tokens: int = 1) -> None:
        """`tokens` more tokens of a sequence came together, `seconds` after those before."""
        if tokens > 0:
            self._token_gap.observe(seconds / tokens, self._labels, tokens)

    def finished(self, times: RequestTimes) -> None:
        """A sequence ended, for whatever reason."""
        labels = self._labels
        self._success.add(1, (*labels, times.reason))
        self._tenants.finished(times.tenant, times)
        self._triton.finished(times)
        self._end_to_end.observe(times.end_to_end, labels)
        for histogram, seconds in (
            (self._queue, times.queue),
            (self._prefill, times.prefill),
            (self._decode, times.decode),
            (self._inference, times.inference),
            (self._per_token, times.time_per_output_token),
        ):
            if seconds is not None:
                histogram.observe(seconds, labels)
        self._request_prompt.observe(times.prompt_tokens, labels)
        self._request_generation.observe(times.generation_tokens, labels)
        self._request_max_generation.observe(times.generation_tokens, labels)
        self._request_n.observe(times.n, labels)
        if times.max_tokens:
            self._request_max_tokens.observe(times.max_tokens, labels)
        self._request_preemptions.observe(times.preemptions, labels)
        if times.first_token:
            computed = times.prompt_tokens - times.cached_tokens
            self._request_computed.observe(computed, labels)

    def core_died(self, engine: str = "") -> None:
        """A core is gone: nothing runs, waits or owns memory in it any more."""
        labels = (self._model_name, engine) if engine else self._labels
        self._core_deaths.add(1, labels)
        self._set_load(0, 0, labels)
        self._set_usage(0.0, labels)
        self._queued_tokens.set(0, labels)
        self._cached_blocks.set(0, labels)
        self._waiting_in[engine] = 0
        self._triton.waits(sum(self._waiting_in.values()))

    def set_cache_config(self, cache_config: dict[str, str]) -> None:
        """Facts about the cache, known once the model is loaded."""
        fields = {"model_name": self._labels[0], "engine": self._labels[1], **cache_config}
        self._cache_info.labels = tuple(fields)
        self._cache_info.values = {tuple(fields.values()): 1.0}

    # What the server tells

    def rejected(self, reason: str, tenant: str = "") -> None:
        """A request was refused at admission; `reason` names the limit."""
        self._rejections.add(1, (self._model_name, reason))
        self._tenants.rejected(tenant)
        self._triton.rejected()

    @property
    def triton(self) -> TritonMetrics:
        """The same counts under Triton's names."""
        return self._triton

    @property
    def instruments(self) -> Sequence[Instrument]:
        """All of them, in the order of the text form."""
        return self._instruments

    @property
    def http(self) -> HttpMetrics:
        """The metrics of HTTP exchanges."""
        return self._http

    def render(self) -> tuple[bytes, str]:
        """The text exposition and its content type."""
        return exposition(self.registry, self._instruments), CONTENT_TYPE_LATEST

    def snapshot(self) -> list[Family]:
        """All metrics as records, to be merged with those of other processes."""
        return snapshot(self.registry)

    def render_merged(self, snapshots: Sequence[Sequence[Family]]) -> tuple[bytes, str]:
        """As `render`, for several processes as if they were one."""
        merged = registry_of(merge(snapshots))
        return exposition(merged, self._instruments), CONTENT_TYPE_LATEST

    # Building

    def _legacy(self, name: str) -> str:
        return name if "legacy" in self._aliases else ""

    def _gauge(self, name: str, text: str, *extra: str, also: str = "") -> Gauge:
        gauge = Gauge(name, text, ("model_name", "engine", *extra), also=also)
        self._instruments.append(gauge)
        if not extra:
            gauge.set(0, self._labels)
        return gauge

    def _counter(self, name: str, text: str, *extra: str, also: str = "") -> Counter:
        counter = Counter(name, text, ("model_name", "engine", *extra), also=also)
        self._instruments.append(counter)
        if not extra:
            counter.add(0, self._labels)
        return counter

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], *, also: str = ""
    ) -> Histogram:
        histogram = Histogram(name, text, ("model_name", "engine"), bounds=bounds, also=also)
        self._instruments.append(histogram)
        histogram.declare(self._labels)
        return histogram

    def _make_gauges(self, cache_config: dict[str, str]) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Sequences in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Sequences that wait for a slot.")
        self._waiting_by = self._gauge(
            "vllm:num_requests_waiting_by_reason",
            "Waiting sequences by what they wait for.",
            "reason",
        )
        self._usage = [
            self._gauge(
                "vllm:kv_cache_usage_perc",
                "Share of KV blocks owned by a sequence, 0 to 1.",
                also=self._legacy("vllm:gpu_cache_usage_perc"),
            )
        ]
        if "seed" in self._aliases:
            text = "The same value as vllm:kv_cache_usage_perc."
            self._usage.append(self._gauge("vllm:gpu_cache_usage_factor", text))
        self._hit_rate: Gauge | None = None
        if "legacy" in self._aliases:
            rate = "Prefix cache hits per query since the start."
            self._hit_rate = self._gauge("vllm:gpu_prefix_cache_hit_rate", rate)
            self._gauge("vllm:cpu_cache_usage_perc", "Always 0: there is no swap space.")
            self._gauge("vllm:num_requests_swapped", "Always 0: there is no swap space.")
        self._queued_tokens = self._gauge(
            "octavo:queued_prompt_tokens", "Prompt tokens of waiting sequences."
        )
        self._cached_blocks = self._gauge(
            "octavo:kv_blocks_cached", "KV blocks that hold a reusable prefix and have no owner."
        )
        self._cache_info = Gauge("vllm:cache_config_info", "Facts about the KV cache.", ())
        self._instruments.append(self._cache_info)
        self.set_cache_config(cache_config)
        awake = "1 for the state that the engine is in; it never sleeps."
        sleep = self._gauge("vllm:engine_sleep_state", awake, "sleep_state")
        for state in SLEEP_STATES:
            sleep.set(float(state == "awake"), (*self._labels, state))
        self._set_load(0, 0, self._labels)

    def _make_counters(self) -> None:
        counter = self._counter
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self._prompt_cached = counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._by_source = counter(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source"
        )
        self._cached_by_source = counter(
            "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by source.", "source"
        )
        for source in ("local_compute", "local_cache_hit"):
            self._by_source.add(0, (*self._labels, source))
        self._cached_by_source.add(0, (*self._labels, "local_cache_hit"))
        self._prefix_queries = counter(
            "vllm:prefix_cache_queries",
            "Tokens looked up in the prefix cache.",
            also=self._legacy("vllm:gpu_prefix_cache_queries"),
        )
        self._prefix_hits = counter(
            "vllm:prefix_cache_hits",
            "Tokens found in the prefix cache.",
            also=self._legacy("vllm:gpu_prefix_cache_hits"),
        )
        self._preemptions = counter("vllm:num_preemptions", "Sequences put back to the queue.")
        self._core_deaths = counter("octavo:core_deaths", "Engine cores that died.")
        self._recoveries = counter("octavo:step_recoveries", "Failed steps that were recovered.")
        self._success = counter(
            "vllm:request_success", "Sequences that ended, by reason.", "finished_reason"
        )
        for reason in FINISH_REASONS:
            self._success.add(0, (*self._labels, reason))
        self._rejections = Counter(
            "vllm:admission_rejections", "Requests refused at admission.", ("model_name", "reason")
        )
        self._instruments.append(self._rejections)
        for reason in REJECTION_REASONS:
            self._rejections.add(0, (self._model_name, reason))

    def _make_latencies(self) -> None:
        histogram = self._histogram
        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_SECONDS
        )
        self._token_gap = histogram(
            "vllm:inter_token_latency_seconds",
            "Time between tokens of a sequence.",
            TOKEN_SECONDS,
            also=self._legacy("vllm:time_per_output_token_seconds"),
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first, of a sequence.",
            TOKEN_SECONDS,
        )
        self._end_to_end = histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to end.", REQUEST_SECONDS
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "Arrival to first step.", REQUEST_SECONDS
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "First step to first token.", REQUEST_SECONDS
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", REQUEST_SECONDS
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "First step to last token.", REQUEST_SECONDS
        )

    def _make_sizes(self) -> None:
        histogram, lengths = self._histogram, self._lengths
        self._step_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens of an engine step.", STEP_TOKENS
        )
        self._request_prompt = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a sequence.", lengths
        )
        self._request_generation = histogram(
            "vllm:request_generation_tokens", "Generated tokens of a sequence.", lengths
        )
        self._request_max_generation = histogram(
            "vllm:request_max_num_generation_tokens", "Most tokens any choice generated.", lengths
        )
        self._request_n = histogram(
            "vllm:request_params_n",
            "Choices asked for.",
            CHOICES,
            also=self._legacy("vllm:request_params_best_of"),
        )
        self._request_max_tokens = histogram(
            "vllm:request_params_max_tokens", "max_tokens asked for.", lengths
        )
        self._request_preemptions = histogram(
            "vllm:request_num_preemptions", "Preemptions of a sequence.", PREEMPTIONS
        )
        self._request_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens not found cached.", lengths
        )

    def _set_load(self, running: int, waiting: int, labels: Labels) -> None:
        self._running.set(running, labels)
        self._waiting.set(waiting, labels)
        self._waiting_by.set(waiting, (*labels, "capacity"))
        self._waiting_by.set(0, (*labels, "deferred"))

    def _set_usage(self, share: float, labels: Labels) -> None:
        for gauge in self._usage:
            gauge.set(share, labels)
