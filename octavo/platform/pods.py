"""Parts of pods: containers, probes, volumes, rights. Not for: whole objects (`manifests.py`)."""

from __future__ import annotations

from typing import Any

from octavo.plan.gpus import gpu_named
from octavo.platform.sizes import PERIOD, PRE_STOP, Sizes
from octavo.platform.spec import Spec

USER = 10001
MODELS = "/models"  # the claim: weights, compiled kernels
CONFIG = "/etc/octavo"
Tree = dict[str, Any]


def labels(spec: Spec, part: str, copy: str = "") -> Tree:
    """Of an object and its pods; `copy` tells apart replicas with an address of their own."""
    found = {
        "app.kubernetes.io/name": "octavo",
        "app.kubernetes.io/instance": spec.name,
        "app.kubernetes.io/component": part,
    }
    return found | ({"octavo/replica": copy} if copy else {})


def meta(spec: Spec, name: str, part: str, **more: Any) -> Tree:
    """Metadata of an object in the spec's namespace."""
    return {"name": name, "namespace": spec.namespace, "labels": labels(spec, part), **more}


def rights() -> Tree:
    """A pod's security context: no root, files of the claim are its group's."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def own_rights() -> Tree:
    """A container's."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def resources(spec: Spec, gpus: int) -> Tree:
    """Requests equal to limits, so that the pod is the last to be evicted."""
    amounts: Tree = {"cpu": str(spec.engine.cpu), "memory": spec.engine.memory}
    if gpus:
        amounts["nvidia.com/gpu"] = str(gpus)
    return {"requests": dict(amounts), "limits": amounts}


def secret_env(name: str, secret: str, key: str, *, optional: bool = False) -> Tree:
    """A variable out of a Secret."""
    ref: Tree = {"name": secret, "key": key}
    return {
        "name": name,
        "valueFrom": {"secretKeyRef": ref | ({"optional": True} if optional else {})},
    }


def engine_env(spec: Spec) -> list[Tree]:
    """Variables of a container that runs an engine."""
    vllm = spec.engine.kind == "vllm"
    found: list[Tree] = [
        {"name": "HOME", "value": MODELS},
        {"name": "HF_HOME", "value": f"{MODELS}/hub"},
        secret_env("HF_TOKEN", spec.secrets.hub, "token", optional=True),
        secret_env("VLLM_API_KEY" if vllm else "OCTAVO_API_KEY", spec.secrets.engine, "key"),
        {"name": "VLLM_CACHE_ROOT" if vllm else "OCTAVO_CACHE_DIR", "value": f"{MODELS}/cache"},
    ]
    if vllm:
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        found.append({"name": "VLLM_HOST_IP", "valueFrom": address})
    if spec.gpu.kind:
        found.append({"name": "NCCL_SOCKET_IFNAME", "value": spec.gpu.network_interface})
        found.append({"name": "NCCL_DEBUG", "value": "WARN"})
    return found


def mounts(*, config: bool) -> list[Tree]:
    """Where volumes appear in a container that runs an engine."""
    found = [
        {"name": "models", "mountPath": MODELS},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    more = [{"name": "config", "mountPath": CONFIG, "readOnly": True}]
    return found + (more if config else [])


def volumes(spec: Spec, *, config: bool) -> list[Tree]:
    """The claim, shared memory of a stated size, and settings."""
    found: list[Tree] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": f"{spec.name}-models"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.engine.shm}},
    ]
    more: list[Tree] = [{"name": "config", "configMap": {"name": f"{spec.name}-engine"}}]
    return found + (more if config else [])


def placement(spec: Spec) -> Tree:
    """Nodes with the GPUs, which are tainted as a rule."""
    if not spec.gpu.kind:
        return {}
    product = {"nvidia.com/gpu.product": gpu_named(spec.gpu.kind).product}
    found: Tree = {
        "nodeSelector": spec.gpu.node_selector or product,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    return found | ({"runtimeClassName": spec.gpu.runtime_class} if spec.gpu.runtime_class else {})


def probes(spec: Spec, sizes: Sizes) -> Tree:
    """A start may last as a load does; then readiness follows the queue, liveness the process."""
    ours = spec.engine.kind == "octavo"
    ready = {"httpGet": {"path": "/health/ready" if ours else "/health", "port": "http"}}
    live = {"httpGet": {"path": "/health/live" if ours else "/health", "port": "http"}}
    every: Tree = {"periodSeconds": PERIOD, "timeoutSeconds": 5}
    return {
        "startupProbe": {**ready, **every, "failureThreshold": sizes.startup_failures},
        "readinessProbe": {**ready, **every, "periodSeconds": 5, "failureThreshold": 2},
        "livenessProbe": {**live, **every, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP)]}}},
    }
