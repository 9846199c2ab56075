"""Rules over clusters: what a manifest that the API server accepts still lacks to serve.

Each rule is a function of all that was read. Not for: commands and settings (`rules_commands.py`),
names of metrics (`rules_metrics.py`), schemas (`schema.py`). Next file: `rules_commands.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from octavo.platform.findings import Finding
from octavo.platform.sources import Document, Pod, Sources, gpus_of, pods_of

LAST_WITH_RAY = (0, 17, 1)  # of the stock images vllm/vllm-openai
REQUIRES = "octavo/requires"  # an annotation that says which operators must be there
SERVICE_URL = re.compile(r"https?://([a-z0-9-]+)\.([a-z0-9-]+)\.svc(?:\.[a-z.]+)?(?::(\d+))?")
RAY_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(\d+\.\d+\.\d+)")


def all_pods(sources: Sources) -> list[Pod]:
    """Every pod template."""
    return [pod for document in sources.documents for pod in pods_of(document)]


def ray_objects(sources: Sources) -> list[Document]:
    """RayClusters and RayServices."""
    return list(sources.of("RayCluster", "RayService"))


def _base(document: Document) -> tuple[str, ...]:
    return ("spec",) if document.kind == "RayCluster" else ("spec", "rayClusterConfig")


def nothing_serves(sources: Sources) -> Iterator[Finding]:
    """A Ray cluster alone has no API server in it."""
    for document in sources.of("RayCluster"):
        served = any(
            "serve" in " ".join(map(str, [*_words(container)])) or "api_server" in str(container)
            for pod in pods_of(document)
            for container in pod.spec.get("containers") or []
        )
        if not served and not any(sources.of("RayService", "RayJob")):
            yield Finding(
                "nothing-serves",
                document.file,
                document.line("kind"),
                f"RayCluster {document.name} runs `ray start` and no API server",
                "use a RayService with an import_path, or add a container that serves",
            )


def _words(container: dict[str, Any]) -> list[Any]:
    return [*(container.get("command") or []), *(container.get("args") or [])]


def ray_not_in_image(sources: Sources) -> Iterator[Finding]:
    """Stock images of vLLM have no Ray since 0.17.1."""
    for pod, container, at in _containers(sources):
        name, _, tag = str(container.get("image", "")).partition(":")
        if not pod.ray or name.rpartition("/")[2] != "vllm-openai":
            continue
        version = tuple(int(part) for part in re.findall(r"\d+", tag)[:3])
        if not version or version > LAST_WITH_RAY:
            yield Finding(
                "ray-not-in-image",
                pod.document.file,
                pod.line(*at, "image"),
                f"{container['image']} has no `ray` command: its images lost Ray after v0.17.1",
                "build an image with a pinned Ray in it",
            )


def version_not_pinned(sources: Sources) -> Iterator[Finding]:
    """Images need a version, and rayVersion must be the image's."""
    for pod, container, at in _containers(sources):
        image = str(container.get("image", ""))
        tag = image.rpartition("/")[2].partition(":")[2]
        if "@sha256:" not in image and tag in ("", "latest", "main", "nightly"):
            yield Finding(
                "version-not-pinned",
                pod.document.file,
                pod.line(*at, "image"),
                f"{image} is another image tomorrow",
                "name a version",
            )
    for document in ray_objects(sources):
        said = document.get(*_base(document), "rayVersion")
        for pod in pods_of(document):
            for container in pod.spec.get("containers") or []:
                found = RAY_IMAGE.search(str(container.get("image", "")))
                if found and said and found.group(1) != str(said):
                    yield Finding(
                        "version-not-pinned",
                        document.file,
                        document.line(*_base(document), "rayVersion"),
                        f"rayVersion {said} and an image with Ray {found.group(1)}",
                        "write one version in both",
                    )


def worker_group_bounds(sources: Sources) -> Iterator[Finding]:
    """Left out, minReplicas is 0 and maxReplicas 2147483647."""
    for document, group, at in _groups(sources):
        missing = [key for key in ("minReplicas", "maxReplicas") if key not in group]
        if missing:
            yield Finding(
                "worker-group-bounds",
                document.file,
                document.line(*at),
                f"worker group {group.get('groupName')} has no {' and no '.join(missing)}",
                "say both; the defaults are 0 and 2147483647",
            )


def worker_ray_start_params(sources: Sources) -> Iterator[Finding]:
    """Older operators refuse a group without them, and Ray must know the GPUs."""
    for document, group, at in _groups(sources):
        if not group.get("rayStartParams"):
            yield Finding(
                "worker-ray-start-params",
                document.file,
                document.line(*at),
                f"worker group {group.get('groupName')} has no rayStartParams",
                'write rayStartParams: {num-gpus: "8"}, with its number of GPUs',
            )


def head_num_cpus(sources: Sources) -> Iterator[Finding]:
    """Ray places work on a head that offers CPUs."""
    for document in ray_objects(sources):
        at = (*_base(document), "headGroupSpec", "rayStartParams")
        if str((document.get(*at) or {}).get("num-cpus", "")) != "0":
            yield Finding(
                "head-num-cpus",
                document.file,
                document.line(*at),
                "the head offers its CPUs, so Ray schedules work on a node without a GPU",
                'add num-cpus: "0"',
            )


def gpu_count(sources: Sources) -> Iterator[Finding]:
    """GPUs that are reserved are TP x PP x replicas."""
    settings = sources.settings
    size = _whole(settings, "tensor_parallel_size") * _whole(settings, "pipeline_parallel_size")
    size *= _whole(settings, "data_parallel_size")
    for document in ray_objects(sources):
        pods = [pod for pod in pods_of(document) if pod.gpus]
        reserved = sum(pod.gpus * pod.copies for pod in pods)
        replicas = _replicas(document, settings)
        if pods and reserved != size * replicas:
            yield _miscounted(document, pods[0], reserved, size, replicas)
    for pod in all_pods(sources):
        if pod.ray or not pod.gpus:
            continue
        if size != pod.gpus and "tensor_parallel_size" in settings:
            yield _miscounted(pod.document, pod, pod.gpus, size, 1)


def _miscounted(document: Document, pod: Pod, reserved: int, size: int, replicas: int) -> Finding:
    idle = reserved - size * replicas
    what = f"{idle} stand idle" if idle > 0 else f"{-idle} are missing"
    return Finding(
        "gpu-count",
        document.file,
        pod.line("containers", 0, "resources"),
        f"{reserved} GPUs are reserved, and TP x PP x replicas is {size} x {replicas}: {what}",
        "let the two be equal: change the group's replicas, add pipeline stages, or more replicas",
    )


def _whole(settings: dict[str, Any], name: str) -> int:
    value = settings.get(name, 1)
    return value if isinstance(value, int) and value > 0 else 1


def _replicas(document: Document, settings: dict[str, Any]) -> int:
    if document.kind != "RayService":
        return 1
    scaling = settings.get("autoscaling") or {}
    own = settings.get("deployment") or {}
    return int(scaling.get("min_replicas", own.get("num_replicas", 1)))


def worker_resources(sources: Sources) -> Iterator[Finding]:
    """A pod with GPUs and no CPU or memory gets whatever is left."""
    for pod, container, at in _containers(sources):
        if not gpus_of(container):
            continue
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        missing = [key for key in ("cpu", "memory") if key not in limits or key not in requests]
        if missing:
            yield Finding(
                "worker-resources",
                pod.document.file,
                pod.line(*at, "resources"),
                f"container {container.get('name')} has GPUs and no {' and no '.join(missing)}",
                "give requests equal to limits",
            )


def shared_memory(sources: Sources) -> Iterator[Finding]:
    """Several processes of a pod share memory, more than the 64 MiB that there are."""
    for pod, container, at in _containers(sources):
        if not gpus_of(container):
            continue
        mounts = {one.get("mountPath"): one.get("name") for one in _list(container, "volumeMounts")}
        volumes = {one.get("name"): one for one in _list(pod.spec, "volumes")}
        volume = (volumes.get(mounts.get("/dev/shm")) or {}).get("emptyDir") or {}
        if volume.get("medium") != "Memory" or "sizeLimit" not in volume:
            yield Finding(
                "shared-memory",
                pod.document.file,
                pod.line(*at),
                f"container {container.get('name')} has no /dev/shm of a stated size",
                "mount an emptyDir of medium Memory with a sizeLimit there",
            )


def service_unreachable(sources: Sources) -> Iterator[Finding]:
    """Names that commands call must be Services, and their ports a container's."""
    services = list(sources.of("Service"))
    known = {(one.name, one.namespace or "default") for one in services}
    made = {f"{one.name}-serve-svc" for one in sources.of("RayService")}
    for text in sources.texts:
        for match in SERVICE_URL.finditer(text.text):
            name, namespace, _ = match.groups()
            if not sources.documents or name in made or (name, namespace) in known:
                continue
            if "prometheus" in name or name.startswith("octavo-example"):
                continue
            yield Finding(
                "service-unreachable",
                text.file,
                text.line_of(match.start()),
                f"{match.group(0)} is called, and no Service {name} is in a namespace {namespace}",
                "add the namespace, and a Service of that name with a named port",
            )
    pods = all_pods(sources)
    for service in services:
        yield from _ports(service, pods)


def _ports(service: Document, pods: list[Pod]) -> Iterator[Finding]:
    selector = service.get("spec", "selector") or {}
    chosen = [pod for pod in pods if selector and selector.items() <= dict(pod.labels).items()]
    if "ray.io/cluster" in selector or "ray.io/serve" in selector:
        chosen = [pod for pod in pods if pod.ray]
    if selector and not chosen:
        yield Finding(
            "service-unreachable",
            service.file,
            service.line("spec", "selector"),
            f"Service {service.name} selects {selector}, and no pod has these labels",
            "let its selector and the pods' labels be the same",
        )
        return
    offered: set[Any] = set()
    for pod in chosen:
        for container in pod.spec.get("containers") or []:
            for port in _list(container, "ports"):
                offered |= {port.get("containerPort"), port.get("name")}
    for number, port in enumerate(service.get("spec", "ports") or []):
        target = port.get("targetPort", port.get("port"))
        if chosen and target not in offered:
            yield Finding(
                "service-unreachable",
                service.file,
                service.line("spec", "ports", number),
                f"Service {service.name} sends to port {target}, which no container of its has",
                "let targetPort be the name of a container's port",
            )


def gpu_placement(sources: Sources) -> Iterator[Finding]:
    """Pods with GPUs go to nodes that have them, which are tainted as a rule."""
    for pod in all_pods(sources):
        if not pod.gpus:
            continue
        keys = ("tolerations", "nodeSelector", "affinity")
        missing = [key for key in keys[:2] if not pod.spec.get(key)]
        if missing == ["nodeSelector"] and pod.spec.get("affinity"):
            missing = []
        if missing:
            yield Finding(
                "gpu-placement",
                pod.document.file,
                pod.line(),
                f"pods of {pod.document.name} have GPUs and no {' and no '.join(missing)}",
                "tolerate nvidia.com/gpu, and select the nodes by their product",
            )


def weights_volume(sources: Sources) -> Iterator[Finding]:
    """Without a volume every start downloads the weights again."""
    for pod in all_pods(sources):
        if not pod.gpus:
            continue
        volumes = _list(pod.spec, "volumes")
        kept = any(
            key in one for one in volumes for key in ("persistentVolumeClaim", "hostPath", "nfs")
        )
        env = {
            one.get("name") for box in _list(pod.spec, "containers") for one in _list(box, "env")
        }
        missing = [] if kept else ["volume for the weights"]
        missing += [name for name in ("HF_TOKEN", "HF_HOME") if name not in env]
        if missing:
            yield Finding(
                "weights-volume",
                pod.document.file,
                pod.line("containers", 0),
                f"pods of {pod.document.name} have no {', no '.join(missing)}",
                "mount a claim at HF_HOME, and take HF_TOKEN from a Secret",
            )


def probes_and_drain(sources: Sources) -> Iterator[Finding]:
    """Traffic waits until the model is loaded, and requests are ended before the pod is."""
    for pod in all_pods(sources):
        containers = _list(pod.spec, "containers")
        if not pod.gpus and not any("http" in str(_list(one, "ports")) for one in containers):
            continue
        missing = [] if "terminationGracePeriodSeconds" in pod.spec else ["grace period"]
        hooks = any((one.get("lifecycle") or {}).get("preStop") for one in containers)
        missing += [] if hooks else ["preStop"]
        service = pod.document.kind == "RayService"  # the operator probes its applications
        for key in ("startupProbe", "readinessProbe"):
            if not service and not any(key in one for one in containers):
                missing.append(key)
        if missing and pod.role != "head":
            yield Finding(
                "probes-and-drain",
                pod.document.file,
                pod.line("containers", 0),
                f"pods of {pod.document.name} have no {', no '.join(missing)}",
                "probe /health/ready for longer than a load takes, and wait for the drain",
            )


def collective_network(sources: Sources) -> Iterator[Finding]:
    """NCCL guesses an interface, and hangs if it guesses wrong."""
    for pod, container, at in _containers(sources):
        if not pod.ray or not gpus_of(container):
            continue
        names = {str(one.get("name")) for one in _list(container, "env")}
        image = str(container.get("image", ""))
        needed = {"NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"} if "vllm" in image else _INTERFACE
        missing = sorted(needed - names)
        if missing:
            yield Finding(
                "collective-network",
                pod.document.file,
                pod.line(*at),
                f"container {container.get('name')} does not say which address and interface "
                f"its ranks use: no {', no '.join(missing)}",
                "set NCCL_SOCKET_IFNAME, and for vLLM VLLM_HOST_IP from status.podIP",
            )


_INTERFACE = {"NCCL_SOCKET_IFNAME"}


def dashboard_open(sources: Sources) -> Iterator[Finding]:
    """Whoever reaches Ray's dashboard can run code."""
    guarded = any(sources.of("NetworkPolicy"))
    for document in ray_objects(sources):
        at = (*_base(document), "headGroupSpec", "rayStartParams")
        host = str((document.get(*at) or {}).get("dashboard-host", ""))
        if host == "0.0.0.0" and not guarded and not document.get(*_base(document), "authOptions"):
            yield Finding(
                "dashboard-open",
                document.file,
                document.line(*at, "dashboard-host"),
                "the dashboard listens on all interfaces without a key: whoever reaches it runs "
                "code",
                "add a NetworkPolicy or authOptions",
            )


def availability(sources: Sources) -> Iterator[Finding]:
    """A restart of one pod must not end the service, and pods have no more rights than needed."""
    budgets = [
        one.get("spec", "selector", "matchLabels") or {}
        for one in sources.of("PodDisruptionBudget")
    ]
    for document in sources.documents:
        pods = [pod for pod in pods_of(document) if pod.gpus or pod.ray]
        if not pods:
            continue
        labels = dict(pods[0].labels)
        kept = any(one.items() <= labels.items() for one in budgets)
        missing = [] if kept else ["PodDisruptionBudget"]
        if not all(_secure(pod) for pod in pods):
            missing.append("securityContext that forbids root")
        if document.kind == "RayCluster" and not document.get("spec", "gcsFaultToleranceOptions"):
            missing.append("fault tolerance of the head's state (GCS)")
        if missing:
            yield Finding(
                "availability",
                document.file,
                document.line("spec"),
                f"{document.kind} {document.name} has no {', no '.join(missing)}",
                "add them; gcsFaultToleranceOptions needs a Redis",
            )


def _secure(pod: Pod) -> bool:
    context = pod.spec.get("securityContext") or {}
    return bool(context.get("runAsNonRoot")) or all(
        (one.get("securityContext") or {}).get("runAsNonRoot")
        for one in pod.spec.get("containers") or []
    )


def operator_not_installed(sources: Sources) -> Iterator[Finding]:
    """A custom resource does nothing without its operator."""
    defined = {
        str(one.get("spec", "names", "kind")) for one in sources.of("CustomResourceDefinition")
    }
    for document in ray_objects(sources):
        said = (document.get("metadata", "annotations") or {}).get(REQUIRES, "")
        if document.kind not in defined and "kuberay" not in str(said):
            yield Finding(
                "operator-not-installed",
                document.file,
                document.line("kind"),
                f"{document.kind} is a custom resource, no DaemonSet: it needs the KubeRay "
                "operator and its definitions first, and nothing here installs them",
                f"install the operator's chart before, and say so: annotation {REQUIRES}: kuberay",
            )


def nothing_scraped(sources: Sources) -> Iterator[Finding]:
    """Metrics that nobody scrapes."""
    engines = [one for one in sources.documents if any(pod.gpus for pod in pods_of(one))]
    if engines and not any(sources.of("ServiceMonitor", "PodMonitor")):
        first = engines[0]
        yield Finding(
            "nothing-scraped",
            first.file,
            first.line("kind"),
            "no ServiceMonitor or PodMonitor: Prometheus scrapes neither the engine (8000) nor "
            "Ray (8080)",
            "add one for each",
        )


def _containers(sources: Sources) -> Iterator[tuple[Pod, dict[str, Any], tuple[str | int, ...]]]:
    for pod in all_pods(sources):
        for number, container in enumerate(pod.spec.get("containers") or []):
            yield pod, container, ("containers", number)


def _groups(sources: Sources) -> Iterator[tuple[Document, dict[str, Any], tuple[str | int, ...]]]:
    for document in ray_objects(sources):
        base = _base(document)
        for number, group in enumerate(document.get(*base, "workerGroupSpecs") or []):
            yield document, group, (*base, "workerGroupSpecs", number)


def _list(tree: dict[str, Any], key: str) -> list[Any]:
    value = tree.get(key)
    return value if isinstance(value, list) else []


RULES = (
    *(nothing_serves, ray_not_in_image, version_not_pinned, worker_group_bounds),
    *(worker_ray_start_params, head_num_cpus, gpu_count, worker_resources, shared_memory),
    *(service_unreachable, gpu_placement, weights_volume, probes_and_drain, collective_network),
    *(dashboard_open, availability, operator_not_installed, nothing_scraped),
)
