"""The gateway in the cluster: LiteLLM's settings, Deployment, Service, budget, policy.

Not for: LiteLLM's settings themselves (`litellm.py`). Next file: `monitoring.py`.
"""

from __future__ import annotations

from octavo.platform import pods
from octavo.platform.litellm import KEY, config_of
from octavo.platform.pods import Tree, labels, meta
from octavo.platform.spec import Spec
from octavo.platform.yaml_text import as_yaml

PORT = 4000


def gateway(spec: Spec, urls: list[str]) -> list[Tree]:
    """Its objects; none if the spec has no gateway."""
    if not spec.gateway.enabled:
        return []
    name = f"{spec.name}-gateway"
    mine = labels(spec, "gateway")
    config: Tree = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": meta(spec, name, "gateway"),
        "data": {"config.yaml": as_yaml(config_of(spec, urls))},
    }
    deployment: Tree = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": meta(spec, name, "gateway"),
        "spec": {
            "replicas": spec.gateway.replicas,
            "selector": {"matchLabels": mine},
            "template": {"metadata": {"labels": mine}, "spec": _pod(spec, name)},
        },
    }
    service: Tree = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta(spec, name, "gateway"),
        "spec": {
            "selector": mine,
            "ports": [{"name": "http", "port": PORT, "targetPort": "http"}],
        },
    }
    budget: Tree = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": meta(spec, name, "gateway"),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": mine}},
    }
    return [config, deployment, service, budget]


def _pod(spec: Spec, name: str) -> Tree:
    gateway = spec.gateway
    amounts = {"cpu": "2", "memory": "4Gi"}
    env = [
        pods.secret_env(gateway.master_key_env, spec.secrets.gateway, "key"),
        pods.secret_env(KEY, spec.secrets.engine, "key"),
        {"name": "LITELLM_LOCAL_MODEL_COST_MAP", "value": "True"},
    ]
    if gateway.redis_host:
        env.append(pods.secret_env("REDIS_PASSWORD", spec.secrets.redis or "redis", "password"))
    every: Tree = {"periodSeconds": 5, "timeoutSeconds": 5}
    ready = {"httpGet": {"path": "/health/readiness", "port": "http"}, **every}
    live = {"httpGet": {"path": "/health/liveliness", "port": "http"}, **every}
    container: Tree = {
        "name": "gateway",
        "image": f"{gateway.image}:v{gateway.version}",
        "args": ["--config", "/etc/litellm/config.yaml", "--port", str(PORT)],
        "ports": [{"containerPort": PORT, "name": "http"}],
        "env": env,
        "resources": {"requests": dict(amounts), "limits": amounts},
        "securityContext": pods.own_rights(),
        "startupProbe": {**ready, "failureThreshold": 24},
        "readinessProbe": ready,
        "livenessProbe": {**live, "failureThreshold": 6},
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "10"]}}},
        "volumeMounts": [{"name": "config", "mountPath": "/etc/litellm", "readOnly": True}],
    }
    return {
        "terminationGracePeriodSeconds": spec.drain.seconds + 30,
        "automountServiceAccountToken": False,
        "securityContext": pods.rights(),
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": name}}],
    }
