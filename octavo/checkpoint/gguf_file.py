"""Parses GGUF files, versions 2 and 3: metadata and the place of each tensor.

The file is mapped, not read. Every count and length is checked against the file's length before
it is used. Arrays of strings (vocabularies) stay undecoded until they are asked for, since a
worker never needs them. Format: ggml's `docs/gguf.md`. Not for: what the keys mean
(`gguf_model.py`, `gguf_tokenizer.py`).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from octavo.checkpoint.records import ENCODINGS
from octavo.errors import CheckpointError

MAGIC = b"GGUF"
MAX_DEPTH = 3  # arrays in arrays; real files have none
MAX_DIMENSIONS = 4

STRING, ARRAY = 8, 9
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
# ggml_type -> our name
TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    30: "BF16",
}
REFUSED_TYPES = {9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"}
REFUSED_TYPES |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M"}
REFUSED_TYPES |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}


@dataclass(frozen=True, slots=True)
class StringArray:
    """An array of strings that is still bytes: `count` of them, each with its length before it."""

    raw: bytes
    count: int

    def decode(self) -> list[str]:
        """Each string; bytes that are not UTF-8 become replacement characters."""
        return [text.decode("utf-8", errors="replace") for text in self.decode_bytes()]

    def decode_bytes(self) -> list[bytes]:
        """Each string as its bytes."""
        raw, position, items = self.raw, 0, []
        for _ in range(self.count):
            start = position + 8
            position = start + int.from_bytes(raw[position:start], "little")
            items.append(raw[start:position])
        return items


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor; `shape` is in row-major order, the reverse of the file's."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset: int  # from the beginning of the file
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed header. Values of `metadata` are numbers, strings, bools, lists or StringArray."""

    path: Path
    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, GgufTensor] = field(repr=False)


def read_gguf(path: Path) -> GgufFile:
    """Parses the header of `path`. Raises CheckpointError if it is cut, damaged or foreign."""
    try:
        with path.open("rb") as stream:
            if path.stat().st_size < 24:
                raise CheckpointError(
                    f"{path}: expected a GGUF header of 24 bytes or more, found "
                    f"{path.stat().st_size}: download it again"
                )
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Parser:
    """A position in the mapped file; every move is checked against its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.position = 0

    def parse(self) -> GgufFile:
        if self.take(4) != MAGIC:
            raise CheckpointError(f"{self.path}: is not a GGUF file (it begins with other bytes)")
        version = self.scalar(4)
        if version not in (2, 3):
            raise CheckpointError(
                f"{self.path}: GGUF version {version} is not supported, only 2 and 3 "
                "(little-endian); convert the model again"
            )
        num_tensors, num_keys = self.scalar(10), self.scalar(10)
        # A key takes 13 bytes at least, a tensor 28: no count can be larger than that allows.
        if num_keys * 13 + num_tensors * 28 > self.end:
            raise self.damaged(f"claims {num_keys} keys and {num_tensors} tensors")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.damaged(f"has the key {key!r} twice")
            metadata[key] = self.value(self.scalar(4), depth=0)
        records = [self.tensor_record() for _ in range(num_tensors)]
        return GgufFile(self.path, version, metadata, self.place(records, metadata))

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: {what} at byte {self.position} of {self.end}: the file is damaged or "
            "cut short; download it again"
        )

    def take(self, count: int) -> bytes:
        start = self.position
        if count > self.end - start:
            raise self.damaged(f"expected {count} more bytes, found {self.end - start}")
        self.position = start + count
        return self.data[start : self.position]

    def scalar(self, kind: int) -> Any:
        layout = SCALARS[kind]
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        return self.take(self.scalar(10)).decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(kind)
        if kind != ARRAY or depth >= MAX_DEPTH:
            raise self.damaged(f"value of unknown type {kind}")
        kind, count = self.scalar(4), self.scalar(10)
        if kind == STRING:
            return self.strings(count)
        if kind in SCALARS:
            layout = SCALARS[kind]
            raw = self.take(count * layout.size)
            return [item for (item,) in layout.iter_unpack(raw)]
        if count > self.end:
            raise self.damaged(f"claims an array of {count} items")
        return [self.value(kind, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> StringArray:
        """Skips over `count` strings and keeps their bytes."""
        if count * 8 > self.end - self.position:
            raise self.damaged(f"claims an array of {count} strings")
        start, position, end, data = self.position, self.position, self.end, self.data
        for _ in range(count):
            position += 8 + int.from_bytes(data[position : position + 8], "little")
            if position > end:
                raise self.damaged("array of strings runs past the end")
        self.position = position
        return StringArray(data[start:position], count)

    def tensor_record(self) -> tuple[str, tuple[int, ...], str, int]:
        """(name, shape, encoding, offset in the data part)."""
        name = self.string()
        num_dimensions = self.scalar(4)
        if num_dimensions > MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name!r} claims {num_dimensions} dimensions")
        shape = tuple(self.scalar(10) for _ in range(num_dimensions))[::-1]
        kind, offset = self.scalar(4), self.scalar(10)
        if kind not in TENSOR_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is stored as "
                f"{REFUSED_TYPES.get(kind, f'ggml type {kind}')}, which is not supported; use a "
                f"file in one of {', '.join(TENSOR_TYPES.values())}"
            )
        return name, shape, TENSOR_TYPES[kind], offset

    def place(
        self, records: list[tuple[str, tuple[int, ...], str, int]], metadata: dict[str, Any]
    ) -> dict[str, GgufTensor]:
        """Adds the aligned beginning of the data part and checks each tensor's end."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self.damaged(f"general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in records:
            encoding = ENCODINGS[kind]
            if not shape or prod(shape) == 0 or shape[-1] % encoding.block:
                raise self.damaged(f"tensor {name!r} of type {kind} has the shape {shape}")
            if offset % alignment:
                raise self.damaged(f"tensor {name!r} is not aligned to {alignment} bytes")
            nbytes = prod(shape) // encoding.block * encoding.size
            if start + offset + nbytes > self.end:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} ends at byte {start + offset + nbytes}, "
                    f"expected a file of that length or more, found {self.end} bytes: the file is "
                    "cut short; download it again"
                )
            if name in tensors:
                raise self.damaged(f"has the tensor {name!r} twice")
            tensors[name] = GgufTensor(name, shape, kind, start + offset, nbytes)
        return tensors
