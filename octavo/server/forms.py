"""`response_format` and `structured_outputs` of a request, as the one record that both mean.

Not for: checking schemas or grammars, which `Engine.compile` does.
"""

from __future__ import annotations

from typing import Any

from octavo.errors import InvalidRequest
from octavo.grammar.request import PARAM, StructuredOutputs, structured_outputs
from octavo.server.errors import named_as_sent
from octavo.server.schema import Generation

FORMAT = "response_format"
TYPES = ("text", "json_object", "json_schema", "structural_tag")


def demanded_form(request: Generation) -> StructuredOutputs | None:
    """The form that a request demands of its answer. Raises InvalidRequest."""
    form = None if request.response_format is None else _from_format(request.response_format)
    if request.structured_outputs is None:
        return form
    if form is not None:
        raise InvalidRequest(f"{FORMAT} does not go with {PARAM}; send one of them.", FORMAT)
    return structured_outputs(request.structured_outputs)


def form_names(request: Generation) -> dict[str, str]:
    """Our names of the form, and what this request calls them."""
    if request.response_format is None or request.structured_outputs is not None:
        return {}
    return {f"{PARAM}.json": f"{FORMAT}.json_schema", PARAM: FORMAT}


def _from_format(value: dict[str, Any]) -> StructuredOutputs | None:
    match value.get("type"):
        case "text":
            _only(value, "type")
            return None
        case "json_object":
            _only(value, "type")
            return StructuredOutputs(json_object=True)
        case "json_schema":
            _only(value, "type", "json_schema")
            return StructuredOutputs(json=_schema(value.get("json_schema")))
        case "structural_tag":
            with named_as_sent({PARAM: FORMAT}):
                return StructuredOutputs(structural_tag=value)
    shown = repr(value.get("type"))[:40]
    raise InvalidRequest(f"{FORMAT}.type is {shown}; use one of {', '.join(TYPES)}.", FORMAT)


def _schema(value: object) -> Any:
    where = f"{FORMAT}.json_schema"
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be an object with name and schema.", FORMAT)
    _only(value, "name", "schema", "strict", "description", where=where)
    for name, kind, words in (
        ("name", str, "text"),
        ("description", str, "text"),
        ("strict", bool, "true or false"),
    ):
        given = value.get(name)
        if given is not None and not isinstance(given, kind):
            raise InvalidRequest(f"{where}.{name} must be {words}.", FORMAT)
    schema = value.get("schema")
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(f"{where}.schema must be a JSON schema, an object.", FORMAT)
    return schema


def _only(value: dict[str, Any], *names: str, where: str = FORMAT) -> None:
    for name in value:
        if name not in names:
            raise InvalidRequest(
                f"{where}.{name[:40]} is not a known field; use {', '.join(names)}.", FORMAT
            )
