"""Headers of safetensors files: 8 bytes of length, JSON, then raw little-endian tensors.

Everything is checked against the file's real length, so that a cut or damaged file is refused
here and never read past its end. Not for: reading tensors (`weights/tensors.py`).
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from octavo.checkpoint.records import ENCODINGS, TensorEntry
from octavo.errors import CheckpointError

MAX_HEADER = 100_000_000  # bytes, the format's own limit


def read_entries(file: Path) -> dict[str, TensorEntry]:
    """All tensors of one file, in file order. Raises CheckpointError."""
    try:
        total = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if total < 8 or length > MAX_HEADER or 8 + length > total:
                raise CheckpointError(
                    f"{file}: the header claims {length} bytes, the file has {total}; "
                    "it is cut or not a safetensors file: download it again"
                )
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object")
    header.pop("__metadata__", None)
    data = 8 + length
    entries = {name: _entry(file, name, value, data) for name, value in header.items()}
    _check_layout(file, list(entries.values()), data, total)
    return entries


def _entry(file: Path, name: str, value: Any, data: int) -> TensorEntry:
    """One record of the header: {"dtype", "shape", "data_offsets": [begin, end]}."""
    try:
        encoding = ENCODINGS[value["dtype"]]
        shape = tuple(value["shape"])
        begin, end = value["data_offsets"]
        numbers_are_ints = all(type(item) is int and item >= 0 for item in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: bad header record of tensor {name!r}: {value!r}") from error
    if not numbers_are_ints or end - begin != prod(shape) * encoding.size or encoding.block != 1:
        raise CheckpointError(f"{file}: bad header record of tensor {name!r}: {value!r}")
    return TensorEntry(name, file, data + begin, end - begin, shape, encoding.name)


def _check_layout(file: Path, entries: list[TensorEntry], data: int, total: int) -> None:
    """Tensors must cover the data part without holes or overlaps, as the format demands."""
    position = data
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{file}: tensor {entry.name!r} begins at byte {entry.offset}, "
                f"expected {position}: tensors overlap or leave a hole"
            )
        position += entry.nbytes
    if position != total:
        what = "cut short, download it again" if position > total else "followed by foreign bytes"
        raise CheckpointError(f"{file}: expected {position} bytes, found {total}: {what}")
