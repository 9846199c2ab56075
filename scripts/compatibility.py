#!/usr/bin/env python3
"""Writes docs/compatibility.md from the code, so that it says what is true.

`python scripts/compatibility.py` writes it; tests/server/test_compatibility.py compares it and
tries each line. What only people can know, such as how an answer differs, stands in `DIFFERS`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo import fields, foreign, renamed, sampling_params
from octavo.async_engine import AsyncLLMEngine
from octavo.llm import LLM
from octavo.llm_engine import LLMEngine
from octavo.obs.instruments import Counter, Gauge, Instrument
from octavo.obs.metrics import Metrics
from octavo.options import EngineArgs, ServerArgs
from octavo.sampling_params import SamplingParams
from octavo.server.app import ROUTES
from octavo.server.openapi import BODIES
from octavo.server.refusals import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    EMBEDDING_REFUSED,
    SCORE_REFUSED,
    Refusals,
)
from octavo.server.responses import REFUSED as RESPONSES_REFUSED
from octavo.server.triton import TRITON_REFUSED

TARGET = Path(__file__).resolve().parents[1] / "docs" / "compatibility.md"
REFUSED: dict[str, Refusals] = {
    "/v1/chat/completions": CHAT_REFUSED,
    "/v1/completions": COMPLETION_REFUSED,
    "/v1/embeddings": EMBEDDING_REFUSED,
    "/v1/responses": RESPONSES_REFUSED,
    "/v1/score": SCORE_REFUSED,
    "/v1/rerank": SCORE_REFUSED,
}
PYTHON = (
    ("LLM", LLM, foreign.LLM_ABSENT),
    ("LLMEngine", LLMEngine, foreign.LLM_ENGINE_ABSENT),
    ("AsyncLLMEngine", AsyncLLMEngine, foreign.ASYNC_ENGINE_ABSENT),
)
# Metrics of vLLM 0.32 that are not exported here, and why.
MISSING_METRICS = {
    "vllm:lora_requests_info": "LoRA adapters are not built yet",
    "vllm:external_prefix_cache_queries": "there is no cache outside this process",
    "vllm:external_prefix_cache_hits": "there is no cache outside this process",
    "vllm:mm_cache_queries": "prompts are text only",
    "vllm:mm_cache_hits": "prompts are text only",
    "vllm:estimated_flops_per_gpu_total": "not estimated",
    "vllm:estimated_read_bytes_per_gpu_total": "not estimated",
    "vllm:estimated_write_bytes_per_gpu_total": "not estimated",
    "vllm:kv_block_lifetime_seconds": "pages are not sampled",
    "vllm:kv_block_idle_before_evict_seconds": "pages are not sampled",
    "vllm:kv_block_reuse_gap_seconds": "pages are not sampled",
}
DIFFERS = (
    "An unknown field is refused with the nearest known name. With `--no-strict-fields` it is "
    "listed in the header `X-Ignored-Params` instead.",
    "A full queue is 429 with `Retry-After`, not 503 without; the queue is bounded by default.",
    "A request whose deadline passes ends with 504 (`timeout` in metrics), never a short answer.",
    "`usage.prompt_tokens_details.cached_tokens` is always there, and so is `X-Request-Id`.",
    "Answers to a wrong key are 401 in the form of all other errors; every route but the probes "
    "is closed when a key is set.",
    "`/health` is 503 while the model loads, while the server drains, and when work waits and "
    "nothing moves; its body says why.",
    "A stream that breaks ends its request, unless the request has the header `X-Octavo-Resume` "
    "(seconds): then its events have ids, and `GET /v1/requests/{id}/stream`, or the same request "
    "again, with `Last-Event-ID` gives the rest.",
    "`/v1/score` and `/v1/rerank` compare vectors of `/v1/embeddings` by their cosine, as for a "
    "model that embeds; scores are what that model's vectors are worth.",
    "SIGTERM lets running requests end for `--shutdown-timeout` seconds, 30 by default.",
    "`owned_by` is `octavo`, and `system_fingerprint` names this version.",
    "`request_success` has the reason `timeout` and not `repetition`.",
    "KServe v2: `text_output` is the new text alone; send `exclude_input_in_output: false` for "
    "the prompt before it. `generate_stream` streams unless `stream` is false. A compressed body "
    "is refused, as are shared memory and sequences.",
    "The `nv_inference_*` counters count every sequence, whichever route asked for it; "
    "compute_input is the time of the prompt, compute_infer that of the answer.",
    "A request of `n` choices is `n` sequences in all counts.",
    "A NUL may stand in the text of a `prompt` or `text_input`, and nowhere else.",
    "`/v1/embeddings` takes `pooling` (last or mean) and `normalize` in the request. A text leaves "
    "room for one token, which counts as generated in metrics and not in `usage`.",
    "Tools: `finish_reason` is `tool_calls` whenever all calls of an answer are complete, forced "
    "ones too; a call that was cut stays as far as it came, under `length`. `required` and a named "
    "function are written in the model's own form, kept to by a grammar. Without "
    "`--enable-auto-tool-choice`, tools that the model may call are refused. `tools: []` is none.",
    "`strict: true` of a function holds in calls that are forced, and in free ones where the "
    "model marks calls (Hermes, Mistral, DeepSeek); elsewhere it is the model's good will.",
    "A template without tools: a forced call works, with the tools described in a system message; "
    "`auto` is refused, unless `--tool-call-parser hermes` asks for the same.",
    "Reasoning stands in `reasoning` and in `reasoning_content`, without the line breaks around "
    "it. A form that is demanded holds for what comes after it.",
    "`/v1/responses` keeps nothing: `store` is false in every answer. With `tools` and a form, "
    "the answer is one call or JSON of that form.",
)


def document() -> str:
    """The whole file."""
    parts = [
        "# Compatibility",
        "What a client or an operator of vLLM 0.32 finds here, and of Triton's KServe v2 routes. "
        "Written by `python scripts/compatibility.py`; a test compares it with the code and tries "
        "each line. What is not listed is unknown: an unknown field, flag or route is refused.",
        _section("What differs", [f"- {line}" for line in DIFFERS]),
        *_routes(),
        *_fields(),
        *_flags(),
        *_metrics(),
        *_python(),
    ]
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: Iterable[str]) -> str:
    return f"## {title}\n\n" + "\n".join(lines)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], level: int = 3) -> str:
    lines = [f"{'#' * level} {title}", "", f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    lines += [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
        for row in rows
    ]
    return "\n".join(lines)


def _code(text: object) -> str:
    return f"`{text}`"


def _first_line(thing: object) -> str:
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def _routes() -> list[str]:
    works = [
        (_code(path), ", ".join(methods), _first_line(handler)) for path, methods, handler in ROUTES
    ]
    refused = [
        (_code(path), f"{path} is not served here: {why}.") for path, why in foreign.ROUTES.items()
    ]
    return [
        "## Routes",
        _table("Routes that work", ("Route", "Methods", "What it does"), works),
        _table("Routes refused", ("Route", "The words of the refusal (404)"), refused),
    ]


def _fields() -> list[str]:
    parts = ["## Request fields"]
    for path, record in BODIES.items():
        known = set(record.__struct_fields__) - REFUSED.get(path, {}).keys()
        names = ", ".join(_code(name) for name in sorted(known))
        parts.append(f"### Fields of `{path}` that work\n\n{names}")
        if path in REFUSED:
            parts.append(_refused_fields(path, REFUSED[path]))
    own = {
        name: entry
        for name, entry in TRITON_REFUSED.items()
        if COMPLETION_REFUSED.get(name) != entry
    }
    parts.append(
        "### Fields of `/v2/models/{name}/generate`\n\n`text_input`, `id`, `parameters`, "
        "`sampling_parameters`, `stream`, `exclude_input_in_output`, `return_finish_reason`, "
        "`return_num_input_tokens`, `return_num_output_tokens`, and those of `/v1/completions` "
        "but these:"
    )
    parts.append(_refused_fields("/v2/models/{name}/generate", own))
    return parts


def _refused_fields(path: str, table: Refusals) -> str:
    rows = [
        (
            _code(name),
            ", ".join(_code(json.dumps(value)) for value in harmless) or "none",
            f"{name} is not supported here: {remedy}.",
        )
        for name, (harmless, remedy) in sorted(table.items())
    ]
    head = ("Field", "Values that ask for nothing", "The words of the refusal (400)")
    return _table(f"Fields of `{path}` refused", head, rows)


def _flags() -> list[str]:
    works: list[tuple[str, ...]] = []
    single: list[tuple[str, ...]] = []
    for record in (EngineArgs, ServerArgs):
        for name, details in fields.options_of(record).items():
            flag = _code(fields.flag_of(name))
            if details.only is not None:
                values = ", ".join(_code(json.dumps(value)) for value in details.only) or "none"
                single.append((flag, values, details.remedy))
            else:
                works.append((flag, ", ".join(map(_code, details.env)), details.help))
    gone = [
        (_code(fields.flag_of(name)), why)
        for name, why in sorted({**renamed.REMOVED, **foreign.FLAGS}.items())
    ]
    dead = [(_code(name), why) for name, why in renamed.DEAD_VARIABLES.items()]
    words = "The words of the refusal"
    return [
        "## Flags and variables",
        _table("Flags that work", ("Flag", "Variables", "What it does"), works),
        _table("Flags of which some values only are accepted", ("Flag", "Accepted", words), single),
        _table("Flags refused", ("Flag", words), gone),
        _table("Variables refused", ("Variable", words), dead),
    ]


def _kind(one: Instrument) -> str:
    if isinstance(one, Counter):
        return "counter"
    return "gauge" if isinstance(one, Gauge) else "histogram"


def _metrics() -> list[str]:
    metrics = Metrics("model", max_model_len=1024)
    rows = [
        (_code(exported(one)), _kind(one), ", ".join(map(_code, labels_of(one))))
        for one in metrics.instruments
    ]
    missing = [(_code(name), why) for name, why in MISSING_METRICS.items()]
    return [
        "## Metrics",
        "A counter's name is the one of its samples; `--metric-aliases legacy,seed` adds older "
        "names.",
        _table("Metrics that work", ("Metric", "Kind", "Labels"), rows),
        _table("Metrics of vLLM that are missing", ("Metric", "Why"), missing),
    ]


def exported(one: Instrument) -> str:
    """The name of an instrument's samples, without the endings of a histogram."""
    return f"{one.name}_total" if isinstance(one, Counter) and not one.bare else one.name


def labels_of(one: Instrument) -> Sequence[str]:
    """The label names; those of cache_config_info are known once a model is loaded."""
    return ("model_name", "engine") if one.name == "vllm:cache_config_info" else one.labels


def _python() -> list[str]:
    parts = ["## Python"]
    for name, owner, absent in PYTHON:
        public = [one for one in vars(owner) if not one.startswith("_")]
        works = ", ".join(_code(one) for one in sorted(public))
        parts.append(f"### `{name}`\n\nWorks: {works}")
        rows = [(_code(one), f"{name}.{one} is not offered: {why}.") for one, why in absent.items()]
        parts.append(_table(f"Of `{name}` missing", ("Method", "AttributeError"), rows, 4))
    unsupported = sampling_params.UNSUPPORTED
    works = [one for one in SamplingParams.__struct_fields__ if one not in unsupported]
    parts.append("### `SamplingParams`\n\nWorks: " + ", ".join(map(_code, works)))
    parts.append(
        "Refused unless it asks for nothing: " + ", ".join(map(_code, sorted(unsupported)))
    )
    return parts


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
    print(f"wrote {TARGET}")
