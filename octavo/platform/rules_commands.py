"""Rules over commands, settings and variables: names that nothing reads, models that do not fit.

Not for: manifests (`rules_cluster.py`). Next file: `rules_metrics.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from octavo.errors import CheckpointError, ConfigError, OctavoError
from octavo.fields import options_of, unknown_name
from octavo.options import EngineArgs, ServerArgs
from octavo.platform.findings import Finding
from octavo.platform.rules_cluster import all_pods
from octavo.platform.sizes import PERIOD, START_SECONDS
from octavo.platform.sources import Command, Sources
from octavo.renamed import DEAD_VARIABLES, REMOVED

# Variables of engine images that other engines do not read.
ENGINE_VARIABLES = tuple(
    variable
    for details in options_of(EngineArgs).values()
    for variable in details.env
    if not variable.startswith(("OCTAVO_", "VLLM_", "OMP_", "RAY_"))
)
OLD_MODULES = {
    "vllm.benchmarks.benchmark_serving": ("is gone", "use `vllm bench serve`"),
    "vllm.entrypoints.openai.api_server": ("is deprecated", "use `vllm serve MODEL`"),
}
TRITON = re.compile(r"\bTriton\b.*\bExporter\b|\bTriton & Prometheus\b", re.IGNORECASE)
TRITON_THERE = re.compile(r"tritonserver|nv_inference_|:8002\b")
PRODUCTS = {"H100": "H100-80", "H200": "H200", "A100": "A100-80", "L40S": "L40S", "L4": "L4"}
PLANNED = (
    *("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization", "max_model_len"),
    *("kv_cache_dtype", "block_size", "max_num_batched_tokens", "max_num_seqs", "quantization"),
    *("dtype", "kv_cache_memory_bytes"),
)


def engine_of(sources: Sources) -> str:
    """Which engine this is about: octavo as soon as anything names it, else vllm."""
    launched = {command.launches for command in sources.commands}
    images = str([pod.spec.get("containers") for pod in all_pods(sources)])
    ours = "octavo" in launched or "octavo.serve" in str([one.body for one in sources.documents])
    return "octavo" if ours or re.search(r"image': '[^']*octavo", images) else "vllm"


def dead_variable(sources: Sources) -> Iterator[Finding]:
    """Environment variables that the engine does not read."""
    ours = engine_of(sources) == "octavo"
    seen: set[str] = set()
    for name, file, line in sources.variables:
        remedy = DEAD_VARIABLES.get(name, "")
        if name in ENGINE_VARIABLES and not ours:
            remedy = f"vLLM reads no such variable; give the flag --{_flag(name)}, or use Octavo"
        if remedy and name not in seen:
            seen.add(name)
            yield Finding("dead-variable", file, line, f"nothing reads {name}", remedy)


def _flag(variable: str) -> str:
    for name, details in options_of(EngineArgs).items():
        if variable in details.env:
            return name.replace("_", "-")
    return variable.lower()


def unknown_flag(sources: Sources) -> Iterator[Finding]:
    """Flags that do not exist, or not any more."""
    known = {*options_of(EngineArgs), *options_of(ServerArgs), "config"}
    for command in sources.commands:
        if not command.serves:
            continue
        for name in command.flags():
            if name in REMOVED:
                yield _flagged(command, name, "is gone", REMOVED[name].rstrip("."))
            elif command.launches == "octavo" and name.removeprefix("no_") not in known:
                hint = unknown_name(name, list(known), f"--{name}").partition("; ")[2]
                yield _flagged(command, name, "is not known", hint or "leave it out")


def _flagged(command: Command, name: str, what: str, remedy: str) -> Finding:
    flag = f"--{name.replace('_', '-')}"
    return Finding("unknown-flag", command.file, command.line, f"{flag} {what}", remedy)


def old_module(sources: Sources) -> Iterator[Finding]:
    """Modules of vLLM that were moved."""
    for command in sources.commands:
        for module, (what, remedy) in OLD_MODULES.items():
            if module in command.words:
                level = "error" if what == "is gone" else "warning"
                yield Finding(
                    "old-module",
                    command.file,
                    command.line,
                    f"{module} {what}",
                    remedy,
                    "error" if level == "error" else "warning",
                )


def triton_not_there(sources: Sources) -> Iterator[Finding]:
    """Triton is another server: metrics of its names come of it, or of Octavo."""
    everything = "\n".join(text.text for text in sources.texts)
    if TRITON_THERE.search(everything):
        return
    for text in sources.texts:
        found = TRITON.search(text.text)
        if found:
            yield Finding(
                "triton-not-there",
                text.file,
                text.line_of(found.start()),
                "an exporter of Triton is spoken of, and there is no Triton",
                "scrape the engine's own /metrics; Octavo's has nv_inference_* too",
            )
            return


def model_fit(sources: Sources) -> Iterator[Finding]:
    """The model must fit as it is cut, and settings must leave it the kernels that are meant."""
    settings = sources.settings
    gpu = _gpu(sources)
    if not gpu or "model" not in settings:
        return
    from octavo.plan.advice import kernel_rules, require_fit
    from octavo.plan.forecast import Question, changed, make_plan

    file, line = sources.settings_at
    values: dict[str, Any] = {key: settings[key] for key in PLANNED if key in settings}
    values["model"] = str(settings["model"])
    try:
        args = changed(EngineArgs(), **values)
        args.check()
        question = Question(args, gpu)
        plan = make_plan(question)
        require_fit(question, plan)
    except CheckpointError as error:
        yield Finding("model-fit", file, line, error.message, "give a folder", "warning")
        return
    except OctavoError as error:
        yield Finding("model-fit", file, line, error.message, "see `octavo plan`")
        return
    for name, verdict in kernel_rules(plan):
        wanted = name.startswith(("FlashAttention-3", "FlashMLA", "fa3"))
        if wanted and verdict != "yes" and engine_of(sources) == "vllm":
            problem, _, remedy = verdict.removeprefix("no: ").partition("; ")
            yield Finding(
                "kernel-ruled-out",
                file,
                line,
                f"these settings rule {name} out: {problem}",
                remedy or "use other settings",
                "warning",
            )


def _gpu(sources: Sources) -> str:
    """The GPU that pods are for, by node selector or by names."""
    texts = [str(pod.spec.get("nodeSelector", "")) for pod in all_pods(sources) if pod.gpus]
    texts += [one.name for one in sources.of("RayCluster", "RayService")]
    texts += [text.text for text in sources.texts]
    for text in texts:
        for name, kind in PRODUCTS.items():
            if re.search(rf"(?i)(?<![a-z0-9]){name}(?![a-z0-9])", text):
                return kind
    return ""


def probe_too_short(sources: Sources) -> Iterator[Finding]:
    """A start that takes longer than its probe allows is killed, for ever."""
    for pod in all_pods(sources):
        for number, container in enumerate(pod.spec.get("containers") or []):
            probe = container.get("startupProbe")
            if not probe or not pod.gpus:
                continue
            seconds = probe.get("failureThreshold", 3) * probe.get("periodSeconds", PERIOD)
            if seconds < START_SECONDS:
                yield Finding(
                    "probe-too-short",
                    pod.document.file,
                    pod.line("containers", number, "startupProbe"),
                    f"the start is given {seconds} seconds, and needs {START_SECONDS} before it "
                    "reads a weight",
                    "raise failureThreshold; `octavo render` sizes it by the plan",
                )


def spec_file(sources: Sources) -> Iterator[Finding]:
    """A spec is read as `octavo render` reads it."""
    from octavo.platform.sizes import sizes_of
    from octavo.platform.spec import read_spec_file

    for path in sources.specs:
        try:
            sizes_of(read_spec_file(path))
        except ConfigError as error:
            text = error.message.removeprefix(f"{path}:")
            number, _, rest = text.partition(": ")
            line = int(number) if number.isdecimal() else 1
            problem, _, remedy = (rest if number.isdecimal() else text).partition("; ")
            yield Finding("spec", str(path), line, problem, remedy or "see docs/runbook.md")


RULES = (
    *(dead_variable, unknown_flag, old_module, triton_not_there, model_fit, probe_too_short),
    spec_file,
)
