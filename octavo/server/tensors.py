"""KServe v2 tensors: a request's inputs read from JSON or binary form, a reply's outputs written.

In the binary form a JSON head is followed by the bytes of the tensors, and the header
`Inference-Header-Content-Length` says where one ends and the other begins. Elements of datatype
BYTES are texts in UTF-8; in binary each follows its length (unsigned 32 bit, little-endian).
Source: the KServe v2 protocol and its binary tensor data extension.
Not for: what the tensors mean (`triton.py`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.errors import InvalidRequest
from octavo.server.decode import RAW_TEXTS, parse_object, shorten, to_record

HEAD_LENGTH = "Inference-Header-Content-Length"
MAX_ELEMENTS = 65536  # of one tensor
MAX_DIMENSIONS = 8

_FORMATS = {
    "BOOL": "?",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "FP32": "f",
    "FP64": "d",
}


class InputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One input as the head describes it; without `data` its bytes follow the head."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] = {}


class WantedOutput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An output that the caller asks for."""

    name: str
    parameters: dict[str, Any] = {}


class InferHead(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The head of POST /v2/models/{name}/infer."""

    inputs: list[InputTensor]
    id: str | None = None
    outputs: list[WantedOutput] | None = None
    parameters: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor with its values in row-major order."""

    name: str
    datatype: str
    shape: list[int]
    values: list[Any]


def read_infer(body: bytes, head_length: str | None) -> tuple[InferHead, dict[str, Tensor]]:
    """The head of a request and its inputs by name. Raises InvalidRequest."""
    size = len(body)
    if head_length is not None:
        if not (head_length.isascii() and head_length.isdigit()) or int(head_length[:20]) > size:
            raise InvalidRequest(
                f"{HEAD_LENGTH} = {shorten(head_length)} must be a number of bytes of the body, "
                f"which has {size}.",
                HEAD_LENGTH,
            )
        size = int(head_length)
    head = to_record(parse_object(body[:size]), InferHead)
    rest = memoryview(body)[size:]
    found: dict[str, Tensor] = {}
    for item in head.inputs:
        if item.name in found:
            raise InvalidRequest(f"inputs: {shorten(item.name)} is given twice.", "inputs")
        count = _count(item)
        if item.data is None:
            length = _binary_size(item, len(rest))
            values = _from_bytes(item, bytes(rest[:length]), count)
            rest = rest[length:]
        else:
            values = _from_json(item, count)
        found[item.name] = Tensor(item.name, item.datatype, item.shape, values)
    if len(rest):
        raise InvalidRequest(f"{len(rest)} bytes follow the last binary input.", "inputs")
    return head, found


def write_infer(
    head: dict[str, object], outputs: Sequence[Tensor], binary: Sequence[bool]
) -> tuple[bytes, int | None]:
    """A reply's body, and the length of its head if binary data follows it.

    `binary` says for each output whether it goes as bytes.
    """
    described: list[dict[str, object]] = []
    tail: list[bytes] = []
    for tensor, as_bytes in zip(outputs, binary, strict=True):
        one: dict[str, object] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        if as_bytes:
            data = _to_bytes(tensor)
            one["parameters"] = {"binary_data_size": len(data)}
            tail.append(data)
        else:
            one["data"] = tensor.values
        described.append(one)
    text = msgspec.json.encode({**head, "outputs": described})
    return (b"".join((text, *tail)), len(text)) if tail else (text, None)


def _count(item: InputTensor) -> int:
    """Elements of a tensor, after a check of its shape and datatype."""
    name = shorten(item.name)
    if item.datatype != "BYTES" and item.datatype not in _FORMATS:
        raise InvalidRequest(
            f"inputs: {name} has the datatype {shorten(item.datatype)}; use BYTES, "
            f"{', '.join(_FORMATS)}.",
            "inputs",
        )
    if len(item.shape) > MAX_DIMENSIONS or any(size < 0 for size in item.shape):
        raise InvalidRequest(
            f"inputs: the shape of {name} must be at most {MAX_DIMENSIONS} sizes of 0 or more.",
            "inputs",
        )
    count = math.prod(item.shape)
    if count > MAX_ELEMENTS:
        raise InvalidRequest(
            f"inputs: {name} has {str(count)[:40]} elements; send at most {MAX_ELEMENTS}.", "inputs"
        )
    if "shared_memory_region" in item.parameters:
        raise InvalidRequest(
            f"inputs: {name} lies in shared memory, which is not supported; send its data.",
            "inputs",
        )
    return count


def _from_json(item: InputTensor, count: int) -> list[Any]:
    values: list[Any] = []
    stack: list[Any] = [item.data]
    while stack:
        one = stack.pop()
        if isinstance(one, list):
            stack.extend(reversed(one))
        else:
            values.append(one)
    wanted: tuple[type, ...] = (str,)
    if item.datatype == "BOOL":
        wanted = (bool,)
    elif item.datatype != "BYTES":
        wanted = (int, float) if item.datatype.startswith("FP") else (int,)
    for value in values:
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            raise InvalidRequest(
                f"inputs: {shorten(item.name)} holds a value that is no {item.datatype}; send "
                "values of its datatype only.",
                "inputs",
            )
    _check_number(item, len(values), count)
    return values


def _binary_size(item: InputTensor, left: int) -> int:
    name = shorten(item.name)
    size = item.parameters.get("binary_data_size")
    if type(size) is not int:
        raise InvalidRequest(
            f"inputs: {name} has neither data nor the parameter binary_data_size; give one of "
            "them.",
            "inputs",
        )
    if not 0 <= size <= left:
        raise InvalidRequest(
            f"inputs: {name} has binary_data_size = {str(size)[:40]}, and {left} bytes are left "
            "of the body.",
            "inputs",
        )
    return size


def _from_bytes(item: InputTensor, data: bytes, count: int) -> list[Any]:
    if item.datatype == "BYTES":
        values: list[Any] = _texts(item, data)
    else:
        code = _FORMATS[item.datatype]
        number, rest = divmod(len(data), struct.calcsize("<" + code))
        values = [] if rest else list(struct.unpack(f"<{number}{code}", data))
        if any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise InvalidRequest(
                f"inputs: {shorten(item.name)} holds a number that is not finite.", "inputs"
            )
    _check_number(item, len(values), count)
    return values


def _texts(item: InputTensor, data: bytes) -> list[Any]:
    name = shorten(item.name)
    found: list[Any] = []
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        if at + 4 > len(data) or end > len(data):
            raise InvalidRequest(
                f"inputs: an element of {name} is longer than its binary data.", "inputs"
            )
        try:
            text = data[at + 4 : end].decode()
        except UnicodeDecodeError:
            raise InvalidRequest(f"inputs: {name} holds a text that is not UTF-8.", name) from None
        if "\0" in text and item.name not in RAW_TEXTS:
            raise InvalidRequest(f"{name} holds a NUL character; leave it out.", name)
        found.append(text)
        at = end
    return found


def _check_number(item: InputTensor, number: int, count: int) -> None:
    if number != count:
        raise InvalidRequest(
            f"inputs: {shorten(item.name)} of shape {item.shape} needs {count} elements and has "
            f"{number}; send as many as its shape says.",
            "inputs",
        )


def _to_bytes(tensor: Tensor) -> bytes:
    if tensor.datatype != "BYTES":
        code = _FORMATS[tensor.datatype]
        return struct.pack(f"<{len(tensor.values)}{code}", *tensor.values)
    encoded = [text.encode() for text in tensor.values]
    return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)
