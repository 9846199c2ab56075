"""What an option is: its kind, its limits, where its value came from.

`Record` is the base of the two option records in `options.py`. It knows four things: which values
the caller gave, which of them the environment or a file supplies, how a text becomes a value, and
whether a value can be honoured. Not for: the options themselves (`options.py`), flags (`cli/`).
Next file: `options.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, Self, TypeAlias, cast

from octavo.errors import ConfigError
from octavo.foreign import FLAGS
from octavo.renamed import DEAD_VARIABLES, REMOVED

Kind: TypeAlias = Literal["int", "float", "bool", "str", "json", "size", "list"]

UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SERVICE = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)(?:([kmgtKMGT])(iB)?)?")


@dataclass(frozen=True, slots=True)
class Option:
    """All that is known of one option besides its name and default."""

    help: str
    kind: Kind
    group: str = "Server"
    env: tuple[str, ...] = ()  # variables that set it, the first one found wins
    env_scale: int = 1  # a number from the environment is multiplied by it
    choices: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()  # other words for choices, and the choice meant
    words: tuple[str, ...] = ()  # texts that are allowed where a number is expected
    minimum: float | None = None
    maximum: float | None = None
    optional: bool = False
    only: tuple[object, ...] | None = None  # the values that this build can honour
    remedy: str = ""  # what to do about any other value
    secret: bool = False  # its value is never printed
    hidden: bool = False  # left out of --help


def option(default: Any, text: str, **details: Any) -> Any:
    """A dataclass field that is an option. `details` are fields of `Option`."""
    if "kind" not in details:
        kinds = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "json"}
        details["kind"] = kinds[type(default)]
    details.setdefault("optional", default is None)
    metadata = {"option": Option(help=text, **details)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def absent(default: Any, remedy: str, **details: Any) -> Any:
    """An option that is known but has one value only in this build; others are refused."""
    return option(
        default, "not in this build", only=(default,), remedy=remedy, hidden=True, **details
    )


def parse(details: Option, text: str, label: str) -> object:
    """The value that `text` stands for; `label` names the place it came from in errors."""
    if text in details.words:
        return text
    if details.optional and text.lower() in ("", "none", "null"):
        return None
    if details.kind == "bool":
        lowered = text.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{label} is {text!r}, but must be true or false.")
    if details.kind == "str":
        return normal(details, text)
    if details.kind == "list":
        return [part.strip() for part in text.split(",")]
    if details.kind == "json":
        return _parse_json(text, label)
    return _parse_number(details, text, label)


def normal(details: Option, value: object) -> object:
    """The one form of a value that may be written in several: choices in any case, aliases."""
    if not isinstance(value, str) or not details.choices:
        return value
    lowered = value.lower()
    chosen = lowered if lowered in details.choices else value
    return dict(details.aliases).get(chosen, chosen)


def _parse_json(text: str, label: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{label} is not JSON ({error}); quote it for the shell.") from None


def _parse_number(details: Option, text: str, label: str) -> int | float:
    try:
        if details.kind == "float":
            return float(text)
        if details.kind == "size":
            return parse_size(text)
        return int(text)
    except ValueError:
        wanted = {
            "float": "a number",
            "size": "a whole number, with k, K, m, M, g or G if you like",
        }
        words = f" or {' or '.join(details.words)}" if details.words else ""
        kind = wanted.get(details.kind, "a whole number")
        raise ConfigError(f"{label} is {text!r}, but must be {kind}{words}.") from None


def parse_size(text: str) -> int:
    """A count with an optional unit: `k m g t` are powers of 1000, `K M G T` of 1024.

    `KiB`, `MiB`, `GiB` and `TiB` work as well. Raises ValueError.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(text)
    number, unit, binary = found.groups()
    if unit is None:
        return int(number)
    factor = BINARY_UNITS[unit.upper()] if binary or unit.isupper() else UNITS[unit]
    return round(float(number) * factor)


def flag_of(name: str) -> str:
    """`max_num_seqs` to `--max-num-seqs`."""
    return "--" + name.replace("_", "-")


def unknown_name(name: str, known: Iterable[str], shown: str) -> str:
    """The sentence for an option that does not exist: what replaced it, or the nearest name."""
    for table in (REMOVED, FLAGS):
        if name in table:
            return f"{shown} is not an option of this version: {table[name]}"
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    if near:
        suggestion = flag_of(near[0]) if shown.startswith("-") else near[0]
        return f"{shown} is not an option; did you mean {suggestion}?"
    return f"{shown} is not an option; `octavo serve --help` lists all."


def is_service_link(name: str, value: str) -> bool:
    """True for a variable that Kubernetes sets because a Service has a name like ours."""
    return bool(_SERVICE.fullmatch(name)) or value.startswith(("tcp://", "udp://", "sctp://"))


def refuse_dead_variables(environ: Mapping[str, str]) -> None:
    """Raises ConfigError if a variable is set that once had a meaning and has none now."""
    for name, remedy in DEAD_VARIABLES.items():
        if name in environ:
            raise ConfigError(
                f"{name}={environ[name]} is set, but nothing reads it: {remedy}", name
            )
    bind = environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bind not in ("auto", "nobind", "all"):
        raise ConfigError(
            f"VLLM_CPU_OMP_THREADS_BIND={bind} is set, but threads are not bound one by one here: "
            f"unset it and start under `taskset -c {bind.partition('|')[0]}`.",
            "VLLM_CPU_OMP_THREADS_BIND",
        )


@dataclass
class Record:
    """Base of the option records: remembers where each value came from.

    A value that the caller did not give is taken from the environment, then from a file, then
    from the field's default; texts of flags, variables and files become values by `parse`.
    `sources` says where each came from: "argument", "flag", "environment NAME", "file NAME" or
    "default".
    """

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Notes which fields the caller gave; refuses names that are not fields."""
        self = super().__new__(cls)
        names = list(options_of(cls))
        for name in kwargs:
            if name not in names:
                raise ConfigError(unknown_name(name, names, f"{name}={kwargs[name]!r}"), name)
        given = (*names[: len(args)], *kwargs)
        self.__dict__["_sources"] = dict.fromkeys(given, "argument")
        return self

    @property
    def sources(self) -> dict[str, str]:
        """Where each value that is not a default came from, by field."""
        return cast(dict[str, str], self.__dict__["_sources"])

    @classmethod
    def gather(
        cls, flags: Mapping[str, object], file: Mapping[str, object], file_name: str = ""
    ) -> Self:
        """A record from a command line and a file; names of other records are left alone."""
        known = options_of(cls)
        record = cls(**{name: value for name, value in flags.items() if name in known})
        for name in known:
            if name in flags:
                record.sources[name] = "flag"
            elif name in file and name not in record.sources:
                value = file[name]
                if isinstance(value, str):
                    value = parse(known[name], value, f"{name} (in {file_name})")
                setattr(record, name, normal(known[name], value))
                record.sources[name] = f"file {file_name}"
        return record

    def fill(self, environ: Mapping[str, str]) -> None:
        """Takes from the environment what the caller did not give, and normalizes the rest."""
        refuse_dead_variables(environ)
        for name, details in options_of(type(self)).items():
            if name in self.sources:
                setattr(self, name, normal(details, self.__dict__[name]))
                continue
            for variable in details.env:
                if details.secret and details.kind == "list" and environ.get(variable) == "":
                    raise ConfigError(
                        f"{variable} is set and empty, which would leave the server open; give a "
                        "key, or unset it.",
                        name,
                    )
                if environ.get(variable, "") == "" or is_service_link(variable, environ[variable]):
                    continue
                value = parse(details, environ[variable], f"{variable} (environment)")
                if isinstance(value, int) and details.env_scale != 1 and variable[:5] == "VLLM_":
                    value = value * details.env_scale or None  # 0 is "choose" there
                setattr(self, name, value)
                self.sources[name] = f"environment {variable}"
                break

    def check(self) -> None:
        """Raises ConfigError for the first value that cannot be honoured."""
        for name, details in options_of(type(self)).items():
            value = self.__dict__[name]
            problem = problem_of(details, value)
            if problem:
                raise ConfigError(f"{self.label(name)}: {problem}", name)

    def label(self, name: str) -> str:
        """The option and its value as the person who set it wrote it."""
        source = self.sources.get(name, "default")
        value = self.__dict__[name]
        if options_of(type(self))[name].secret:
            value = "(not shown)"
        if source == "flag":
            if isinstance(value, bool):
                return flag_of(name) if value else flag_of(f"no_{name}")
            return f"{flag_of(name)} {value}"
        if source.startswith("environment "):
            return f"{source.removeprefix('environment ')}={value} (environment, {flag_of(name)})"
        if source.startswith("file "):
            return f"{name}: {value} (in {source.removeprefix('file ')})"
        return f"{name}={value!r}"

    def effective(self) -> list[tuple[str, str, str]]:
        """(name, value, source) of every option that means something in this build."""
        rows: list[tuple[str, str, str]] = []
        for name, details in options_of(type(self)).items():
            if details.hidden:
                continue
            value = self.__dict__[name]
            shown = value if isinstance(value, str) else json.dumps(value)
            if details.secret and value:
                shown = "(set)"
            rows.append((name, shown, self.sources.get(name, "default")))
        return rows


def options_of(record: type[Record]) -> dict[str, Option]:
    """The options of a record in order."""
    every: tuple[Field[Any], ...] = fields(record)
    return {item.name: item.metadata["option"] for item in every}


def problem_of(details: Option, value: object) -> str:
    """Why a value cannot be honoured, with the remedy; empty if it can."""
    if value is None and details.optional:
        return ""
    if isinstance(value, str) and value in details.words:
        return ""
    if details.only is not None:
        return "" if value in details.only else details.remedy
    wanted: dict[Kind, tuple[type, ...]] = {
        "int": (int,),
        "size": (int,),
        "float": (int, float),
        "bool": (bool,),
        "str": (str,),
        "list": (list, tuple),
        "json": (dict,),
    }
    if not isinstance(value, wanted[details.kind]) or (
        isinstance(value, bool) and details.kind != "bool"
    ):
        words = f" or one of {', '.join(details.words)}" if details.words else ""
        return f"it must be of type {wanted[details.kind][-1].__name__}{words}."
    if details.choices and value not in details.choices:
        return f"it must be one of {', '.join(details.choices)}."
    if isinstance(value, (list, tuple)) and "" in value:
        return "a text in it is empty; say what it is, or leave it out."
    if isinstance(value, (int, float)):
        return _range_problem(details, value)
    return ""


def _range_problem(details: Option, value: float) -> str:
    low, high = details.minimum, details.maximum
    if not (low is None or value >= low) or not (high is None or value <= high):
        if low is not None and high is not None:
            return f"it must be from {low:g} to {high:g}."
        return (
            f"it must be at least {low:g}." if low is not None else f"it must be {high:g} or less."
        )
    return ""
