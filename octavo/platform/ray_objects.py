"""RayService and RayCluster: a replica over the GPUs of one or several nodes.

Not for: a replica in one pod, which is a Deployment (`manifests.py`). Next file:
`gateway_objects.py`.
"""

from __future__ import annotations

from typing import Any

from octavo.platform import pods
from octavo.platform.pods import Tree, labels, meta
from octavo.platform.rules_cluster import REQUIRES
from octavo.platform.sizes import PRE_STOP, Sizes
from octavo.platform.spec import Spec
from octavo.platform.yaml_text import as_yaml

PORTS = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "http": 8000}
NEEDED = "kuberay-operator >= 1.4, with the RayCluster and RayService definitions"


def ray_service(spec: Spec, sizes: Sizes) -> Tree:
    """The application `octavo.serve:build_app`, or Ray's own for vLLM, on a cluster of its own."""
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": _meta(spec),
        "spec": {
            "upgradeStrategy": {"type": "NewCluster"},
            "serveConfigV2": as_yaml(serve_config(spec)),
            "rayClusterConfig": _cluster(spec, sizes),
        },
    }


def ray_cluster(spec: Spec, sizes: Sizes) -> Tree:
    """A cluster with an API server beside its head, whose workers are the cluster's actors."""
    body = _cluster(spec, sizes)
    head = body["headGroupSpec"]["template"]["spec"]
    server: Tree = {
        "name": "api",
        "image": spec.image,
        "command": _server_words(spec),
        "ports": [{"containerPort": 8000, "name": "http"}],
        "env": pods.engine_env(spec),
        "resources": {
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"cpu": "4", "memory": "16Gi"},
        },
        "securityContext": pods.own_rights(),
        "volumeMounts": pods.mounts(config=True),
        **pods.probes(spec, sizes),
    }
    head["containers"][0]["ports"] = [
        port for port in head["containers"][0]["ports"] if port["name"] != "http"
    ]
    head["containers"].append(server)
    head["volumes"] = pods.volumes(spec, config=True)
    head["terminationGracePeriodSeconds"] = sizes.grace_seconds
    for group in body["workerGroupSpecs"]:  # the server beside the head is what is probed
        ready: Tree = {"exec": {"command": ["ray", "health-check"]}, "timeoutSeconds": 10}
        worker = group["template"]["spec"]["containers"][0]
        worker["startupProbe"] = {**ready, "periodSeconds": 10, "failureThreshold": 30}
        worker["readinessProbe"] = {**ready, "periodSeconds": 10, "failureThreshold": 6}
    if spec.ray.redis_address:
        body["gcsFaultToleranceOptions"] = _kept_state(spec)
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": _meta(spec),
        "spec": body,
    }


def _server_words(spec: Spec) -> list[str]:
    """Of the server beside the head."""
    from octavo.platform.manifests import command

    if spec.engine.kind == "octavo":
        more = ["--ray-address", "127.0.0.1:6379", "--distributed-executor-backend", "ray"]
    else:
        more = ["--distributed-executor-backend", "ray"]
    made = command(spec)
    return [*made["command"], *made.get("args", []), *more]


def _meta(spec: Spec) -> Tree:
    return meta(spec, spec.name, "engine", annotations={REQUIRES: NEEDED})


def serve_config(spec: Spec) -> Tree:
    """What Serve runs: one application at /."""
    replicas = spec.engine.replicas
    scaled = spec.autoscale.kind != "none"
    if spec.engine.kind == "vllm":
        return {"applications": [_vllm_application(spec)]}
    drain = {"graceful_shutdown_timeout_s": spec.drain.seconds + 10}
    counted: Tree = {"deployment": {"num_replicas": replicas, **drain}}
    if scaled:
        low, high = spec.autoscale.minimum, spec.autoscale.maximum
        bounds = {"min_replicas": low, "max_replicas": high}
        counted = {"autoscaling": bounds, "deployment": drain}
    args: Tree = {
        "model": spec.model.name,
        "served_model_name": [spec.served_name],
        "shutdown_timeout": spec.drain.seconds,
        **spec.engine.options,
        **counted,
    }
    application: Tree = {
        "name": spec.name,
        "import_path": "octavo.serve:build_app",
        "route_prefix": "/",
        "args": args,
    }
    return {"applications": [application], "http_options": {"host": "0.0.0.0", "port": 8000}}


def _vllm_application(spec: Spec) -> Tree:
    """Ray's own application around vLLM."""
    low = spec.autoscale.minimum if spec.autoscale.kind != "none" else spec.engine.replicas
    high = spec.autoscale.maximum if spec.autoscale.kind != "none" else spec.engine.replicas
    config: Tree = {
        "model_loading_config": {
            "model_id": spec.served_name,
            "model_source": spec.model.name,
        },
        "engine_kwargs": dict(spec.engine.options),
        "deployment_config": {"autoscaling_config": {"min_replicas": low, "max_replicas": high}},
    }
    return {
        "name": spec.name,
        "import_path": "ray.serve.llm:build_openai_app",
        "route_prefix": "/",
        "args": {"llm_configs": [config]},
    }


def _cluster(spec: Spec, sizes: Sizes) -> Tree:
    scaled = spec.autoscale.kind != "none"
    copies = spec.autoscale.minimum if scaled else spec.engine.replicas
    most = spec.autoscale.maximum if scaled else spec.engine.replicas
    body: Tree = {
        "rayVersion": spec.ray.version,
        "enableInTreeAutoscaling": scaled,
        "headGroupSpec": _head(spec),
        "workerGroupSpecs": [
            {
                "groupName": "gpu-workers" if spec.gpu.kind else "cpu-workers",
                "replicas": spec.nodes * copies,
                "minReplicas": spec.nodes * copies,
                "maxReplicas": spec.nodes * most,
                "rayStartParams": _start_params(spec),
                "template": _worker(spec, sizes),
            }
        ],
    }
    if spec.ray.redis_address and spec.engine.mode == "rayservice":
        body["gcsFaultToleranceOptions"] = _kept_state(spec)
    return body


def _kept_state(spec: Spec) -> Tree:
    found: Tree = {"redisAddress": f"redis://{spec.ray.redis_address}"}
    if spec.secrets.redis:
        secret = {"secretKeyRef": {"name": spec.secrets.redis, "key": "password"}}
        found["redisPassword"] = {"valueFrom": secret}
    return found


def _start_params(spec: Spec) -> Tree:
    gpus = _gpus_of_a_pod(spec)
    return {"num-gpus": str(gpus)} if gpus else {"num-cpus": str(spec.engine.cpu)}


def _gpus_of_a_pod(spec: Spec) -> int:
    return min(spec.gpus, spec.gpu.per_node)


def _head(spec: Spec) -> Tree:
    amounts = {"cpu": str(spec.ray.head_cpu), "memory": spec.ray.head_memory}
    container: Tree = {
        "name": "ray-head",
        "image": spec.image,
        "ports": [{"containerPort": port, "name": name} for name, port in PORTS.items()],
        "env": pods.engine_env(spec),
        "resources": {"requests": dict(amounts), "limits": amounts},
        "securityContext": pods.own_rights(),
        "volumeMounts": pods.mounts(config=False),
    }
    return {
        "serviceType": "ClusterIP",
        "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
        "template": _template(spec, container, {}),
    }


def _worker(spec: Spec, sizes: Sizes) -> Tree:
    container: Tree = {
        "name": "ray-worker",
        "image": spec.image,
        "ports": [
            {"containerPort": PORTS["metrics"], "name": "metrics"},
            {"containerPort": PORTS["http"], "name": "http"},
        ],
        "env": pods.engine_env(spec),
        "resources": pods.resources(spec, _gpus_of_a_pod(spec)),
        "securityContext": pods.own_rights(),
        "volumeMounts": pods.mounts(config=False),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP)]}}},
    }
    more: dict[str, Any] = {
        "terminationGracePeriodSeconds": sizes.grace_seconds,
        **pods.placement(spec),
    }
    return _template(spec, container, more)


def _template(spec: Spec, container: Tree, more: Tree) -> Tree:
    return {
        "metadata": {"labels": labels(spec, "engine")},
        "spec": {
            **more,
            "securityContext": pods.rights(),
            "containers": [container],
            "volumes": pods.volumes(spec, config=False),
        },
    }
