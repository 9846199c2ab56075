"""Which schemas exclude each other, so that `oneOf` of them is `anyOf`.

No grammar can say that an answer meets one schema and not the other; where no value meets both,
nothing needs to be said. What is not seen here may still be seen by the library. Not for: what a
schema allows (`schema.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, Final

MAX_PAIRS: Final = 5000
_ALL: Final = frozenset({"object", "array", "string", "number", "boolean", "null"})


def all_exclude(nodes: Sequence[Any]) -> bool:
    """True if no value can meet two of the schemas."""
    if len(nodes) * (len(nodes) - 1) // 2 > MAX_PAIRS:
        return False
    return all(exclude(one, other) for one, other in combinations(nodes, 2))


def exclude(one: Any, other: Any) -> bool:
    """True if it is sure that no value meets both; the schemas are in their new form."""
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    kinds = _kinds(one), _kinds(other)
    if not kinds[0] & kinds[1]:
        return True
    values = _values(one), _values(other)
    if values[0] is not None and values[1] is not None:
        return not values[0] & values[1]
    if kinds[0] & kinds[1] != {"object"}:
        return False
    named = one.get("properties", {}), other.get("properties", {})
    both = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        exclude(named[0][name], named[1][name])
        for name in both
        if name in named[0] and name in named[1]
    )


def _kinds(node: dict[str, Any]) -> frozenset[str]:
    """The types of values that the schema may allow; whole numbers are numbers."""
    values = _plain_values(node)
    if values is not None:
        return frozenset(_kind(value) for value in values)
    kinds = node.get("type", _ALL)
    names = (kinds,) if isinstance(kinds, str) else kinds
    return frozenset("number" if name == "integer" else name for name in names)


def _plain_values(node: dict[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values: list[Any] | None = node.get("enum")
    return values


def _values(node: dict[str, Any]) -> set[str] | None:
    """All values that the schema may allow in one spelling each, None if they are not listed."""
    values = _plain_values(node)
    return None if values is None else {_spelled(value) for value in values}


def _spelled(value: Any) -> str:
    """Equal for values that JSON Schema takes for equal: 1 and 1.0, and objects in any order."""
    if isinstance(value, dict):
        inside = sorted(f"{name!r}:{_spelled(one)}" for name, one in value.items())
        return "{" + ",".join(inside) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_spelled, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return repr(value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "object"
    if isinstance(value, list):
        return "array"
    return "string" if isinstance(value, str) else "number"
