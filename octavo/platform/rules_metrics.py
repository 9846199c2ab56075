"""Rules over names of metrics, in dashboards, alerts, scalers and commands.

Names are held against an exposition: Octavo's own, or one that was stored or is served. Not for:
anything else. Next file: `schema.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from octavo.errors import ConfigError
from octavo.platform.findings import Finding, Rule
from octavo.platform.sources import Sources

NAME = re.compile(r"\b(?:vllm|octavo):[a-zA-Z_]\w*|\bnv_inference_\w+")
PARTS = ("_bucket", "_sum", "_count", "_created")
RATED = re.compile(r"\b(?:rate|irate|increase|delta|resets)\s*\(\s*$")
RENAMED: Mapping[str, str] = {
    "vllm:gpu_cache_usage_factor": "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "vllm:cpu_cache_usage_perc": "nothing: there is no swap space",
    "vllm:gpu_prefix_cache_hit_rate": "rate(vllm:prefix_cache_hits_total[5m]) over queries",
    "vllm:gpu_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds",
    "vllm:num_requests_swapped": "nothing: there is no swap space",
    "vllm:request_params_best_of": "vllm:request_params_n",
}


def types_in(text: str) -> dict[str, str]:
    """Name -> type of an exposition's families."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE)
    if not found:
        raise ConfigError("--metrics: there is no metric in it; give what /metrics answers.")
    return dict(found)


def own_types(aliases: frozenset[str] = frozenset()) -> dict[str, str]:
    """Octavo's own."""
    from octavo.obs.metrics import Metrics

    return types_in(Metrics("x", max_model_len=10, aliases=aliases).render()[0].decode())


def rules_for(types: Mapping[str, str]) -> tuple[Rule, ...]:
    """The rules, against these names."""
    return (partial(metric_name, types), partial(histogram_rate, types))


def metric_name(types: Mapping[str, str], sources: Sources) -> Iterator[Finding]:
    """Names that no engine exports, each once a file."""
    for text in sources.texts:
        seen: set[str] = set()
        for match in NAME.finditer(text.text):
            name = match.group(0)
            if name in seen or _known(types, name):
                continue
            seen.add(name)
            instead = RENAMED.get(name, "a name that /metrics has")
            yield Finding(
                "metric-name",
                text.file,
                text.line_of(match.start()),
                f"there is no metric {name}",
                f"use {instead}",
            )


def _known(types: Mapping[str, str], name: str) -> bool:
    if name in types or f"{name}_total" in types:
        return True
    for part in PARTS:
        base = name.removesuffix(part)
        if base != name and types.get(base) in ("histogram", "summary"):
            return True
    return False


def histogram_rate(types: Mapping[str, str], sources: Sources) -> Iterator[Finding]:
    """Sums and buckets count from a process's start: without a rate they say nothing of now."""
    for text in sources.texts:
        if not text.file.endswith((".json", ".yaml", ".yml")):
            continue
        for match in NAME.finditer(text.text):
            name = match.group(0)
            base = next((name.removesuffix(p) for p in PARTS if name.endswith(p)), name)
            before = text.text[max(0, match.start() - 40) : match.start()]
            if types.get(base) != "histogram" or base == name or RATED.search(before):
                continue
            yield Finding(
                "histogram-without-rate",
                text.file,
                text.line_of(match.start()),
                f"{name} is taken as it is, since the process started",
                f"use rate({name}[5m])",
            )
