"""Which form and which tile an attention kernel takes: figures measured on an H200.

Pure arithmetic on sizes; the host chooses by these before a launch. Not for: kernels.
Next file: `octavo/attention/triton.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.triton.attention_decode import Tile
from octavo.kernels.triton.launch import power_of_2

MAX_SPLITS = 16
PROGRAMS = 4  # of a processor: so many keep its reads busy, and more splits cost more
HOPPER_ROWS = 128  # product rows of a tile of the kernel for Hopper
SHORT = 1024  # queries: up to so many, small tiles keep more processors busy
# A batch is uneven if a piece of its longest row is so many times a program's even share.
UNEVEN = 1.6
LONG = 512  # keys: pieces that are no longer take so little that their evenness does not matter


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What the choice of a decode form rests on."""

    kv_heads: int
    head_dim: int
    page: int
    item_bytes: int  # of a key's element
    processors: int


def is_uneven(lens: NDArray[np.int32], shape: DecodeShape) -> bool:
    """Whether the list form serves rows of these lengths better than even splits."""
    if len(lens) == 0:
        return False
    share = float(lens.sum()) * shape.kv_heads / (PROGRAMS * shape.processors)
    return float(lens.max()) / splits_of(len(lens), shape) > max(UNEVEN * share, LONG)


def splits_of(rows: int, shape: DecodeShape) -> int:
    """Even pieces of each row: enough that every processor has programs, 1 once rows suffice."""
    wanted = PROGRAMS * shape.processors
    return max(1, min(MAX_SPLITS, wanted // (rows * shape.kv_heads)))


def turns_newest(rows: int, shape: DecodeShape, *, norms: bool) -> bool:
    """Whether attention of even rows should turn and store the newest tokens itself.

    That saves a launch, and costs each program a while, more with head norms: 1 % of a step of 64
    rows is gained, or with norms of 16, and 4 % of one of 256 are lost.
    """
    programs = rows * shape.kv_heads * splits_of(rows, shape)
    return programs * (2 if norms else 1) <= PROGRAMS * shape.processors


def lists_windows(rows: int, window: int, shape: DecodeShape) -> bool:
    """Whether layers with a window take the list form in an uneven step of so many rows."""
    return window / splits_of(rows, shape) > LONG


def aim_of(rows: int, shape: DecodeShape) -> int:
    """Pieces of the list form: more for more rows, as their ends leave processors idle."""
    programs = min(max(4 * rows * shape.kv_heads, 4 * shape.processors), 16 * shape.processors)
    return max(1, programs // shape.kv_heads)


def room_of(max_rows: int, shape: DecodeShape) -> int:
    """Most pieces that any choice for up to `max_rows` rows makes."""
    choices = range(1, max_rows + 1)
    return max(max(aim_of(rows, shape) + rows, rows * splits_of(rows, shape)) for rows in choices)


def decode_tile(shape: DecodeShape) -> Tile:
    """The best of a dozen, or near it, for even and for uneven rows, bf16 and FP8."""
    keys = min(64, shape.page)
    if shape.head_dim > 128:
        return Tile(min(32, keys), 4, 2)
    return Tile(keys, 2, 3, masked=True)


def is_for_hopper(units: int, longest: int, keys: int, processors: int) -> bool:
    """Whether the kernel for Hopper is faster, where it can serve at all.

    `units` are its tiles times key heads; the longest row has so many queries and keys. Its tiles
    are large, and its code is: it needs more than a round of them, or long rows of keys.
    """
    return longest >= 32 and (2 * units >= 3 * processors or keys >= 2048)


def varlen_tile(head_dim: int, item_bytes: int, group: int, longest: int) -> tuple[int, Tile]:
    """(product rows of a program, its tile) for rows of up to `longest` queries."""
    if item_bytes == 4:
        return max(16, 2 * power_of_2(group)), Tile(32, 4, 1)
    if head_dim > 128:
        return 64, Tile(32, 4, 2)
    return (128 if longest > SHORT else 64), Tile(64, 4, 3)
