"""Objects of a deployment: namespace, settings, claim, engine, Services, budgets, scaling.

Not for: the gateway (`gateway_objects.py`), monitoring (`monitoring.py`), writing files
(`render.py`). Next file: `ray_objects.py`.
"""

from __future__ import annotations

import json
from typing import Any

from octavo.fields import flag_of
from octavo.platform import pods
from octavo.platform.pods import CONFIG, Tree, labels, meta
from octavo.platform.ray_objects import ray_cluster, ray_service
from octavo.platform.sizes import Sizes
from octavo.platform.spec import Spec

OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}


def replica_names(spec: Spec) -> list[str]:
    """Deployments: one a replica, so that the gateway knows each, unless a scaler counts them."""
    if spec.autoscale.kind != "none" or spec.engine.replicas == 1:
        return [spec.name]
    return [f"{spec.name}-{number}" for number in range(spec.engine.replicas)]


def engine_urls(spec: Spec) -> list[str]:
    """Addresses of the engine's replicas within the cluster."""
    if spec.engine.mode != "deployment" or len(replica_names(spec)) == 1:
        return [f"http://{spec.service.name}.{spec.namespace}.svc:{spec.service.port}/v1"]
    return [
        f"http://{name}.{spec.namespace}.svc:{spec.service.port}/v1" for name in replica_names(spec)
    ]


def namespace(spec: Spec) -> list[Tree]:
    """The namespace, under the stricter of the two usual standards."""
    standard = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": spec.namespace, "labels": standard},
        }
    ]


def storage(spec: Spec, size: str) -> list[Tree]:
    """The claim for weights and compiled kernels, shared by all pods."""
    wanted: Tree = {
        "accessModes": [spec.storage.access_mode],
        "resources": {"requests": {"storage": spec.storage.size or size}},
    }
    if spec.storage.storage_class:
        wanted["storageClassName"] = spec.storage.storage_class
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": meta(spec, f"{spec.name}-models", "engine"),
            "spec": wanted,
        }
    ]


def settings_of(spec: Spec) -> Tree:
    """The file that `octavo serve --config` reads."""
    return {
        "model": spec.model.name,
        "served_model_name": [spec.served_name],
        "port": 8000,
        "shutdown_timeout": spec.drain.seconds,
        **spec.engine.options,
    }


def settings(spec: Spec) -> list[Tree]:
    """The ConfigMap of the engine's options."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta(spec, f"{spec.name}-engine", "engine"),
            "data": {"engine.json": json.dumps(settings_of(spec), indent=2) + "\n"},
        }
    ]


def engine(spec: Spec, sizes: Sizes) -> list[Tree]:
    """What serves: Deployments, a RayService, or a RayCluster; and the Service before it."""
    if spec.engine.mode == "rayservice":
        return [ray_service(spec, sizes), _service(spec, spec.service.name, _ray_selector(spec))]
    if spec.engine.mode == "raycluster":
        head = {**_ray_selector(spec), "ray.io/node-type": "head"}
        return [ray_cluster(spec, sizes), _service(spec, spec.service.name, head)]
    names = replica_names(spec)
    found = [deployment(spec, sizes, name) for name in names]
    if len(names) > 1:
        found += [_service(spec, name, labels(spec, "engine", name)) for name in names]
    return [*found, _service(spec, spec.service.name, labels(spec, "engine"))]


def _ray_selector(spec: Spec) -> Tree:
    """KubeRay marks the pods in which Serve takes requests; a cluster's head has the other mark."""
    if spec.engine.mode == "rayservice":
        return {"ray.io/serve": "true", **labels(spec, "engine")}
    return labels(spec, "engine")


def _service(spec: Spec, name: str, selector: Tree) -> Tree:
    port = {"name": "http", "port": spec.service.port, "targetPort": "http"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(spec, name, "engine"),
        "spec": {"selector": selector, "ports": [port]},
    }


def deployment(spec: Spec, sizes: Sizes, name: str) -> Tree:
    """One Deployment; with GPUs a new pod waits for the old one's."""
    copy = name if len(replica_names(spec)) > 1 else ""
    mine = labels(spec, "engine", copy)
    scaled = spec.autoscale.kind != "none"
    surge = {"maxSurge": 0, "maxUnavailable": 1} if spec.gpu.kind else {"maxUnavailable": 0}
    body: Tree = {
        "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
        "selector": {"matchLabels": mine},
        "template": {"metadata": {"labels": mine}, "spec": _pod(spec, sizes)},
    }
    if not scaled:  # the scaler's number must not be undone by an update
        body = {"replicas": 1, **body}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta(spec, name, "engine"),
        "spec": body,
    }


def _pod(spec: Spec, sizes: Sizes) -> Tree:
    container: Tree = {
        "name": "engine",
        "image": spec.image,
        "imagePullPolicy": "IfNotPresent",
        **command(spec),
        "ports": [{"containerPort": 8000, "name": "http"}],
        "env": pods.engine_env(spec),
        "resources": pods.resources(spec, spec.gpus),
        "securityContext": pods.own_rights(),
        "volumeMounts": pods.mounts(config=True),
        **pods.probes(spec, sizes),
    }
    return {
        "terminationGracePeriodSeconds": sizes.grace_seconds,
        "automountServiceAccountToken": False,
        "securityContext": pods.rights(),
        **pods.placement(spec),
        "containers": [container],
        "volumes": pods.volumes(spec, config=True),
    }


def command(spec: Spec) -> Tree:
    """Of the container that serves."""
    if spec.engine.kind == "octavo":
        return {"command": ["octavo", "serve", "--config", f"{CONFIG}/engine.json"]}
    words = ["--served-model-name", spec.served_name, "--port", "8000"]
    for name, value in spec.engine.options.items():
        words += _flag(name, value)
    return {"command": ["vllm", "serve", spec.model.name], "args": words}


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag_of(name) if value else flag_of(f"no_{name}")]
    if isinstance(value, dict | list):
        return [flag_of(name), json.dumps(value)]
    return [flag_of(name), str(value)]


def protection(spec: Spec) -> list[Tree]:
    """Budgets against evictions, and who may talk to whom."""
    budget: Tree = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(spec, f"{spec.name}-engine", "engine"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels(spec, "engine")}},
    }
    return [budget, engine_policy(spec)]


def engine_policy(spec: Spec) -> Tree:
    """Only the gateway, named namespaces and Prometheus reach the engine; Ray's pods each other."""
    callers: list[Tree] = [{"podSelector": {"matchLabels": labels(spec, "gateway")}}]
    for name in (*spec.service.clients, spec.monitoring.namespace):
        callers.append({"namespaceSelector": {"matchLabels": {NAMESPACE: name}}})
    rules: list[Tree] = [{"from": callers, "ports": [{"port": "http"}]}]
    if spec.engine.mode != "deployment":
        everywhere: Tree = {"namespaceSelector": {}, "podSelector": {"matchLabels": OPERATOR}}
        prometheus = {"namespaceSelector": {"matchLabels": {NAMESPACE: spec.monitoring.namespace}}}
        rules += [
            {"from": [{"podSelector": {"matchLabels": labels(spec, "engine")}}]},
            {"from": [everywhere], "ports": [{"port": 8265}, {"port": 8000}]},
            {"from": [prometheus], "ports": [{"port": "metrics"}]},
        ]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": meta(spec, f"{spec.name}-engine", "engine"),
        "spec": {
            "podSelector": {"matchLabels": labels(spec, "engine")},
            "policyTypes": ["Ingress"],
            "ingress": rules,
        },
    }


NAMESPACE = "kubernetes.io/metadata.name"


def scaling(spec: Spec) -> list[Tree]:
    """By the depth of the queue; of a RayService, Serve scales itself."""
    kind = spec.autoscale.kind
    if kind == "none" or spec.engine.mode != "deployment":
        return []
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": spec.name}
    bounds: Tree = {"min": spec.autoscale.minimum, "max": spec.autoscale.maximum}
    if kind == "hpa":
        metric = {"name": "vllm_num_requests_waiting"}
        aim = {"type": "AverageValue", "averageValue": str(spec.autoscale.waiting)}
        body: Tree = {
            "scaleTargetRef": target,
            "minReplicas": bounds["min"],
            "maxReplicas": bounds["max"],
            "metrics": [{"type": "Pods", "pods": {"metric": metric, "target": aim}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 600}},
        }
        return [_scaler(spec, "autoscaling/v2", "HorizontalPodAutoscaler", body)]
    query = f'sum(vllm:num_requests_waiting{{namespace="{spec.namespace}"}})'
    trigger: Tree = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": spec.autoscale.prometheus,
            "query": query,
            "threshold": str(spec.autoscale.waiting),
        },
    }
    body = {
        "scaleTargetRef": {"name": spec.name},
        "minReplicaCount": bounds["min"],
        "maxReplicaCount": bounds["max"],
        "cooldownPeriod": 600,
        "triggers": [trigger],
    }
    return [_scaler(spec, "keda.sh/v1alpha1", "ScaledObject", body)]


def _scaler(spec: Spec, version: str, kind: str, body: Tree) -> Tree:
    metadata = meta(spec, f"{spec.name}-engine", "engine")
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": body}
