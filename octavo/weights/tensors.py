"""Reads one tensor of a checkpoint, or a rectangle of it, into memory.

Only the bytes of the wanted rows are touched, so a rank reads its own share. Next file:
`loader.py`. Not for: where tensors lie (`checkpoint/`), or which one fills which parameter.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.checkpoint.records import ENCODINGS, TensorEntry
from octavo.errors import CheckpointError
from octavo.weights.gguf_blocks import DECODERS, dequantize

PLAIN: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensor(
    entry: TensorEntry,
    dtype: torch.dtype | None = None,
    *,
    rows: slice | None = None,
    columns: slice | None = None,
) -> Tensor:
    """The tensor, or `rows` of its first and `columns` of its last dimension, as `dtype`.

    Slices have no step; a vector has rows only. Without `dtype` plain encodings keep theirs and
    block formats become float32. Block formats are rounded once, from float32. The result is
    contiguous and owns its memory. Raises CheckpointError if the file is gone or shorter than its
    header said.
    """
    assert columns is None or len(entry.shape) > 1, "a vector has no columns"
    first, last = _bounds(rows, entry.shape[0]) if entry.shape else (0, 1)
    left, right = _bounds(columns, entry.shape[-1]) if entry.shape else (0, 1)
    box = _Box(first, last, left, right)
    if first >= last or left >= right or entry.nbytes == 0:
        middle = entry.shape[1:-1] if len(entry.shape) > 1 else ()
        shape = (max(0, last - first), *middle, max(0, right - left))
        return torch.empty(shape[: max(1, len(entry.shape))], dtype=dtype or _native(entry))
    if entry.plus:
        stored = _read_box(entry, torch.float32, box)
        return (stored + entry.plus).to(dtype or _native(entry))
    if entry.interleaved_heads:
        return _read_interleaved(entry, dtype, box)
    return _read_box(entry, dtype, box)


@dataclass(frozen=True, slots=True)
class _Box:
    """Rows [first, last) of the first, columns [left, right) of the last dimension."""

    first: int
    last: int
    left: int
    right: int


def _native(entry: TensorEntry) -> torch.dtype:
    return PLAIN.get(entry.encoding, torch.float32)


def _bounds(part: slice | None, count: int) -> tuple[int, int]:
    first, last, step = (part or slice(None)).indices(count)
    assert step == 1, "slices have no step"
    return first, last


def _read_interleaved(entry: TensorEntry, dtype: torch.dtype | None, box: _Box) -> Tensor:
    """Rows of the natural order: whole heads are read and put in order."""
    height = entry.shape[0] // entry.interleaved_heads
    head, end = box.first // height, -(-box.last // height)
    whole = replace(box, first=head * height, last=end * height)
    stored = _read_box(entry, dtype, whole)
    rest = stored.shape[1:]
    pairs = stored.view(end - head, height // 2, 2, *rest)
    natural = pairs.transpose(1, 2).reshape(stored.shape)
    return natural[box.first - head * height : box.last - head * height]


def _read_box(entry: TensorEntry, dtype: torch.dtype | None, box: _Box) -> Tensor:
    """The box as stored."""
    count = entry.shape[0] if entry.shape else 1
    row = entry.nbytes // count
    raw = _map_bytes(entry, box.first * row, (box.last - box.first) * row)
    if entry.encoding in DECODERS:
        return _decode_box(entry, raw, dtype or torch.float32, box)
    stored = PLAIN[entry.encoding]
    if raw.data_ptr() % stored.itemsize:
        raw = raw.clone()  # a header of odd length leaves the tensor unaligned
    values = raw.view(stored)
    if entry.shape:
        values = values.view(box.last - box.first, *entry.shape[1:])
    else:
        values = values.view(())
    if len(entry.shape) > 1:
        values = values[..., box.left : box.right]
    return values.to(dtype or stored, copy=True, memory_format=torch.contiguous_format)


def _decode_box(entry: TensorEntry, raw: Tensor, dtype: torch.dtype, box: _Box) -> Tensor:
    """Unpacks the blocks that the columns touch, then cuts to the columns."""
    encoding = ENCODINGS[entry.encoding]
    if len(entry.shape) == 1:  # rows are the only dimension, so the blocks run along it
        raise CheckpointError(
            f"{entry.file}: vector {entry.name!r} is stored in blocks ({entry.encoding}), which "
            "is not supported"
        )
    per_row = entry.shape[-1] // encoding.block
    begin, end = box.left // encoding.block, -(-box.right // encoding.block)
    blocks = raw.view(-1, per_row, encoding.size)[:, begin:end].reshape(-1, encoding.size)
    values = dequantize(blocks, entry.encoding, dtype)
    values = values.view(box.last - box.first, *entry.shape[1:-1], (end - begin) * encoding.block)
    offset = begin * encoding.block
    return values[..., box.left - offset : box.right - offset].contiguous()


def _map_bytes(entry: TensorEntry, start: int, count: int) -> Tensor:
    """u8[count] over the mapped file. The map lives as long as the tensor does."""
    offset = entry.offset + start
    base = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with entry.file.open("rb") as stream:
            # Copy-on-write only because torch wants writable memory; nothing writes to it.
            mapped = mmap.mmap(
                stream.fileno(), offset - base + count, access=mmap.ACCESS_COPY, offset=base
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{entry.file}: tensor {entry.name!r} cannot be read ({error}); did the file change "
            "after it was opened?"
        ) from error
    return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=offset - base)
