"""The same manifests as a Helm chart whose values are the spec.

Values that stand in the files as they are can be changed by Helm. All others shape the files, so a
change of them stops the installation and asks for another render: nothing is ignored. Not for: what
the files hold (`manifests.py`). Next file: `render.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from octavo import __version__
from octavo.platform.spec import Spec
from octavo.platform.yaml_text import as_yaml

FIRST = 970_000_001  # numbers that stand for a value; nothing else is so large
VALUE = "{{{{ .Values.{path} }}}}"


@dataclass(frozen=True, slots=True)
class Live:
    """A value that Helm may change: its path, and what stands for it while files are made."""

    path: tuple[str, str]
    mark: str | int

    @property
    def text(self) -> str:
        """The template that takes its place."""
        return VALUE.format(path=".".join(self.path))


def live_values(spec: Spec) -> list[Live]:
    """Those that stand in this spec's files as they are."""
    paths = [("engine", "version"), ("engine", "cpu"), ("engine", "memory"), ("engine", "shm")]
    paths += [("service", "port"), ("monitoring", "interval"), ("gateway", "version")]
    paths += [("gateway", "image"), ("gateway", "replicas")]
    if spec.engine.image:
        paths.append(("engine", "image"))
    if spec.engine.mode == "deployment" and spec.autoscale.kind != "none":
        paths += [("autoscale", name) for name in ("minimum", "maximum", "waiting")]
    tree = asdict(spec)
    return [
        Live(path, FIRST + at if isinstance(tree[path[0]][path[1]], int) else f"zzmark{at}zz")
        for at, path in enumerate(paths)
    ]


def marked(spec: Spec, live: list[Live]) -> Spec:
    """The spec with marks for live values."""
    for one in live:
        part, name = one.path
        section: Any = table_of(spec, part)
        spec = replace(spec, **{part: replace(section, **{name: one.mark})})
    return spec


def table_of(spec: Spec, part: str) -> Any:
    """One of the spec's tables."""
    tables = {
        "engine": spec.engine,
        "service": spec.service,
        "monitoring": spec.monitoring,
        "gateway": spec.gateway,
        "autoscale": spec.autoscale,
    }
    return tables[part]


def values_of(spec: Spec) -> dict[str, Any]:
    """The spec, every key of it, as the chart's values."""
    version = spec.engine.version or __version__
    return asdict(replace(spec, engine=replace(spec.engine, version=version)))


def chart(spec: Spec, files: dict[str, str], live: list[Live]) -> dict[str, str]:
    """The chart's files. `files` are those of the marked spec."""
    made = {
        "chart/Chart.yaml": as_yaml(
            {
                "apiVersion": "v2",
                "name": spec.name,
                "description": f"{spec.model.name}, served by {spec.engine.kind}",
                "type": "application",
                "version": __version__,
                "appVersion": spec.engine.version or __version__,
            }
        ),
        "chart/values.yaml": as_yaml(values_of(spec)),
        "chart/templates/_check.tpl": "".join(_checks(spec, live)),
    }
    for name, text in files.items():
        if name.endswith(".yaml") and not name.startswith("00-"):  # Helm makes the namespace
            made[f"chart/templates/{name}"] = template(text, live)
    first = next(name for name in made if name.startswith("chart/templates/1"))
    made[first] = '{{- include "octavo.check" . -}}\n' + made[first]
    return made


def template(text: str, live: list[Live]) -> str:
    """A file's text with values in place of marks; braces of others are kept from Helm."""
    escaped = text.replace("{{", '{{ "{{" }}')
    for one in live:
        escaped = escaped.replace(str(one.mark), one.text)
    return escaped


def _checks(spec: Spec, live: list[Live]) -> Iterator[str]:
    """A template that fails if a value was changed that shaped the files."""
    free = {one.path for one in live}
    yield '{{- define "octavo.check" -}}\n'
    for part, value in values_of(spec).items():
        if not isinstance(value, dict):
            yield _check(part, value)
            continue
        for name, inner in value.items():
            if (part, name) not in free:
                yield _check(f"{part}.{name}", inner)
    yield "{{- end -}}\n"


def _check(path: str, value: object) -> str:
    said = json.dumps(json.dumps(value, separators=(",", ":"), sort_keys=True))
    refusal = f"{path} shapes the files: change it in the spec, and run octavo render again"
    return (
        f'{{{{- if ne (toJson .Values.{path}) {said} }}}}{{{{ fail "{refusal}" }}}}{{{{ end }}}}\n'
    )
