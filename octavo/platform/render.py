"""Writes all of a spec's files, or none: they are made and linted first, then put in place at once.

Not for: what they hold (`manifests.py` and its neighbours). Next file: `lint.py`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import ConfigError
from octavo.platform.chart import chart, live_values, marked
from octavo.platform.gateway_objects import gateway
from octavo.platform.lint import LintOptions, lint
from octavo.platform.manifests import (
    engine,
    engine_urls,
    namespace,
    protection,
    scaling,
    settings,
    storage,
)
from octavo.platform.monitoring import dashboard, monitors
from octavo.platform.sizes import Sizes, sizes_of
from octavo.platform.spec import Spec
from octavo.platform.yaml_text import as_yaml

MARK = ".rendered"  # in a folder that a render may replace


@dataclass(frozen=True, slots=True)
class Rendered:
    """Files by name, and what was found out on the way."""

    files: dict[str, str]
    sizes: Sizes


def render(spec: Spec) -> Rendered:
    """Everything, as texts. Raises ConfigError if the model does not fit."""
    sizes = sizes_of(spec)
    files = manifests(spec, sizes)
    live = live_values(spec)
    files |= chart(spec, manifests(marked(spec, live), sizes), live)
    files["dashboards/octavo.json"] = json.dumps(dashboard(spec), indent=2) + "\n"
    files["NOTES.txt"] = notes(spec, sizes)
    return Rendered(files, sizes)


def manifests(spec: Spec, sizes: Sizes) -> dict[str, str]:
    """The objects, by file."""
    folders = {
        "00-namespace.yaml": namespace(spec),
        "10-settings.yaml": settings(spec),
        "15-storage.yaml": storage(spec, sizes.storage),
        "20-engine.yaml": engine(spec, sizes),
        "30-gateway.yaml": gateway(spec, engine_urls(spec)),
        "40-protection.yaml": protection(spec),
        "50-scaling.yaml": scaling(spec),
        "60-monitoring.yaml": monitors(spec),
    }
    return {
        name: "---\n".join(as_yaml(one) for one in objects)
        for name, objects in folders.items()
        if objects
    }


def notes(spec: Spec, sizes: Sizes) -> str:
    """What must be there first, and how to apply the rest."""
    secrets = spec.secrets
    space = spec.namespace
    make = f"kubectl -n {space} create secret generic"
    lines = [
        f"Deployment {spec.name} of {spec.model.name}, {sizes.note}.",
        "",
        "Needed first:",
    ]
    if spec.engine.mode != "deployment":
        lines.append("  the KubeRay operator, 1.4 or later, with its definitions (its Helm chart)")
    if spec.gpu.kind:
        lines.append("  the device plugin for NVIDIA GPUs, and its feature discovery for labels")
    if spec.monitoring.enabled:
        lines.append("  the Prometheus operator, for ServiceMonitor, PodMonitor, PrometheusRule")
    if spec.autoscale.kind == "keda":
        lines.append("  KEDA")
    if spec.autoscale.kind == "hpa":
        lines.append("  an adapter that serves vllm_num_requests_waiting as a metric of pods")
    lines += [
        f"  the image {spec.image}, built from deploy/ and pushed where the cluster finds it",
        "",
        "Then:",
        "  kubectl apply -f 00-namespace.yaml",
        f"  {make} {secrets.engine} --from-literal=key=$(openssl rand -hex 24)",
        f"  {make} {secrets.gateway} --from-literal=key=sk-$(openssl rand -hex 24)",
        f"  {make} {secrets.hub} --from-literal=token=$HF_TOKEN",
        "  kubectl apply -f .          (or: helm install NAME chart/ -n " + space + ")",
        "",
        f"The start may take {sizes.startup_failures * 10} s before a pod is given up; a drain "
        f"{spec.drain.seconds} s.",
    ]
    return "\n".join(lines) + "\n"


def write(rendered: Rendered, out: Path, crds: Path | None = None) -> list[str]:
    """Puts the files into `out`, which must not exist, or be of an earlier render.

    Nothing is written if one of them has a flaw. Names of the files. Raises ConfigError.
    """
    if out.exists() and not (out / MARK).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out}: there is something that no render has written; name another folder.",
            "out",
        )
    parent = out.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {parent}; make it first.", "out")
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=parent))
    try:
        for name, text in rendered.files.items():
            file = fresh / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        (fresh / MARK).write_text("written by `octavo render`, which may replace this folder\n")
        flaws = [one for one in lint([fresh], LintOptions(crds)) if one.level == "error"]
        if flaws:
            shown = "\n".join(str(one).replace(f"{fresh}/", "") for one in flaws)
            raise ConfigError(f"nothing was written, for it would not work:\n{shown}", "spec")
        fresh.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        fresh.rename(out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return sorted(rendered.files)
