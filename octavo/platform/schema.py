"""Whether objects have the form that the API server takes.

Custom resources are checked against their definitions (`--crds`), if they are there; the core kinds
against what the API server requires of them. Not for: what they mean. Next file: `lint.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.platform.findings import Finding, Rule
from octavo.platform.sources import Document, Sources, pods_of, yaml_module

DEFAULT_FOLDERS = ("crds", "../shared/data/crds")
API_OF: Mapping[str, str] = {
    "Namespace": "v1",
    "Service": "v1",
    "ConfigMap": "v1",
    "Secret": "v1",
    "ServiceAccount": "v1",
    "PersistentVolumeClaim": "v1",
    "Deployment": "apps/v1",
    "StatefulSet": "apps/v1",
    "DaemonSet": "apps/v1",
    "PodDisruptionBudget": "policy/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "HorizontalPodAutoscaler": "autoscaling/v2",
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "RayCluster": "ray.io/v1",
    "RayService": "ray.io/v1",
}
REQUIRED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "Service": (("spec", "ports"),),
    "Deployment": (("spec", "selector", "matchLabels"), ("spec", "template", "spec")),
    "StatefulSet": (("spec", "selector", "matchLabels"), ("spec", "serviceName")),
    "DaemonSet": (("spec", "selector", "matchLabels"), ("spec", "template", "spec")),
    "PersistentVolumeClaim": (("spec", "accessModes"), ("spec", "resources", "requests")),
    "PodDisruptionBudget": (("spec", "selector"),),
    "NetworkPolicy": (("spec", "podSelector"),),
    "HorizontalPodAutoscaler": (("spec", "scaleTargetRef"), ("spec", "maxReplicas")),
    "ScaledObject": (("spec", "scaleTargetRef"), ("spec", "triggers")),
    "ServiceMonitor": (("spec", "selector"), ("spec", "endpoints")),
    "PodMonitor": (("spec", "selector"), ("spec", "podMetricsEndpoints")),
    "PrometheusRule": (("spec", "groups"),),
}


def definitions(folder: Path | None) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, version) -> schema, of the definitions in a folder; none if there is no folder.

    Raises ConfigError if a folder that was asked for is not there.
    """
    if folder is None:
        folder = next((Path(one) for one in DEFAULT_FOLDERS if Path(one).is_dir()), None)
        if folder is None:
            return {}
    if not folder.is_dir():
        raise ConfigError(f"--crds {folder}: there is no such folder.", "crds")
    yaml = yaml_module()
    loader = vars(yaml).get("CSafeLoader", yaml.SafeLoader)  # the faster one, if it was built
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(folder.glob("*.yaml")):
        for body in yaml.load_all(file.read_text(encoding="utf-8"), Loader=loader):
            if not isinstance(body, dict) or body.get("kind") != "CustomResourceDefinition":
                continue
            spec = body["spec"]
            for version in spec["versions"]:
                key = (spec["names"]["kind"], f"{spec['group']}/{version['name']}")
                found[key] = version["schema"]["openAPIV3Schema"]
    return found


def rules_for(folder: Path | None) -> tuple[Rule, ...]:
    """The rules, with the definitions of a folder."""
    return (core_schema, partial(custom_schema, definitions(folder)))


def core_schema(sources: Sources) -> Iterator[Finding]:
    """Kind, version, names and the keys that the API server requires."""
    for document in sources.documents:
        yield from _core(document)


def _core(document: Document) -> Iterator[Finding]:
    wanted, said = API_OF.get(document.kind), document.body.get("apiVersion")
    if wanted and said != wanted:
        yield _schema(document, ("apiVersion",), f"{document.kind} of {said}", f"use {wanted}")
    if not document.name:
        yield _schema(document, ("metadata",), "metadata.name is missing", "name the object")
    for path in REQUIRED.get(document.kind, ()):
        if document.get(*path) is None:
            yield _schema(document, path, f"{'.'.join(path)} is missing", "add it")
    labels = document.get("spec", "selector", "matchLabels")
    own = document.get("spec", "template", "metadata", "labels") or {}
    workload = document.kind in ("Deployment", "StatefulSet", "DaemonSet")
    if workload and isinstance(labels, dict) and not labels.items() <= own.items():
        problem = f"selects {labels}, its pods have {own}"
        yield _schema(document, ("spec", "selector"), problem, "let them agree")
    for pod in pods_of(document):
        names = [str(one.get("name", "")) for one in pod.spec.get("volumes") or []]
        for number, container in enumerate(pod.spec.get("containers") or []):
            at: tuple[str | int, ...] = (*pod.path, "containers", number)
            for key in ("name", "image"):
                if not container.get(key):
                    yield _schema(document, at, f"container {number} has no {key}", "add it")
            for mount in container.get("volumeMounts") or []:
                if mount.get("name") not in names:
                    problem = f"mounts a volume {mount.get('name')}, which the pod does not have"
                    yield _schema(document, at, problem, "add it under volumes")


def custom_schema(
    known: Mapping[tuple[str, str], dict[str, Any]], sources: Sources
) -> Iterator[Finding]:
    """Objects of the kinds that definitions are there for, against them."""
    if not known:
        return
    try:
        jsonschema = importlib.import_module("jsonschema")
    except ImportError:
        raise ConfigError(
            "--crds needs the package jsonschema, which is not installed; install "
            "octavo[platform].",
            "crds",
        ) from None
    for document in sources.documents:
        schema = known.get((document.kind, str(document.body.get("apiVersion"))))
        if schema is None:
            continue
        for error in jsonschema.Draft202012Validator(schema).iter_errors(document.body):
            path = tuple(error.absolute_path)
            where = ".".join(map(str, path)) or "the object"
            yield _schema(document, path, f"{where}: {error.message[:200]}", "see its definition")
        yield from _unknown(document, schema, document.body, ())


def _unknown(
    document: Document, schema: Mapping[str, Any], value: Any, at: tuple[str | int, ...]
) -> Iterator[Finding]:
    """Keys that the API server would drop without a word."""
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(value):
            yield from _unknown(document, schema["items"], item, (*at, number))
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, dict):
        return
    if schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema:
        return
    for key, inner in value.items():
        if key in properties:
            yield from _unknown(document, properties[key], inner, (*at, key))
        elif at or key not in ("apiVersion", "kind", "metadata", "spec", "status"):
            if at[:1] == ("metadata",):
                continue
            where = ".".join(map(str, (*at, key)))
            yield _schema(document, (*at, key), f"{where} is no key of it", "it would be dropped")


def _schema(document: Document, path: tuple[str | int, ...], problem: str, remedy: str) -> Finding:
    return Finding("schema", document.file, document.line(*path), problem, remedy)
