"""Prometheus metrics of HTTP exchanges, under the names of common instrumentations.

Not for: the engine (see `metrics.py`).
"""

from __future__ import annotations

from octavo.obs.instruments import Counter, Histogram, Instrument

HTTP_SECONDS = (0.1, 0.5, 1.0)
HTTP_SECONDS_FINE = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5),
    *(4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)


class HttpMetrics:
    """Counts, times and sizes of requests and answers."""

    def __init__(self) -> None:
        self._requests = Counter("http_requests", "HTTP requests.", ("method", "status", "handler"))
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the end of the answer.",
            ("method", "handler"),
            bounds=HTTP_SECONDS,
        )
        self._seconds_fine = Histogram(
            "http_request_duration_highr_seconds",
            "Time to the end of the answer, fine buckets.",
            (),
            bounds=HTTP_SECONDS_FINE,
        )
        self._request_bytes = Counter(
            "http_request_size_bytes", "Bytes of request bodies.", ("handler",)
        )
        self._response_bytes = Counter(
            "http_response_size_bytes", "Bytes of response bodies.", ("handler",)
        )
        self.instruments: list[Instrument] = [
            self._requests,
            self._seconds,
            self._seconds_fine,
            self._request_bytes,
            self._response_bytes,
        ]

    def count(
        self,
        *,
        method: str,
        status: int,
        handler: str,
        seconds: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """One exchange ended; `handler` is the route's pattern, never the raw path."""
        self._requests.add(1, (method, f"{status // 100}xx", handler))
        self._seconds.observe(seconds, (method, handler))
        self._seconds_fine.observe(seconds, ())
        self._request_bytes.add(request_bytes, (handler,))
        self._response_bytes.add(response_bytes, (handler,))
