"""The metrics of NVIDIA Triton over the counts of this engine, for dashboards made for it.

Each sequence counts as one inference, as it counts once in `vllm:request_success`. Its time is cut
at its first step, first token and last token, so queue, compute_input (reading the prompt),
compute_infer (generating) and compute_output (handing on the text) add up to the request's
duration. Names and labels are those of Triton 2.7x; the version of a model is always 1.
Not for: the KServe routes (`server/triton.py`).
"""

from __future__ import annotations

from octavo.obs.instruments import Counter, Gauge, Histogram, Instrument, Labels
from octavo.obs.stats import RequestTimes
from octavo.types import StepStats

VERSION = "1"
FAILURES = {"timeout": "REJECTED", "abort": "CANCELED", "error": "BACKEND"}
REASONS = (*FAILURES.values(), "OTHER")
FIRST_RESPONSE_MS = (100, 500, 2000, 5000)
_DURATIONS = {
    "request": "Arrival to end, summed over inferences, in microseconds.",
    "queue": "Arrival to first step, summed over inferences, in microseconds.",
    "compute_input": "First step to first token, summed over inferences, in microseconds.",
    "compute_infer": "First token to last token, summed over inferences, in microseconds.",
    "compute_output": "Last token to end, summed over inferences, in microseconds.",
}


class TritonMetrics:
    """Counts inferences under Triton's names."""

    def __init__(self, model_name: str) -> None:
        self._labels: Labels = (model_name, VERSION)
        self._success = self._counter("nv_inference_request_success", "Inferences that ended well.")
        self._count = self._counter("nv_inference_count", "Inferences performed.")
        self._executions = self._counter("nv_inference_exec_count", "Steps of the model.")
        self._failure = Counter(
            "nv_inference_request_failure",
            "Inferences that did not end well, by reason.",
            ("model", "version", "reason"),
            bare=True,
        )
        for reason in REASONS:
            self._failure.add(0, (*self._labels, reason))
        self._durations = {
            part: self._counter(f"nv_inference_{part}_duration_us", text)
            for part, text in _DURATIONS.items()
        }
        self._pending = Gauge(
            "nv_inference_pending_request_count",
            "Inferences that wait for their first step.",
            ("model", "version"),
        )
        self._pending.set(0, self._labels)
        self._first_response = Histogram(
            "nv_inference_first_response_histogram_ms",
            "Arrival to first token, in milliseconds.",
            ("model", "version"),
            bounds=FIRST_RESPONSE_MS,
        )
        self._first_response.declare(self._labels)
        self._failed_us = 0.0
        self.instruments: list[Instrument] = [
            *(self._success, self._failure, self._count, self._executions),
            *self._durations.values(),
            *(self._pending, self._first_response),
        ]

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(name, text, ("model", "version"), bare=True)
        counter.add(0, self._labels)
        return counter

    def step(self, stats: StepStats, waiting: int) -> None:
        """Counts of an engine's step, and the sequences that wait in all engines after it."""
        self.waits(waiting)
        self._executions.add(1 if stats.prompt_tokens + stats.sampled_tokens else 0, self._labels)

    def first_token(self, seconds: float) -> None:
        """A first token came, `seconds` after the arrival of its request."""
        self._first_response.observe(1e3 * seconds, self._labels)

    def rejected(self) -> None:
        """A request was refused at admission."""
        self._failure.add(1, (*self._labels, "REJECTED"))

    def waits(self, count: int) -> None:
        """So many sequences wait now."""
        self._pending.set(count, self._labels)

    def finished(self, times: RequestTimes) -> None:
        """A sequence ended; only the times of those that ended well are added up."""
        if times.reason not in ("stop", "length"):
            reason = FAILURES.get(times.reason, "OTHER")
            self._failure.add(1, (*self._labels, reason))
            self._failed_us += 1e6 * times.end_to_end
            return
        self._success.add(1, self._labels)
        self._count.add(1, self._labels)
        parts = {
            "request": times.end_to_end,
            "queue": times.queue or 0.0,
            "compute_input": times.prefill or 0.0,
            "compute_infer": times.decode or 0.0,
            "compute_output": max(0.0, times.finished - (times.last_token or times.finished)),
        }
        for part, seconds in parts.items():
            self._durations[part].add(1e6 * seconds, self._labels)

    def statistics(self) -> dict[str, object]:
        """The counts in the form of `GET /v2/models/{name}/stats`; times in nanoseconds."""
        labels = self._labels
        count = int(self._success.values[labels])
        failed = sum(int(self._failure.values[(*labels, reason)]) for reason in REASONS)
        parts = {
            ("success" if part == "request" else part): {
                "count": count,
                "ns": int(1e3 * counter.values[labels]),
            }
            for part, counter in self._durations.items()
        }
        return {
            "inference_count": int(self._count.values[labels]),
            "execution_count": int(self._executions.values[labels]),
            "inference_stats": {
                **parts,
                "fail": {"count": failed, "ns": int(1e3 * self._failed_us)},
            },
        }
