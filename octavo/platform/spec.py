"""The spec: one TOML file that says what is deployed where. Checked as it is read.

Every key is a field of a record below, so there is one list of them; an error names the file, the
line, the rule and the remedy. Not for: manifests (`manifests.py`), settings of LiteLLM
(`litellm.py`). Next file: `sizes.py`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from octavo import __version__
from octavo.errors import ConfigError
from octavo.fields import options_of, problem_of, unknown_name
from octavo.options import EngineArgs, ServerArgs

ENGINES = ("octavo", "vllm")
MODES = ("deployment", "rayservice", "raycluster")
SCALERS = ("none", "hpa", "keda")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
RAY_VERSION = "2.60.0"
LITELLM_VERSION = "1.110.2"
# Options that manifests set by themselves.
OWN_OPTIONS = ("model", "host", "port", "uds", "api_key", "served_model_name", "ray_address")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ModelPart:
    """`[model]`"""

    name: str
    served_name: str = ""  # what clients ask for; the name's last part if left out


@dataclass(frozen=True, slots=True)
class EnginePart:
    """`[engine]`; `options` are the engine's and server's own, by name."""

    kind: str = "octavo"
    mode: str = "deployment"
    image: str = ""
    version: str = ""
    replicas: int = 1
    cpu: int = 8  # of each pod
    memory: str = "64Gi"
    shm: str = "16Gi"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GpuPart:
    """`[gpu]`; left out, the engine runs on CPUs."""

    kind: str = ""
    per_node: int = 8
    node_selector: dict[str, str] = field(default_factory=dict)
    runtime_class: str = ""
    network_interface: str = "eth0"  # for NCCL


@dataclass(frozen=True, slots=True)
class ServicePart:
    """`[service]`"""

    name: str = "octavo-engine"
    port: int = 8000
    clients: list[str] = field(default_factory=list)  # other namespaces that may call


@dataclass(frozen=True, slots=True)
class StoragePart:
    """`[storage]`, of weights and compiled kernels."""

    size: str = ""  # by the plan if left out
    storage_class: str = ""
    access_mode: str = "ReadWriteMany"


@dataclass(frozen=True, slots=True)
class SecretsPart:
    """`[secrets]`: names of Secrets that are made by hand; their keys are in the comments."""

    hub: str = "hub-token"  # key: token
    engine: str = "engine-key"  # key: key
    gateway: str = "gateway-key"  # key: key
    redis: str = ""  # key: password


@dataclass(frozen=True, slots=True)
class RayPart:
    """`[ray]`"""

    version: str = RAY_VERSION
    redis_address: str = ""  # host:port, keeps the head's state through its restart
    head_cpu: int = 4
    head_memory: str = "16Gi"


@dataclass(frozen=True, slots=True)
class DrainPart:
    """`[drain]`"""

    seconds: int = 120  # that running requests get
    load_bandwidth: float = 0.5  # GB/s at which weights come, for the start's probes


@dataclass(frozen=True, slots=True)
class ScalePart:
    """`[autoscale]`"""

    kind: str = "none"
    minimum: int = 1
    maximum: int = 4
    waiting: int = 8  # requests in a replica's queue from which another is wanted
    prometheus: str = "http://prometheus-operated.monitoring.svc:9090"  # for KEDA


@dataclass(frozen=True, slots=True)
class MonitorPart:
    """`[monitoring]`"""

    enabled: bool = True
    interval: str = "15s"
    namespace: str = "monitoring"  # whose Prometheus may scrape
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backend:
    """`[[gateway.backends]]`, an engine by its address."""

    url: str
    model: str = ""  # that it serves; the spec's served name if left out
    name: str = ""  # that clients ask for; `model` if left out
    key_env: str = ""  # variable that holds its key
    weight: int = 1
    max_parallel: int = 256


@dataclass(frozen=True, slots=True)
class GatewayPart:
    """`[gateway]`, LiteLLM's proxy."""

    enabled: bool = True
    image: str = "ghcr.io/berriai/litellm"
    version: str = LITELLM_VERSION
    replicas: int = 1
    host: str = "127.0.0.1"  # of `octavo gateway`
    port: int = 4000
    strategy: str = "least-busy"
    retries: int = 2
    timeout: int = 600
    stream_timeout: int = 120
    allowed_fails: int = 2
    cooldown: int = 30
    health_interval: int = 30
    master_key_env: str = "LITELLM_MASTER_KEY"
    fallbacks: dict[str, list[str]] = field(default_factory=dict)
    context_window_fallbacks: dict[str, list[str]] = field(default_factory=dict)
    redis_host: str = ""
    backends: list[Backend] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole deployment."""

    name: str
    model: ModelPart
    namespace: str = "ai-serving"
    engine: EnginePart = field(default_factory=EnginePart)
    gpu: GpuPart = field(default_factory=GpuPart)
    service: ServicePart = field(default_factory=ServicePart)
    storage: StoragePart = field(default_factory=StoragePart)
    secrets: SecretsPart = field(default_factory=SecretsPart)
    ray: RayPart = field(default_factory=RayPart)
    drain: DrainPart = field(default_factory=DrainPart)
    autoscale: ScalePart = field(default_factory=ScalePart)
    monitoring: MonitorPart = field(default_factory=MonitorPart)
    gateway: GatewayPart = field(default_factory=GatewayPart)

    @property
    def served_name(self) -> str:
        """What clients ask for."""
        return self.model.served_name or self.model.name.rstrip("/").rpartition("/")[2].lower()

    @property
    def tensor(self) -> int:
        """Devices that share each layer."""
        return int(self.engine.options.get("tensor_parallel_size", 1))

    @property
    def pipeline(self) -> int:
        """Stages."""
        return int(self.engine.options.get("pipeline_parallel_size", 1))

    @property
    def gpus(self) -> int:
        """Of one replica; 0 on CPUs."""
        copies = int(self.engine.options.get("data_parallel_size", 1))
        return self.tensor * self.pipeline * copies if self.gpu.kind else 0

    @property
    def nodes(self) -> int:
        """Pods with GPUs of one replica."""
        return max(1, -(-self.gpus // self.gpu.per_node))

    @property
    def image(self) -> str:
        """With its version."""
        name = self.engine.image or {
            "octavo": "registry.example.com/octavo",
            "vllm": "registry.example.com/vllm-ray",
        }.get(self.engine.kind, "")
        version = self.engine.version or __version__
        suffix = "-cuda" if self.gpu.kind and self.engine.kind == "octavo" else ""
        return f"{name}:{version}{suffix}"


class SpecReader:
    """Reads one file's tables into records; errors name the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []

    def read(self) -> Spec:
        """The checked spec. Raises ConfigError."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--spec {self._path}: cannot be read: {error}", "spec") from None
        self._lines = text.splitlines()
        try:
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{self._path}: is not TOML: {error}", "spec") from None
        spec = self._record(Spec, tree, ())
        self._check(spec)
        return spec

    def error(self, at: tuple[str, ...], rule: str, remedy: str) -> ConfigError:
        """For the key at `at`: where it stands, what is wrong, what to do."""
        key = ".".join(part for part in at if not part.isdecimal())
        return ConfigError(f"{self._path}:{self.line(at)}: {key}: {rule}; {remedy}", "spec")

    def line(self, at: tuple[str, ...]) -> int:
        """The number of the line that the key stands in; of its table if it stands in none."""
        table, count, found = "", -1, 1
        *parents, key = at or ("",)
        wanted = ".".join(part for part in parents if not part.isdecimal())
        nth = next((int(part) for part in reversed(parents) if part.isdecimal()), 0)
        for number, line in enumerate(self._lines, 1):
            header = re.match(r"\s*\[{1,2}\s*([^\]]+?)\s*\]{1,2}", line)
            if header:
                table = header.group(1).replace(" ", "").replace('"', "")
                count = count + 1 if line.strip().startswith("[[") and table == wanted else count
                if table == wanted or table == ".".join((wanted, key)).strip("."):
                    found = number
                continue
            written = re.match(r'\s*"?([A-Za-z0-9_.-]+?)"?\s*=', line)
            in_table = table == wanted and (count < 0 or count == nth)
            if written and in_table and written.group(1).split(".")[0] == key:
                return number
            full = ".".join(filter(None, (table, written.group(1) if written else "")))
            if written and full == ".".join((wanted, key)):
                return number
        return found

    def _record(self, kind: type[_T], tree: Mapping[str, Any], at: tuple[str, ...]) -> _T:
        hints = get_type_hints(kind)
        known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
        values: dict[str, Any] = {}
        for key, value in tree.items():
            if key not in known:
                hint = unknown_name(key, list(known), key).partition("; ")[2]
                raise self.error((*at, key), "is not a key of a spec", hint or "leave it out")
            values[key] = self._value(hints[key], value, (*at, key))
        for name, one in known.items():
            optional = one.default is not MISSING or one.default_factory is not MISSING
            if name not in values and not optional:
                raise self.error((*at, name), "is missing", "every spec needs it")
        return kind(**values)

    def _value(self, hint: Any, value: Any, at: tuple[str, ...]) -> Any:
        if hint in (str, int, float, bool):
            return self._simple(hint, value, at)
        if hint == list[Backend]:
            if not isinstance(value, list):
                raise self.error(at, "is no list", "write it as [[gateway.backends]]")
            return [
                self._record(Backend, one, (*at, str(number))) for number, one in enumerate(value)
            ]
        is_list = str(hint).startswith("list")
        if not isinstance(value, list if is_list else dict):
            what = "a list" if is_list else "a table"
            raise self.error(at, f"is {value!r}", f"it must be {what}")
        if is_dataclass(hint) and isinstance(hint, type):
            return self._record(hint, dict(value), at)
        self._texts(hint, value, at)
        return value

    def _simple(self, hint: Any, value: Any, at: tuple[str, ...]) -> Any:
        if hint is float and type(value) is int:
            return float(value)
        if type(value) is not hint:
            raise self.error(at, f"is {value!r}", f"it must be of type {hint.__name__}")
        if hint is int and value < 0:
            raise self.error(at, f"is {value}", "it cannot be below 0")
        return value

    def _texts(self, hint: Any, value: Any, at: tuple[str, ...]) -> None:
        """Lists and tables of texts hold texts."""
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            of_lists = str(hint) == "dict[str, list[str]]"
            good = isinstance(item, list) if of_lists else isinstance(item, str)
            if not good and str(hint) != "dict[str, typing.Any]":
                raise self.error((*at, str(key)), f"is {item!r}", "write texts")

    def _check(self, spec: Spec) -> None:
        """What types do not say."""
        for at, text in (
            (("name",), spec.name),
            (("namespace",), spec.namespace),
            (("service", "name"), spec.service.name),
        ):
            if not DNS_LABEL.fullmatch(text):
                rule = f"{text!r} is no name that Kubernetes takes"
                raise self.error(at, rule, "use small letters, digits and dashes, 63 at most")
        for at, value, choices in (
            (("engine", "kind"), spec.engine.kind, ENGINES),
            (("engine", "mode"), spec.engine.mode, MODES),
            (("autoscale", "kind"), spec.autoscale.kind, SCALERS),
        ):
            if value not in choices:
                raise self.error(at, f"is {value!r}", f"use {', '.join(choices)}")
        if spec.engine.version in ("latest", "main", "nightly"):
            rule = f"{spec.engine.version!r} is another image tomorrow"
            raise self.error(("engine", "version"), rule, "name a version")
        if spec.engine.kind == "vllm" and not spec.engine.version:
            raise self.error(("engine", "version"), "is missing", "name the version of the image")
        self._check_options(spec)
        self._check_shape(spec)

    def _check_options(self, spec: Spec) -> None:
        if spec.engine.kind != "octavo":
            return
        known = {**options_of(EngineArgs), **options_of(ServerArgs)}
        for name, value in spec.engine.options.items():
            at = ("engine", "options", name)
            if name not in known:
                hint = unknown_name(name, list(known), name).partition("; ")[2]
                raise self.error(at, "is no option of the engine", hint or "leave it out")
            if name in OWN_OPTIONS:
                raise self.error(at, "is set by the manifests", "use the spec's own keys for it")
            problem = problem_of(known[name], value)
            if problem:
                raise self.error(at, f"is {value!r}", problem.rstrip("."))

    def _check_shape(self, spec: Spec) -> None:
        at = ("engine", "options", "tensor_parallel_size")
        if spec.gpu.kind and spec.gpus > spec.gpu.per_node and spec.gpus % spec.gpu.per_node:
            rule = f"{spec.gpus} GPUs do not fill nodes of {spec.gpu.per_node}"
            raise self.error(
                at, rule, "let TP x PP be a multiple of gpu.per_node, or fit in a node"
            )
        if spec.tensor > spec.gpu.per_node and spec.gpu.kind:
            rule = f"TP {spec.tensor} is more than the {spec.gpu.per_node} GPUs of a node"
            raise self.error(at, rule, "share layers within a node, and add pipeline_parallel_size")
        if spec.nodes > 1 and spec.engine.mode == "deployment":
            rule = f"a replica needs {spec.nodes} nodes, and a Deployment's pod is on one"
            raise self.error(("engine", "mode"), rule, "use rayservice")
        if not spec.gpu.kind and spec.engine.kind == "vllm":
            raise self.error(("gpu", "kind"), "is missing", "the vllm images here are for GPUs")
        if spec.autoscale.minimum > spec.autoscale.maximum or spec.autoscale.minimum < 1:
            rule = f"is {spec.autoscale.minimum}, with a maximum of {spec.autoscale.maximum}"
            raise self.error(("autoscale", "minimum"), rule, "use 1 up to the maximum")


def read_spec_file(path: str | Path) -> Spec:
    """The checked spec of a TOML file. Raises ConfigError with line, rule and remedy."""
    return SpecReader(Path(path)).read()
