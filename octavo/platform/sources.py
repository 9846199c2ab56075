"""What is linted: manifests with the lines of their keys, commands, settings, variables, texts.

A file may be YAML, a dashboard's JSON, a shell script, Python, or Markdown with any of these in it.
Not for: judging (`rules_*.py`). Next file: `findings.py`.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".bash", ".py", ".md", ".txt", ".toml", ".env")
IGNORED_FOLDERS = ("templates", "node_modules")  # a chart's templates are no YAML yet
LAUNCHES = re.compile(
    r"(?:python3?\s+-m\s+)?(vllm|octavo)(?:[.\s][\w.]*(?:api_server|benchmark_serving)|"
    r"\s+(?:serve|bench|plan|route|gateway)\b)"
)
START = re.compile(r"^\s*(?:\$ )?(?:[A-Z_]+=\S+\s+)*(python3?|vllm|octavo|curl|kubectl|ray|helm)\b")
CALL = re.compile(r"\b(?:Async)?EngineArgs\((.*?)^\s*\)", re.DOTALL | re.MULTILINE)
ARGUMENT = re.compile(r"(\w+)\s*=\s*(\"[^\"]*\"|'[^']*'|[\w.+-]+)")
VARIABLE = re.compile(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`|\bexport ([A-Z][A-Z0-9_]+)=")
Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One Kubernetes object."""

    file: str
    body: dict[str, Any]
    lines: Mapping[Path_, int] = field(repr=False)

    @property
    def kind(self) -> str:
        """Such as RayCluster."""
        return str(self.body.get("kind", ""))

    @property
    def name(self) -> str:
        """Of its metadata."""
        return str((self.body.get("metadata") or {}).get("name", ""))

    @property
    def namespace(self) -> str:
        """Of its metadata; empty if it has none."""
        return str((self.body.get("metadata") or {}).get("namespace", ""))

    def line(self, *path: str | int) -> int:
        """Where that key stands, or the nearest above it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def get(self, *path: str | int) -> Any:
        """The value at a path; None if there is none."""
        value: Any = self.body
        for step in path:
            if isinstance(value, dict):
                value = value.get(step)
            elif isinstance(value, list) and isinstance(step, int) and step < len(value):
                value = value[step]
            else:
                return None
        return value


@dataclass(frozen=True, slots=True)
class Command:
    """A command line somebody is to type, or that a container runs."""

    file: str
    line: int
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """As one line."""
        return " ".join(self.words)

    @property
    def launches(self) -> str:
        """Which engine it has to do with: vllm, octavo, or empty."""
        found = LAUNCHES.search(self.text)
        return found.group(1) if found else ""

    @property
    def serves(self) -> bool:
        """True if it starts a server."""
        return bool(self.launches) and bool(re.search(r"api_server|\bserve\b", self.text))

    def flags(self) -> dict[str, str]:
        """Its long flags, without dashes; "" for those without a value."""
        found: dict[str, str] = {}
        for at, word in enumerate(self.words):
            if not word.startswith("--") or len(word) < 3:
                continue
            name, equals, value = word[2:].partition("=")
            following = self.words[at + 1] if at + 1 < len(self.words) else ""
            if not equals and not following.startswith("-"):
                value = following
            found[name.replace("-", "_")] = value
        return found


@dataclass(frozen=True, slots=True)
class Text:
    """A file as it is."""

    file: str
    text: str

    def line_of(self, at: int) -> int:
        """The number of the line of a character."""
        return self.text.count("\n", 0, at) + 1


@dataclass(slots=True)
class Sources:
    """All that was read."""

    documents: list[Document] = field(default_factory=list)
    dashboards: list[Document] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # of engine arguments, in Python or flags
    settings_at: tuple[str, int] = ("", 1)
    variables: list[tuple[str, str, int]] = field(default_factory=list)  # name, file, line
    texts: list[Text] = field(default_factory=list)
    specs: list[Path] = field(default_factory=list)

    def of(self, *kinds: str) -> Iterator[Document]:
        """Objects of these kinds."""
        return (one for one in self.documents if one.kind in kinds)


def read_sources(paths: list[Path]) -> Sources:
    """Everything in these files and folders. Raises ConfigError naming file and line."""
    found = Sources()
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: there is no such file or folder.", "path")
        for file in _files(path):
            _read(file, found)
    for command in found.commands:
        if command.launches:
            _take_settings(found, command.flags(), (command.file, command.line))
    return found


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
        return
    for file in sorted(path.rglob("*")):
        known = file.suffix in SUFFIXES or file.name.endswith("Dockerfile")
        if known and not set(IGNORED_FOLDERS) & set(file.parts):
            yield file


def _read(file: Path, found: Sources) -> None:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}", "path") from None
    name = str(file)
    found.texts.append(Text(name, text))
    if file.suffix in (".yaml", ".yml"):
        _add_yaml(found, name, text, 0)
    elif file.suffix == ".json":
        _add_dashboard(found, name, text)
    elif file.suffix == ".toml":
        found.specs.append(file)
    elif file.name.endswith("Dockerfile"):
        return
    else:
        for first, block in _manifests_in(text):
            _add_yaml(found, name, block, first)
        found.commands += commands_in(text, name)
        _take_call(found, text, name)
        _take_variables(found, text, name)


def yaml_module() -> Any:
    """PyYAML. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise ConfigError(
            "manifests need the package PyYAML, which is not installed; install octavo[platform].",
            "path",
        ) from None


def _add_yaml(found: Sources, name: str, text: str, before: int) -> None:
    """Objects of a stream; `before` lines of the file stand before it."""
    yaml = yaml_module()
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            body = loader.construct_document(node)
            if isinstance(body, dict) and "kind" in body:
                lines: dict[Path_, int] = {}
                _note_lines(node, (), lines, before)
                for inner, where in _unlisted(body, lines):
                    found.documents.append(Document(name, inner, where))
                    _take_from_object(found, found.documents[-1])
    except yaml.MarkedYAMLError as error:
        line = before + error.problem_mark.line + 1
        raise ConfigError(f"{name}:{line}: is not YAML: {error.problem}.", "path") from None
    finally:
        loader.dispose()


def _unlisted(
    body: dict[str, Any], lines: dict[Path_, int]
) -> Iterator[tuple[dict[str, Any], dict[Path_, int]]]:
    """The object, or those of a List."""
    if body["kind"] != "List":
        yield body, lines
        return
    for number, item in enumerate(body.get("items") or []):
        start = ("items", number)
        yield item, {path[2:]: line for path, line in lines.items() if path[:2] == start}


def _note_lines(node: Any, at: Path_, lines: dict[Path_, int], before: int) -> None:
    lines.setdefault(at, before + node.start_mark.line + 1)
    if node.id == "mapping":
        for key, value in node.value:
            lines[(*at, key.value)] = before + key.start_mark.line + 1
            _note_lines(value, (*at, key.value), lines, before)
    elif node.id == "sequence":
        for number, value in enumerate(node.value):
            _note_lines(value, (*at, number), lines, before)


def _add_dashboard(found: Sources, name: str, text: str) -> None:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: is not JSON: {error}.", "path") from None
    if isinstance(body, dict) and "panels" in body:
        found.dashboards.append(Document(name, body, {}))


def _manifests_in(text: str) -> Iterator[tuple[int, str]]:
    """(lines before it, YAML) of each manifest in a text; it ends at a blank line or a fence."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not re.match(r"apiVersion:\s*\S+", lines[at]):
            at += 1
            continue
        end = at
        while end < len(lines) and lines[end].strip() and not lines[end].startswith("```"):
            end += 1
        yield at, "\n".join(lines[at:end]) + "\n"
        at = end


def commands_in(text: str, name: str) -> list[Command]:
    """Command lines of programs that matter, lines that end in a backslash joined."""
    found: list[Command] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        first, whole = at, lines[at]
        while whole.endswith("\\") and at + 1 < len(lines):
            at += 1
            whole = whole[:-1] + " " + lines[at].strip()
        at += 1
        if START.match(whole):
            found.append(Command(name, first + 1, _split(whole.strip().removeprefix("$ "))))
    return found


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text, comments=True))
    except ValueError:
        return tuple(text.split())


def _take_call(found: Sources, text: str, name: str) -> None:
    for call in CALL.finditer(text):
        values = {key: _literal(value) for key, value in ARGUMENT.findall(call.group(1))}
        line = text.count("\n", 0, call.start()) + 1
        _take_settings(found, values, (name, line))


def _literal(text: str) -> Any:
    if text[:1] in "\"'":
        return text[1:-1]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)


def _take_settings(found: Sources, values: Mapping[str, Any], at: tuple[str, int]) -> None:
    """The first source of a setting stays."""
    if not found.settings:
        found.settings_at = at
    for key, value in values.items():
        found.settings.setdefault(key, _literal(value) if isinstance(value, str) else value)


def _take_variables(found: Sources, text: str, name: str) -> None:
    for match in VARIABLE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.variables.append((match.group(1) or match.group(2), name, line))


def _take_from_object(found: Sources, document: Document) -> None:
    """Commands and variables of containers, and an engine's arguments in a RayService."""
    for pod in pods_of(document):
        for number, container in enumerate(pod.spec.get("containers") or []):
            where = (*pod.path, "containers", number)
            words = [*(container.get("command") or []), *(container.get("args") or [])]
            line = document.line(*where, "command" if container.get("command") else "args")
            if words:
                flat = " ".join(map(str, words)) if "-c" in words else shlex.join(map(str, words))
                found.commands.append(Command(document.file, line, _split(flat)))
            for at, variable in enumerate(container.get("env") or []):
                line = document.line(*where, "env", at)
                found.variables.append((str(variable.get("name")), document.file, line))
    config = document.get("spec", "serveConfigV2")
    if document.kind == "RayService" and isinstance(config, str):
        line = document.line("spec", "serveConfigV2")
        for application in (yaml_module().safe_load(config) or {}).get("applications") or []:
            args = _engine_args(application.get("args") or {})
            _take_settings(found, args, (document.file, line))
    options = document.get("data", "engine.json")
    if document.kind == "ConfigMap" and options:
        line = document.line("data", "engine.json")
        _take_settings(found, json.loads(options), (document.file, line))


def _engine_args(args: dict[str, Any]) -> dict[str, Any]:
    """Of one of our applications as they are; of Ray's own for vLLM, those of its first model."""
    if "llm_configs" not in args:
        return args
    first = args["llm_configs"][0]
    scaling = (first.get("deployment_config") or {}).get("autoscaling_config") or {}
    source = (first.get("model_loading_config") or {}).get("model_source")
    return {**(first.get("engine_kwargs") or {}), "autoscaling": scaling, "model": source}


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's template within an object."""

    document: Document
    path: Path_  # of the pod's spec
    spec: dict[str, Any]
    role: str  # head, worker, or the object's kind
    copies: int
    labels: Mapping[str, str]

    @property
    def gpus(self) -> int:
        """Of one copy."""
        return sum(gpus_of(one) for one in self.spec.get("containers") or [])

    @property
    def ray(self) -> bool:
        """True for a node of a Ray cluster."""
        return self.role in ("head", "worker")

    def line(self, *path: str | int) -> int:
        """Where a key of its spec stands."""
        return self.document.line(*self.path, *path)


def gpus_of(container: Mapping[str, Any]) -> int:
    """What a container asks for."""
    limits = (container.get("resources") or {}).get("limits") or {}
    count = str(limits.get("nvidia.com/gpu", 0))
    return int(count) if count.isdecimal() else 0


def pods_of(document: Document) -> Iterator[Pod]:
    """The pod templates of an object."""
    if document.kind in ("RayCluster", "RayService"):
        base: Path_ = ("spec",) if document.kind == "RayCluster" else ("spec", "rayClusterConfig")
        yield from _ray_pods(document, base)
        return
    path: Path_ = ("spec", "template", "spec")
    spec = document.get(*path)
    if isinstance(spec, dict) and "containers" in spec:
        copies = document.get("spec", "replicas")
        labels = document.get("spec", "template", "metadata", "labels") or {}
        count = copies if isinstance(copies, int) else 1
        yield Pod(document, path, spec, document.kind, count, labels)


def _ray_pods(document: Document, base: Path_) -> Iterator[Pod]:
    head = (*base, "headGroupSpec", "template", "spec")
    spec = document.get(*head)
    cluster = document.name
    if isinstance(spec, dict):
        labels = document.get(*head[:-1], "metadata", "labels") or {}
        labels = {**labels, "ray.io/node-type": "head", "ray.io/serve": "true"}
        yield Pod(document, head, spec, "head", 1, {**labels, "ray.io/cluster": cluster})
    for number, group in enumerate(document.get(*base, "workerGroupSpecs") or []):
        path = (*base, "workerGroupSpecs", number, "template", "spec")
        spec = document.get(*path)
        if isinstance(spec, dict):
            labels = document.get(*path[:-1], "metadata", "labels") or {}
            labels = {**labels, "ray.io/node-type": "worker", "ray.io/serve": "true"}
            count = int(group.get("replicas", 1) or 0) * int(group.get("numOfHosts", 1) or 1)
            yield Pod(document, path, spec, "worker", count, labels)
