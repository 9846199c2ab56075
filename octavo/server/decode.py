"""Bytes of a body to a request record, strictly.

The rules: UTF-8 without a byte order mark, one JSON object, no NaN or Infinity, numbers within
64 bit or double range, no half surrogate pairs, no NUL but in a prompt, at most about a thousand
levels deep, no more values than are made in a moment, for no other thread runs while they are. Of
a key given twice the last value counts. Unknown fields are refused with the nearest known name,
or listed if the operator wants leniency. Not for: the meaning of values.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from octavo.errors import InvalidRequest

Record = TypeVar("Record", bound=msgspec.Struct)

# `"name": number`, to say which field holds a number that is none. Only for error texts.
_NUMBER = re.compile(rb'"([^"\\]{1,64})"\s*:\s*(-?(?:NaN|Infinity|[0-9][0-9.eE+-]*))')
# The first half of a surrogate pair at the end of a text, which the library takes for a cut body.
_HALF = re.compile(rb'(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}"')
_SEARCHED = 2**20  # bytes of a refused body that are searched for the culprit
_PATH = re.compile(r" - at `(key in )?\$\.?([^`]*)`$")
_BACKSLASH = ord("\\")
MAX_OBJECTS = 2**18  # texts, lists and objects of a body
MAX_SEPARATORS = 3 * 2**20  # commas between values; most are between token ids
# Read by the tokenizer alone, for which NUL is a byte like others; benchmarks send random tokens.
RAW_TEXTS = frozenset({"prompt", "text_input"})
_MAX_SHOWN = 8  # names in a message


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequest."""
    if not body.strip():
        raise InvalidRequest("The request body is empty; send a JSON object.")
    if body[:3] == b"\xef\xbb\xbf":
        raise InvalidRequest("The request body begins with a byte order mark; leave it out.")
    refuse_crowded(body)
    try:
        value = msgspec.json.decode(body)
        if b"\\u0000" in body:
            _refuse_nul(value)
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    except msgspec.MsgspecError as error:  # not JSON, or a number out of range
        if "truncated" in str(error) and (half := _HALF.search(body)):
            raise InvalidRequest(
                "The request body cannot be read: JSON is malformed: half a surrogate pair (byte "
                f"{half.start()})."
            ) from None
        name = _culprit(body)
        where = f" The value of {name} is not a number that can be used." if name else ""
        raise InvalidRequest(f"The request body cannot be read: {error}.{where}", name) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"The request body must be a JSON object, not {_json_name(value)}.")
    return value


def refuse_crowded(body: bytes) -> None:
    """Raises InvalidRequest for more values than a request can use; what is in texts is no value.

    They are counted one by one only if there may be too many.
    """
    at_most = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    if at_most <= MAX_OBJECTS and body.count(b",") <= MAX_SEPARATORS:
        return
    separators = objects = at = depth = 0
    field = None  # the one whose value is being counted
    while at >= 0:
        start = body.find(b'"', at)
        end = len(body) if start < 0 else start
        opened = body.count(b"[", at, end) + body.count(b"{", at, end)
        depth += opened - body.count(b"]", at, end) - body.count(b"}", at, end)
        separators += body.count(b",", at, end)
        objects += (start >= 0) + opened
        if separators > MAX_SEPARATORS or objects > MAX_OBJECTS:
            raise InvalidRequest(
                f"The request body holds more than {MAX_OBJECTS} texts, lists and objects, or "
                f"more than {MAX_SEPARATORS} values{f', in {field}' if field else ''}; send "
                "several requests.",
                field,
            )
        at = _end_of_text(body, start) if start >= 0 else -1
        if depth == 1 and body[at : at + 9].lstrip()[:1] == b":":
            field = shorten(body[start + 1 : min(at, start + 99) - 1].decode("utf-8", "replace"))


def _end_of_text(body: bytes, start: int) -> int:
    """The place after the text whose opening quote is at `start`; -1 if it does not end."""
    end = body.find(b'"', start + 1)
    while end >= 0:
        slash = end
        while body[slash - 1] == _BACKSLASH:
            slash -= 1
        if (end - slash) % 2 == 0:
            return end + 1
        end = body.find(b'"', end + 1)
    return -1


def to_record(body: Mapping[str, Any], kind: type[Record]) -> Record:
    """The record that `body` holds. Raises InvalidRequest that names the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        match = _PATH.search(message)
        path = match.group(2) if match else ""
        reason = message[: match.start()] if match else message
        field = re.split(r"[.\[]", path)[0] or None
        if field is None and (missing := re.search(r"missing required field `(\w+)`", reason)):
            field = missing.group(1)
        where = _with_value(path, body) if path else "Request body"
        hint = _choices(kind, path) if reason.startswith("Invalid enum") else ""
        raise InvalidRequest(f"{where}: {reason}{hint}.", field) from None


def _with_value(path: str, body: Mapping[str, Any]) -> str:
    """`max_tokens = "5"`: a field and the value that it has, where that is short."""
    value = body.get(path)
    if isinstance(value, (list, dict)) or path not in body:
        return path
    return f"{path} = {shorten(msgspec.json.encode(value).decode(), 40)}"


def _choices(kind: type[msgspec.Struct], path: str) -> str:
    """What a field that takes one of a few texts may be."""
    for known in msgspec.structs.fields(kind):
        if known.name == path:
            words = list(_literals(known.type))
            return f"; use one of {', '.join(words)}" if words else ""
    return ""


def _literals(kind: Any) -> Iterator[str]:
    """The texts that a type allows by name."""
    for part in get_args(kind):
        if isinstance(part, str):
            yield part
        else:
            yield from _literals(part)


def check_names(
    body: Mapping[str, Any], kind: type[msgspec.Struct], refused: Iterable[str], *, strict: bool
) -> list[str]:
    """Names in `body` that nobody knows. Raises InvalidRequest for them if `strict`."""
    known = {*field_names(kind), *refused}
    unknown = (name for name in body if name not in known)
    if strict:
        for name in unknown:  # the first one is enough
            near = difflib.get_close_matches(name[:64], field_names(kind), n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "GET /docs lists all fields."
            raise InvalidRequest(f"{shorten(name)} is not a known field; {hint}", shorten(name))
    return [shorten(name) for name in unknown]


@cache
def field_names(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The names of a record's fields."""
    return frozenset(kind.__struct_fields__)


def ignored_header(names: list[str]) -> str:
    """Value of `X-Ignored-Params`: names in printable ASCII, the first few."""
    shown = [re.sub(r"[^\x21-\x2b\x2d-\x7e]", "?", name) for name in names[:_MAX_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def shorten(text: str, limit: int = 80) -> str:
    """The text, cut to fit a message."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _culprit(body: bytes) -> str | None:
    for match in _NUMBER.finditer(body[:_SEARCHED]):
        digits = match.group(2)
        try:
            number = float(digits)
        except ValueError:
            continue
        if not math.isfinite(number) or len(digits) > 300:
            return match.group(1).decode("utf-8", "replace")
    return None


def _json_name(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _refuse_nul(body: object) -> None:
    for name, value in body.items() if isinstance(body, dict) else ():
        if name in RAW_TEXTS:
            continue
        if _has_nul(name) or _has_nul(value):
            shown = shorten(name.replace("\0", "?"))
            raise InvalidRequest(f"{shown} holds a NUL character; leave it out.", shown)


def _has_nul(value: object) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    if isinstance(value, list):
        return any(_has_nul(item) for item in value)
    return False
