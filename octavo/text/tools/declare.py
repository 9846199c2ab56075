"""`read_tools` and `read_choice`: the tools of a request and which of them must be called.

Everything is checked here before a model sees it, with the place of what is wrong:
`tools[2].function.parameters.properties.city.type`. A schema is checked for its form; what a
grammar can enforce of it is checked where one is made. Not for: how calls are written.
Next file: `choose.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from octavo.errors import InvalidRequest

MAX_TOOLS = 512
MAX_DEPTH = 64  # of a schema
MAX_NODES = 20_000  # schemas within the tools of one request

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")
_TOOL = frozenset({"type", "function"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")
_TEXTS = ("$ref", "pattern", "title", "description", "format")

NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function that a model may call."""

    name: str
    description: str | None
    parameters: dict[str, Any]  # a JSON schema of an object
    strict: bool

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Choice:
    """What the caller wants of the tools. `names` are those that a forced call may have."""

    mode: Literal["none", "auto", "required"] = "none"
    names: tuple[str, ...] = ()

    @property
    def forced(self) -> bool:
        """True if the answer must be a call."""
        return self.mode == "required"


def read_tools(tools: object) -> list[Tool]:
    """The tools of a request, none for null. Raises `InvalidRequest` naming the place."""
    if tools is None:
        return []
    if not isinstance(tools, list):
        _refuse("tools", "must be a list of functions")
    if len(tools) > MAX_TOOLS:
        _refuse("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed")
    nodes = _Nodes()
    found = [_tool(tool, f"tools[{place}]", nodes) for place, tool in enumerate(tools)]
    places: dict[str, int] = {}
    for place, tool in enumerate(found):
        if tool.name in places:
            _refuse(
                f"tools[{place}].function.name",
                f"is {tool.name}, as that of tools[{places[tool.name]}]; use each name once",
            )
        places[tool.name] = place
    return found


def read_choice(choice: object, tools: Sequence[Tool]) -> Choice:
    """What `tool_choice` says about `tools`; without it, a model may call what there is."""
    if choice is None or choice == "auto":
        return Choice("auto" if tools else "none")
    if choice == "none":
        return Choice("none")
    if choice == "required":
        if not tools:
            _refuse("tool_choice", "is required, and there are no tools; send tools")
        return Choice("required", tuple(tool.name for tool in tools))
    if not isinstance(choice, dict):
        _refuse(
            "tool_choice",
            f"is {_shown(choice)}; use none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}',
        )
    return Choice("required", (_named(choice, tools),))


def _named(choice: dict[str, Any], tools: Sequence[Tool]) -> str:
    if choice.get("type", "function") != "function":
        _refuse("tool_choice.type", f'is {_shown(choice.get("type"))}; only "function" is known')
    _check_names(choice, _TOOL, "tool_choice")
    function = choice.get("function")
    if not isinstance(function, dict):
        _refuse("tool_choice.function", "must be an object with name")
    _check_names(function, {"name"}, "tool_choice.function")
    name = function.get("name")
    known = [tool.name for tool in tools]
    if name not in known:
        listed = ", ".join(known[:8]) or "none"
        _refuse("tool_choice.function.name", f"is {_shown(name)}; the tools are {listed}")
    return str(name)


def _tool(tool: object, at: str, nodes: _Nodes) -> Tool:
    if not isinstance(tool, dict):
        _refuse(at, 'must be an object such as {"type": "function", "function": {"name": "f"}}')
    if tool.get("type", "function") != "function":
        _refuse(f"{at}.type", f'is {_shown(tool["type"])}; only "function" is known')
    _check_names(tool, _TOOL, at)
    function = tool.get("function")
    at = f"{at}.function"
    if not isinstance(function, dict):
        _refuse(at, "must be an object with name and parameters")
    _check_names(function, _FUNCTION, at)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(
            f"{at}.name",
            f"is {_shown(name)}; use 1 to 128 letters, digits, dots, dashes and underscores",
        )
    description = function.get("description")
    if description is not None and not _is_text(description):
        _refuse(f"{at}.description", f"is {_shown(description)}; it must be a text")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{at}.strict", f"is {_shown(strict)}; use true or false")
    parameters = function.get("parameters")
    if parameters is None or parameters == {}:
        parameters = NO_PARAMETERS
    elif not isinstance(parameters, dict):
        _refuse(f"{at}.parameters", "must be a JSON schema, an object")
    elif parameters.get("type", "object") != "object":
        _refuse(f"{at}.parameters.type", f'is {_shown(parameters["type"])}; it must be "object"')
    else:
        _check_schema(parameters, f"{at}.parameters", nodes, 0)
    return Tool(name, description, parameters, bool(strict))


class _Nodes:
    """Counts schemas."""

    def __init__(self) -> None:
        self.count = 0


def _check_schema(schema: object, at: str, nodes: _Nodes, depth: int) -> None:
    """The form of a JSON schema; keywords that are not known here are let through."""
    nodes.count += 1
    if depth > MAX_DEPTH:
        _refuse(at[:200], f"is nested more than {MAX_DEPTH} levels deep")
    if nodes.count > MAX_NODES:
        _refuse("tools", f"hold more than {MAX_NODES} schemas; send fewer")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        _refuse(at, f"is {_shown(schema)}; it must be a JSON schema")
    _check_keywords(schema, at)
    for name in _MAPS:
        inner = schema.get(name, {})
        if not isinstance(inner, dict):
            _refuse(f"{at}.{name}", "must be an object of schemas")
        for key, value in inner.items():
            _check_schema(value, f"{at}.{name}.{key}", nodes, depth + 1)
    for name in _LISTS:
        if name not in schema:
            continue
        if not isinstance(schema[name], list) or not schema[name]:
            _refuse(f"{at}.{name}", "must be a list of at least one schema")
        for place, value in enumerate(schema[name]):
            _check_schema(value, f"{at}.{name}[{place}]", nodes, depth + 1)
    for name in _SINGLE:
        if name in schema and not (name == "items" and isinstance(schema[name], list)):
            _check_schema(schema[name], f"{at}.{name}", nodes, depth + 1)


def _check_keywords(schema: Mapping[str, Any], at: str) -> None:
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        for kind in kinds:
            if kind not in _TYPES:
                _refuse(f"{at}.type", f"is {_shown(kind)}; use one of {', '.join(_TYPES)}")
        if not kinds:
            _refuse(f"{at}.type", "is an empty list; name at least one type")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        _refuse(f"{at}.required", "must be a list of names")
    choices = schema.get("enum")
    if choices is not None and (not isinstance(choices, list) or not choices):
        _refuse(f"{at}.enum", "must be a list of at least one value")
    for name in _TEXTS:
        if schema.get(name) is not None and not _is_text(schema[name]):
            _refuse(f"{at}.{name}", f"is {_shown(schema[name])}; it must be a text")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _check_names(value: Mapping[str, Any], known: Collection[str], at: str) -> None:
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(str(name)[:80], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            _refuse(f"{at}.{str(name)[:80]}", f"is not known; {hint}")


def _shown(value: object) -> str:
    if value is None or isinstance(value, (str, bool)):
        return json.dumps(value[:40] if isinstance(value, str) else value)
    return f"a value of type {type(value).__name__}"


def _refuse(at: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{at} {what}.", param=at)
