"""What Prometheus scrapes, what wakes people up, and the board they then look at.

All names are of Octavo's `/metrics` (vLLM has the same), and every histogram is taken as a rate.
Not for: installing Prometheus. Next file: `render.py`.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.platform.pods import Tree, labels, meta
from octavo.platform.spec import Spec

Panel = tuple[str, str, tuple[tuple[str, str], ...]]  # title, unit, (legend, expression)
HISTOGRAMS = (
    ("Time to first token", "vllm:time_to_first_token_seconds"),
    ("Time between tokens", "vllm:inter_token_latency_seconds"),
    ("Whole request", "vllm:e2e_request_latency_seconds"),
    ("Time in the queue", "vllm:request_queue_time_seconds"),
)


def monitors(spec: Spec) -> list[Tree]:
    """A ServiceMonitor for the engine and, with Ray, a PodMonitor for its nodes; the rules."""
    if not spec.monitoring.enabled:
        return []
    scraped: Tree = {"port": "http", "path": "/metrics", "interval": spec.monitoring.interval}
    key = {"name": spec.secrets.engine, "key": "key"}
    scraped["authorization"] = {"credentials": key}
    service = _monitor(
        spec,
        "ServiceMonitor",
        {
            "selector": {"matchLabels": labels(spec, "engine")},
            "endpoints": [scraped],
            "targetLabels": ["app.kubernetes.io/instance"],
        },
    )
    found = [service, alerts(spec), board(spec)]
    if spec.engine.mode != "deployment":
        ends = [{"port": "metrics", "interval": spec.monitoring.interval}]
        body: Tree = {
            "selector": {"matchLabels": labels(spec, "engine")},
            "podMetricsEndpoints": ends,
        }
        found.insert(1, _monitor(spec, "PodMonitor", body))
    return found


def _monitor(spec: Spec, kind: str, body: Tree) -> Tree:
    metadata = meta(spec, f"{spec.name}-engine", "monitoring")
    metadata["labels"] |= spec.monitoring.labels
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": kind,
        "metadata": metadata,
        "spec": body,
    }


def alerts(spec: Spec) -> Tree:
    """The PrometheusRule."""
    here = f'namespace="{spec.namespace}"'
    slots = f"vllm:num_requests_waiting{{{here}}}"
    first = "vllm:time_to_first_token_seconds_bucket"
    rules = [
        _alert(
            "EngineDown",
            f'absent(up{{{here}, service="{spec.service.name}"}} == 1)',
            "2m",
            "No engine answers: look at its pods, and at /health/live.",
        ),
        _alert(
            "QueueGrows",
            f"min_over_time({slots}[5m]) > {spec.autoscale.waiting}",
            "5m",
            "More waits than the engine serves: add replicas, or lower the clients' rate.",
        ),
        _alert(
            "FirstTokenSlow",
            f"histogram_quantile(0.95, sum by (le) (rate({first}{{{here}}}[5m]))) > 5",
            "10m",
            "95 % of requests wait up to 5 s for a token: compare queue and prefill times.",
        ),
        _alert(
            "CacheFull",
            f"avg_over_time(vllm:kv_cache_usage_perc{{{here}}}[10m]) > 0.95",
            "10m",
            "The KV cache is full: requests are preempted or wait; see `octavo plan`.",
        ),
        _alert(
            "Preemptions",
            f"rate(vllm:num_preemptions_total{{{here}}}[5m]) > 1",
            "10m",
            "More than one preemption a second: lower max_num_seqs, or give more cache.",
        ),
        _alert(
            "RequestsFail",
            f'rate(vllm:request_success_total{{{here}, finished_reason="error"}}[5m]) > 0.1',
            "5m",
            "Requests end with errors: look at the engine's log.",
        ),
        _alert(
            "RequestsRefused",
            f"rate(vllm:admission_rejections_total{{{here}}}[5m]) > 1",
            "5m",
            "Requests get 429: the queue is full.",
        ),
    ]
    if spec.engine.kind == "octavo":
        rules.append(
            _alert(
                "EngineRestarts",
                f"increase(octavo:core_deaths_total{{{here}}}[30m]) > 2",
                "0m",
                "The engine's core dies again and again: look for its last lines in the log.",
            )
        )
    return _monitor(spec, "PrometheusRule", {"groups": [{"name": spec.name, "rules": rules}]})


def _alert(name: str, expression: str, wait: str, text: str) -> Tree:
    return {
        "alert": f"Octavo{name}",
        "expr": expression,
        "for": wait,
        "labels": {"severity": "page" if name == "EngineDown" else "warning"},
        "annotations": {"summary": text, "runbook": "docs/runbook.md"},
    }


def board(spec: Spec) -> Tree:
    """The dashboard, as a ConfigMap that Grafana's sidecar finds."""
    metadata = meta(spec, f"{spec.name}-board", "monitoring")
    metadata["labels"]["grafana_dashboard"] = "1"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"octavo.json": json.dumps(dashboard(spec), indent=2) + "\n"},
    }


def dashboard(spec: Spec) -> dict[str, Any]:
    """Grafana's JSON."""
    here = 'namespace=~"$namespace"'
    panels = [_timed(title, metric, here) for title, metric in HISTOGRAMS]
    panels += _counted(here)
    placed = [_panel(number, panel) for number, panel in enumerate(panels)]
    variable = {
        "name": "namespace",
        "type": "query",
        "query": "label_values(vllm:num_requests_running, namespace)",
        "includeAll": True,
        "datasource": {"type": "prometheus"},
    }
    return {
        "title": f"Octavo: {spec.name}",
        "uid": f"octavo-{spec.name}"[:40],
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": placed,
    }


def _timed(title: str, metric: str, here: str) -> Panel:
    buckets = f"sum by (le) (rate({metric}_bucket{{{here}}}[$__rate_interval]))"
    quantiles = tuple(
        (f"p{share}", f"histogram_quantile(0.{share}, {buckets})") for share in (50, 95, 99)
    )
    return title, "s", quantiles


def _counted(here: str) -> list[Panel]:
    def rate(name: str) -> str:
        return f"sum(rate({name}{{{here}}}[$__rate_interval]))"

    hits, asked = rate("vllm:prefix_cache_hits_total"), rate("vllm:prefix_cache_queries_total")
    reason = f"sum by (finished_reason) (rate(vllm:request_success_total{{{here}}}[5m]))"
    refused = f"sum by (reason) (rate(vllm:admission_rejections_total{{{here}}}[5m]))"
    return [
        (
            "Requests",
            "short",
            (
                ("running", f"sum(vllm:num_requests_running{{{here}}})"),
                ("waiting", f"sum(vllm:num_requests_waiting{{{here}}})"),
            ),
        ),
        (
            "Waiting for",
            "short",
            (
                (
                    "{{reason}}",
                    f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{here}}})",
                ),
            ),
        ),
        (
            "KV cache in use",
            "percentunit",
            (("{{pod}}", f"vllm:kv_cache_usage_perc{{{here}}}"),),
        ),
        ("Prefix cache, share of tokens", "percentunit", (("hits", f"{hits} / {asked}"),)),
        (
            "Tokens a second",
            "short",
            (
                ("prompt", rate("vllm:prompt_tokens_total")),
                ("answer", rate("vllm:generation_tokens_total")),
            ),
        ),
        ("Preemptions a second", "short", (("all", rate("vllm:num_preemptions_total")),)),
        ("How requests ended", "reqps", (("{{finished_reason}}", reason),)),
        ("Refused", "reqps", (("{{reason}}", refused),)),
    ]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    title, unit, lines = panel
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus"},
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + at), "legendFormat": legend, "expr": expression}
            for at, (legend, expression) in enumerate(lines)
        ],
    }
