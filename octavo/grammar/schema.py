"""JSON schemas: checked, and brought into a form in which every keyword is enforced.

What cannot be enforced is refused by name with the place where it stands; annotations are dropped.
An object whose properties are named gets no others unless the schema speaks of them, which is
stricter than the schema and what a caller who names properties wants. Schemas that no value meets
are found before anything is generated. Not for: the grammar itself. Next file: `forms.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import unquote

from octavo.grammar.exclusive import all_exclude

MAX_DEPTH = 60
MAX_OPTIONAL = 480  # properties of one object that are not required
MAX_NODES = 20_000  # schemas within a schema
MAX_ENUM = 20_000  # values of all enums together
MAX_COUNT = 100_000  # of items, properties or characters
MAX_NUMBER = 2**63
MAX_FACTOR = 10**12  # of multiples without limits of their own
MAX_MULTIPLE = 1000  # of multipleOf, with its decimals as whole digits

Node: TypeAlias = Any  # a schema: an object or a boolean

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ANNOTATIONS = """
    $comment $schema $id $defs definitions title description default example examples deprecated
    readOnly writeOnly discriminator externalDocs xml
"""
# What no grammar can express, or what this one cannot.
_NOT_ENFORCED = """
    not if then else uniqueItems contains minContains maxContains propertyNames dependentRequired
    dependentSchemas dependencies unevaluatedProperties unevaluatedItems contentEncoding
    contentMediaType contentSchema $anchor $dynamicRef $dynamicAnchor $recursiveRef
    $recursiveAnchor $vocabulary
"""
ANNOTATIONS = frozenset(_ANNOTATIONS.split())
NOT_ENFORCED = frozenset(_NOT_ENFORCED.split())


class SchemaError(Exception):
    """Why a schema cannot be used: the place and the keyword are in the message."""


@dataclass(slots=True)
class _Pass:
    """What is known while a schema is walked."""

    root: Node
    additional: bool  # objects may have properties that are not named if they say so
    nodes: int = 0
    values: int = 0
    composed: bool = False  # allOf is used: closing an object could contradict its siblings
    targets: dict[str, Node] = field(default_factory=dict)  # by reference, in the new form


def normalize(schema: Node, *, additional: bool = True) -> dict[str, Any]:
    """The schema in the form that is compiled. Raises SchemaError.

    `additional` false gives no object a property that is not named.
    """
    walk = _Pass(schema, additional)
    _scan(schema, walk)
    made = _node(schema, "", walk, 0)
    pending = [name for name, node in walk.targets.items() if node is None]
    while pending:
        for name in pending:
            walk.targets[name] = _node(_resolve(schema, name), name, walk, 0)
        pending = [name for name, node in walk.targets.items() if node is None]
    names = {name: f"d{index}" for index, name in enumerate(walk.targets)}
    _check_met(made, walk.targets)
    whole = _renamed(made, names)
    if isinstance(whole, bool):
        whole = {}
    if names:
        whole = {**whole, "$defs": {names[n]: _renamed(t, names) for n, t in walk.targets.items()}}
    return dict(whole)


def _scan(schema: Node, walk: _Pass) -> None:
    """Notes whether allOf is used, and refuses what is nested too deep to be walked."""
    stack = [(schema, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > 4 * MAX_DEPTH:
            raise SchemaError(f"the schema is nested too deep; use at most {MAX_DEPTH} levels")
        if isinstance(value, dict):
            walk.composed = walk.composed or "allOf" in value
            stack += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, list):
            stack += [(item, depth + 1) for item in value]


def _node(schema: Node, path: str, walk: _Pass, depth: int) -> Node:
    walk.nodes += 1
    if depth > MAX_DEPTH:
        raise SchemaError(f"at {path[:80]} it is nested too deep; use at most {MAX_DEPTH} levels")
    if walk.nodes > MAX_NODES:
        raise SchemaError(f"it is too wide; use at most {MAX_NODES} schemas within it")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise SchemaError(f"{_at(path)} must be an object, and is {_kind(schema)}")
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS or keyword.startswith("x-"):
            continue
        if keyword in ("nullable", "uniqueItems") and value is False:
            continue  # it asks for nothing
        check = _KEYWORDS.get(keyword)
        if check is None:
            raise SchemaError(_unknown(keyword, path))
        made[keyword] = check(value, _Place(keyword, path, walk, depth))
    if "anyOf" not in made and all_exclude(made.get("oneOf", (True, True))):
        made["anyOf"] = made.pop("oneOf")
    _tuple_items(schema, made)
    _order(made, path)
    if "multipleOf" in made:
        _bound(made)
    if _is_object(made):
        _close(made, walk, path)
    return made


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a keyword stands."""

    keyword: str
    path: str
    walk: _Pass
    depth: int

    def bad(self, why: str) -> SchemaError:
        return SchemaError(f"{self.keyword} {_at(self.path)} {why}")

    def node(self, value: Node, name: str = "") -> Node:
        path = f"{self.path}/{self.keyword}" + (f"/{name}" if name else "")
        return _node(value, path, self.walk, self.depth + 1)


def _count(value: object, place: _Place) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise place.bad(f"must be a whole number from 0 to {MAX_COUNT}")
    return value


def _number(value: object, place: _Place) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise place.bad("must be a number")
    if not -MAX_NUMBER <= value <= MAX_NUMBER:
        raise place.bad("is too large; use numbers of at most 64 bits")
    return value


def _multiple(value: object, place: _Place) -> float:
    number = _number(value, place)
    if number <= 0:
        raise place.bad("must be above 0")
    scaled = float(number)
    for _ in range(9):
        if math.isclose(scaled, round(scaled), rel_tol=1e-9):
            break
        scaled *= 10
    if scaled > MAX_MULTIPLE or round(scaled) == 0:
        raise place.bad(f"has too many digits to be enforced; use at most {MAX_MULTIPLE}")
    return number


def _pattern(value: object, place: _Place) -> str:
    if not isinstance(value, str):
        raise place.bad("must be text")
    if not value:
        raise place.bad("is empty, which allows any text; leave it out")
    return value


def _format(value: object, place: _Place) -> str:
    if not isinstance(value, str):
        raise place.bad("must be text")
    return value


def _type(value: object, place: _Place) -> Any:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise place.bad("is empty, so that no value is allowed; name a type")
    for name in names:
        if not isinstance(name, str) or name not in TYPES:
            near = difflib.get_close_matches(str(name)[:40], TYPES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(TYPES)}"
            raise place.bad(f"is {str(name)[:40]!r}; {hint}")
    return value


def _enum(value: object, place: _Place) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise place.bad("must be a list of at least one value")
    place.walk.values += len(value)
    if place.walk.values > MAX_ENUM:
        raise place.bad(f"has too many values; use at most {MAX_ENUM}")
    for one in value:
        _const(one, place)
    return value


def _const(value: object, place: _Place) -> object:
    """Any JSON, of numbers that can be written exactly."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _number(value, place)
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            _const(item, place)
    return value


def _names(value: object, place: _Place) -> list[str]:
    if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
        raise place.bad("must be a list of texts")
    return list(dict.fromkeys(value))


def _schema(value: object, place: _Place) -> Node:
    return place.node(value)


def _schemas(value: object, place: _Place) -> list[Node]:
    if not isinstance(value, list) or not value:
        raise place.bad("must be a list of at least one schema")
    return [place.node(one, str(index)) for index, one in enumerate(value)]


def _mapping(value: object, place: _Place) -> dict[str, Node]:
    if not isinstance(value, dict):
        raise place.bad(f"must be an object, and is {_kind(value)}")
    return {name: place.node(one, name) for name, one in value.items()}


def _patterns(value: object, place: _Place) -> dict[str, Node]:
    for name in value if isinstance(value, dict) else ():
        _pattern(name, place)
    return _mapping(value, place)


def _items(value: object, place: _Place) -> Node:
    return _schemas(value, place) if isinstance(value, list) else place.node(value)


def _reference(value: object, place: _Place) -> str:
    if not isinstance(value, str):
        raise place.bad("must be text")
    _resolve(place.walk.root, value, place)
    place.walk.targets.setdefault(value, None)
    return value


def _resolve(root: Node, reference: str, place: _Place | None = None) -> Node:
    """What a reference within the schema points to (RFC 6901)."""
    place = place or _Place("$ref", "", _Pass(root, True), 0)
    if reference != "#" and not reference.startswith("#/"):
        raise place.bad(f"is {reference[:60]!r}; only references within the schema, #/..., work")
    found = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            raise place.bad(f"is {reference[:60]!r}, which the schema does not have")
    return found


_Check: TypeAlias = Callable[[Any, _Place], Any]
_KEYWORDS: dict[str, _Check] = {
    "type": _type,
    "enum": _enum,
    "const": _const,
    "$ref": _reference,
    "anyOf": _schemas,
    "oneOf": _schemas,
    "allOf": _schemas,
    "properties": _mapping,
    "patternProperties": _patterns,
    "additionalProperties": _schema,
    "required": _names,
    "minProperties": _count,
    "maxProperties": _count,
    "items": _items,
    "prefixItems": _schemas,
    "additionalItems": _schema,
    "minItems": _count,
    "maxItems": _count,
    "minLength": _count,
    "maxLength": _count,
    "pattern": _pattern,
    "format": _format,
    "minimum": _number,
    "maximum": _number,
    "exclusiveMinimum": _number,
    "exclusiveMaximum": _number,
    "multipleOf": _multiple,
}


def _unknown(keyword: str, path: str) -> str:
    shown = keyword[:40]
    if keyword == "nullable":
        return f'nullable {_at(path)} is not JSON Schema; add "null" to type'
    if keyword in NOT_ENFORCED:
        return f"{shown} {_at(path)} cannot be enforced; leave it out and check the answer yourself"
    near = difflib.get_close_matches(shown, _KEYWORDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "leave it out"
    return f"{shown!r} {_at(path)} is not a known keyword; {hint}"


def _tuple_items(schema: dict[str, Any], made: dict[str, Any]) -> None:
    """The older way to write `prefixItems`."""
    if isinstance(schema.get("items"), list):
        made["prefixItems"] = made.pop("items")
        if "additionalItems" in made:
            made["items"] = made["additionalItems"]
    made.pop("additionalItems", None)


def _order(made: dict[str, Any], path: str) -> None:
    for least, most in (
        ("minLength", "maxLength"),
        ("minItems", "maxItems"),
        ("minProperties", "maxProperties"),
        ("minimum", "maximum"),
    ):
        if least in made and most in made and made[least] > made[most]:
            raise SchemaError(f"{least} {_at(path)} is above {most}, so that no value is allowed")


def _bound(made: dict[str, Any]) -> None:
    """A multiple may need more digits wherever it is, so that its number must have an end."""
    low, high = "minimum", "maximum"
    for name, other, bound in ((low, high, -MAX_FACTOR), (high, low, MAX_FACTOR)):
        exclusive = f"exclusive{name.capitalize()}"
        if name not in made and exclusive not in made:
            least = made.get(other, made.get(f"exclusive{other.capitalize()}", 0))
            made[name] = bound + int(least)


def _is_object(made: dict[str, Any]) -> bool:
    kind = made.get("type", "object" if "properties" in made else None)
    return kind == "object" or (isinstance(kind, list) and "object" in kind)


def _close(made: dict[str, Any], walk: _Pass, path: str) -> None:
    """Names required properties that are not named, and closes the object."""
    named: dict[str, Node] = made.get("properties", {})
    rest = made.get("additionalProperties", True)
    patterns = made.get("patternProperties", {})
    for name in made.get("required", ()):
        if name in named or patterns:
            continue
        if rest is False:
            raise SchemaError(
                f"required {_at(path)} names {name[:40]!r}, which additionalProperties forbids"
            )
        made["properties"] = named = {**named, name: rest}
    optional = len(named.keys() - set(made.get("required", ())))
    if optional > MAX_OPTIONAL:
        raise SchemaError(
            f"properties {_at(path)} has {optional} that are not required; use at most "
            f"{MAX_OPTIONAL} in one object"
        )
    if not walk.additional:
        made["additionalProperties"] = False
        return
    alone = not walk.composed and not any(key in made for key in ("anyOf", "oneOf", "$ref"))
    if (named or patterns) and alone and "minProperties" not in made:
        made.setdefault("additionalProperties", False)


def _check_met(made: Node, targets: dict[str, Node]) -> None:
    """Raises SchemaError if no finite value meets the schema.

    References that can be met are found in rounds, each with what the rounds before have found.
    """
    met: set[str] = set()
    while True:
        more = {name for name, node in targets.items() if name not in met and _met(node, met)}
        if not more:
            break
        met |= more
    if not _met(made, met):
        raise SchemaError(
            "no finite answer can meet the schema; look for a schema that requires itself, false, "
            "or limits that contradict each other"
        )


def _met(node: Node, known: set[str]) -> bool:
    if isinstance(node, bool):
        return node
    if "$ref" in node and node["$ref"] not in known:
        return False
    if any(not _met(one, known) for one in node.get("allOf", ())):
        return False
    for name in ("anyOf", "oneOf"):
        if name in node and not any(_met(one, known) for one in node[name]):
            return False
    if "enum" in node or "const" in node:
        return True
    kinds = node.get("type", TYPES)
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    return any(
        _object_met(node, known)
        if kind == "object"
        else _array_met(node, known)
        if kind == "array"
        else True
        for kind in kinds
    )


def _object_met(node: dict[str, Any], known: set[str]) -> bool:
    named = node.get("properties", {})
    return all(_met(named[name], known) for name in node.get("required", ()) if name in named)


def _array_met(node: dict[str, Any], known: set[str]) -> bool:
    least = node.get("minItems", 0)
    first = node.get("prefixItems", [])
    if not all(_met(one, known) for one in first[:least]):
        return False
    return least <= len(first) or _met(node.get("items", True), known)


def _renamed(node: Node, names: dict[str, str]) -> Node:
    """With references to `$defs` of the new form."""
    if isinstance(node, bool):
        return node
    made = dict(node)
    for key, value in node.items():
        if key == "$ref":
            made[key] = f"#/$defs/{names[value]}"
        elif key in ("properties", "patternProperties"):
            made[key] = {name: _renamed(one, names) for name, one in value.items()}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            made[key] = [_renamed(one, names) for one in value]
        elif key in ("items", "additionalProperties"):
            made[key] = _renamed(value, names)
    return made


def _at(path: str) -> str:
    return f"at {path[:80]}" if path else "at the top"


def _kind(value: object) -> str:
    names = {list: "a list", str: "text", type(None): "null", bool: "a boolean", dict: "an object"}
    return names.get(type(value), "a number")
