"""Figures out of outcomes, and the block and the JSON in which they are printed.

The layout (names, widths, order) is that of the well-known serving benchmark, so that scripts that
read it keep working. All latencies are printed in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.bench.client import Outcome

TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for, as far as the report shows it."""

    request_rate: float
    max_concurrency: int | None
    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput: dict[str, float] = field(default_factory=dict)  # metric: milliseconds


@dataclass(slots=True)
class Figures:
    """A run in numbers; times in seconds."""

    duration: float
    outcomes: list[Outcome]

    @property
    def good(self) -> list[Outcome]:
        """Requests that were answered in full."""
        return [outcome for outcome in self.outcomes if outcome.success]

    @property
    def input_tokens(self) -> int:
        """Prompt tokens of answered requests."""
        return sum(outcome.prompt_len for outcome in self.good)

    @property
    def output_tokens(self) -> int:
        """Tokens generated for answered requests."""
        return sum(outcome.output_len for outcome in self.good)

    def values(self, metric: str) -> NDArray[np.float64]:
        """All values of a metric, in milliseconds."""
        good = self.good
        if metric == "ttft":
            seconds = [outcome.first for outcome in good]
        elif metric == "tpot":
            seconds = [outcome.per_token for outcome in good if outcome.output_len > 1]
        elif metric == "itl":
            seconds = [gap for outcome in good for gap in outcome.gaps]
        else:
            seconds = [outcome.latency for outcome in good]
        return 1000.0 * np.array(seconds or [0.0])

    def within(self, goodput: dict[str, float]) -> int:
        """Answered requests that met every bound of `goodput`."""
        return sum(_meets(outcome, goodput) for outcome in self.good)

    def peak_tokens(self) -> float:
        """Most tokens that arrived within one second of the run."""
        ends = self._token_times()
        return float(np.bincount(ends.astype(np.int64)).max()) if ends.size else 0.0

    def peak_concurrency(self) -> float:
        """Most requests that were open in one second of the run."""
        if not self.good:
            return 0.0
        begin = min(outcome.start for outcome in self.good)
        seconds = np.zeros(int(self.duration) + 2)
        for outcome in self.good:
            first = int(outcome.start - begin)
            last = min(int(outcome.start + outcome.latency - begin), len(seconds) - 1)
            seconds[first : last + 1] += 1
        return float(seconds.max())

    def _token_times(self) -> NDArray[np.float64]:
        if not self.good:
            return np.array([])
        begin = min(outcome.start for outcome in self.good)
        times = [
            outcome.start - begin + outcome.first + offset
            for outcome in self.good
            for offset in np.concatenate(([0.0], np.cumsum(outcome.gaps)))
        ]
        return np.array(times)


def _meets(outcome: Outcome, bounds: dict[str, float]) -> bool:
    values = {"ttft": outcome.first, "tpot": outcome.per_token, "e2el": outcome.latency}
    return all(1000 * values[metric] <= bound for metric, bound in bounds.items())


def block(figures: Figures, options: Options) -> str:
    """The printed block."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def row(name: str, value: float, *, whole: bool = False) -> None:
        lines.append(
            f"{name + ':':<40} {value:<10}" if whole else f"{name + ':':<40} {value:<10.2f}"
        )

    duration = max(figures.duration, 1e-9)
    row("Successful requests", len(figures.good), whole=True)
    row("Failed requests", len(figures.outcomes) - len(figures.good), whole=True)
    if options.max_concurrency is not None:
        row("Maximum request concurrency", options.max_concurrency, whole=True)
    if options.request_rate != float("inf"):
        row("Request rate configured (RPS)", options.request_rate)
    row("Benchmark duration (s)", figures.duration)
    row("Total input tokens", figures.input_tokens, whole=True)
    row("Total generated tokens", figures.output_tokens, whole=True)
    row("Request throughput (req/s)", len(figures.good) / duration)
    if options.goodput:
        row("Request goodput (req/s)", figures.within(options.goodput) / duration)
    row("Output token throughput (tok/s)", figures.output_tokens / duration)
    row("Peak output token throughput (tok/s)", figures.peak_tokens())
    row("Peak concurrent requests", figures.peak_concurrency())
    total = figures.input_tokens + figures.output_tokens
    row("Total token throughput (tok/s)", total / duration)
    for metric in options.metrics:
        title, short = TITLES[metric]
        values = figures.values(metric)
        lines.append(f"{title:-^50}")
        row(f"Mean {short} (ms)", float(values.mean()))
        row(f"Median {short} (ms)", float(np.median(values)))
        for percentile in options.percentiles:
            row(f"P{percentile:g} {short} (ms)", float(np.percentile(values, percentile)))
    lines.append("=" * 50)
    return "\n".join(line.rstrip() for line in lines)


def as_json(figures: Figures, options: Options, *, detailed: bool) -> dict[str, object]:
    """The result under the keys of `--save-result`."""
    duration = max(figures.duration, 1e-9)
    total = figures.input_tokens + figures.output_tokens
    result: dict[str, object] = {
        "duration": figures.duration,
        "completed": len(figures.good),
        "failed": len(figures.outcomes) - len(figures.good),
        "total_input_tokens": figures.input_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": len(figures.good) / duration,
        "request_goodput": (
            figures.within(options.goodput) / duration if options.goodput else None
        ),
        "output_throughput": figures.output_tokens / duration,
        "total_token_throughput": total / duration,
        "max_output_tokens_per_s": figures.peak_tokens(),
        "max_concurrent_requests": figures.peak_concurrency(),
    }
    for metric in TITLES:
        values = figures.values(metric)
        result[f"mean_{metric}_ms"] = float(values.mean())
        result[f"median_{metric}_ms"] = float(np.median(values))
        result[f"std_{metric}_ms"] = float(values.std())
        for percentile in options.percentiles:
            result[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(values, percentile))
    if detailed:
        outcomes = figures.outcomes
        result |= {
            "input_lens": [outcome.prompt_len for outcome in outcomes],
            "output_lens": [outcome.output_len for outcome in outcomes],
            "ttfts": [outcome.first for outcome in outcomes],
            "itls": [outcome.gaps for outcome in outcomes],
            "latencies": [outcome.latency for outcome in outcomes],
            "start_times": [outcome.start for outcome in outcomes],
            "generated_texts": [outcome.text for outcome in outcomes],
            "errors": [outcome.error for outcome in outcomes],
        }
    return result
