"""Attention over pages of latents (DeepSeek-V2, arXiv:2405.04434), one key for all heads.

Products lie on their side: keys are the left operand of the tensor cores and a tile's queries the
right one, so that sixteen heads of one token make a whole product. A block of latents is read
once, for scores and, as the values, for sums. One kernel serves rows of one query, by even splits
of their keys or by a list of pieces (`attention_decode.py`), and rows of many, by a list of tiles
(`attention_varlen.py`). Not for: positions, projections and the store (`latent.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.attention_decode import FP8
from octavo.kernels.triton.attention_math import LOG2_E, LOWEST
from octavo.kernels.triton.attention_pieces import Pieces
from octavo.kernels.triton.attention_varlen import Queries
from octavo.kernels.triton.launch import divide_up, gpu_of, pdl, power_of_2

SIDE = 64  # rows of a product at most: queries times heads
MAX_SPLITS, FEW = 16, 8  # half as many splits from so many rows on
UNEVEN, LONG = 1.6, 512  # as in `attention_tiles.py`


@dataclass(frozen=True, slots=True)
class LatentTile:
    """How the kernel is cut: keys a block, rows, warps, blocks in flight."""

    keys: int
    rows: int
    warps: int
    stages: int
    tma: bool = True  # pages are read by the bulk copy engine where it can


@dataclass(frozen=True, slots=True)
class LatentCut:
    """How a model's steps are cut on a device."""

    one: LatentTile  # of rows of one query
    many: LatentTile
    blocks: int  # of heads, of rows of one query
    processors: int


@triton.jit(
    do_not_specialize=["num_items", "splits", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "indptr_ptr"],
)
def latent_kernel(
    q_ptr,  # [T, Q, L + R]
    pages_ptr,  # [N, P, L + R]
    latents_desc,  # with TMA, of the pages [N * P, L + R] in blocks [BN, L] and [BN, R]
    rests_desc,
    table_ptr,  # i32[R, B]
    lens_ptr,  # i32[R]
    indptr_ptr,  # i32[R + 1], read if MANY
    items_ptr,  # i32[3, W] if LIST, i32[2, W] if MANY
    out_ptr,  # [T, Q, L]
    partial_ptr,  # f32 [R * S or W, Q, L]
    lse_ptr,  # f32 [R * S or W, Q]
    scale,
    table_stride,
    num_items,  # W
    splits,  # S
    Q: tl.constexpr,
    G: tl.constexpr,  # heads of a tile
    TOKENS: tl.constexpr,  # of a tile
    M: tl.constexpr,  # G * TOKENS or more, a power of 2
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    LIST: tl.constexpr,
    MANY: tl.constexpr,  # rows of many queries, by tiles
    TMA: tl.constexpr,  # a block lies in one page, whose cells after a row's last are finite
    WIDE: tl.constexpr,  # FP8 pages: arithmetic in f16
    PDL: tl.constexpr,
):
    """One program a head block, and a split of a row, a piece, or a tile."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    SIZE: tl.constexpr = L + R
    block = tl.program_id(0)
    m = tl.arange(0, M)
    first = 0
    if MANY:
        piece = tl.program_id(1)
        row = tl.load(items_ptr + piece)
        if row < 0:
            return
        first = tl.load(items_ptr + num_items + piece)
        start_token = tl.load(indptr_ptr + row)
        count = tl.load(indptr_ptr + row + 1) - start_token
        length = tl.load(lens_ptr + row)
        low = 0
        position = length - count + first + m // G
        high = tl.minimum(length, length - count + first + TOKENS)
        real = (first + m // G < count) & (m < TOKENS * G)
        token = start_token + first + m // G
    else:
        if LIST:
            piece = tl.program_id(1)
            row = tl.load(items_ptr + piece)
            if row < 0:
                return
            low = tl.load(items_ptr + num_items + piece) * BN
            high = tl.load(items_ptr + 2 * num_items + piece)
        else:
            row = tl.program_id(1)
            piece = row * splits + tl.program_id(2)
            length = tl.load(lens_ptr + row)
            span = tl.cdiv(tl.cdiv(length, BN), splits)
            low = tl.program_id(2) * span * BN
            high = tl.minimum(low + span * BN, length)
        position = tl.full([M], 1 << 30, tl.int32)
        real = m < G
        token = row + m * 0
    head = block * G + m % G
    real = real & (head < Q)
    c = tl.arange(0, LP)
    r = tl.arange(0, RP)
    at = (token.to(tl.int64) * Q + head)[:, None] * SIZE
    q = tl.load(q_ptr + at + c[None, :], mask=real[:, None] & (c < L)[None, :], other=0.0)
    turned = tl.load(q_ptr + at + L + r[None, :], mask=real[:, None] & (r < R)[None, :], other=0.0)
    if WIDE:
        q, turned = q.to(tl.float16), turned.to(tl.float16)
    best = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([LP, M], tl.float32)
    factor = scale * LOG2_E
    row_table = table_ptr + row.to(tl.int64) * table_stride
    for start in range(low, high, BN):
        key = start + tl.arange(0, BN)
        seen = key < high
        if TMA:
            cell = tl.load(row_table + start // P) * P + start % P
            latent = latents_desc.load([cell, 0])
            rest = rests_desc.load([cell, L])
        else:
            if BN <= P:
                page = tl.load(row_table + start // P).to(tl.int64)
                place = page * P + start % P + tl.arange(0, BN)
            else:
                page = tl.load(row_table + tl.minimum(key, high - 1) // P).to(tl.int64)
                place = page * P + key % P
            where = pages_ptr + place[:, None] * SIZE
            latent = tl.load(where + c[None, :], mask=seen[:, None] & (c < L)[None, :], other=0.0)
            rest = tl.load(where + L + r[None, :], mask=seen[:, None] & (r < R)[None, :], other=0.0)
        latent, rest = latent.to(q.dtype), rest.to(q.dtype)
        score = tl.dot(latent, tl.trans(q), input_precision="ieee")
        score = tl.dot(rest, tl.trans(turned), score, input_precision="ieee")
        if MANY:
            visible = key[:, None] <= position[None, :]
        else:
            visible = seen[:, None]
        score = tl.where(visible, score * factor, LOWEST)
        new_best = tl.maximum(best, tl.max(score, 0))
        weight = tl.exp2(score - new_best[None, :])
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weight, 0)
        best = new_best
        acc = tl.dot(
            tl.trans(latent), weight.to(q.dtype), acc * shrink[None, :], input_precision="ieee"
        )
    found = acc / tl.maximum(total, 1e-30)[None, :]
    kept = (c < L)[:, None] & real[None, :]
    to = (token.to(tl.int64) * Q + head)[None, :] * L + c[:, None]
    if LIST:
        alone = False
    else:
        alone = MANY or splits == 1
    if alone:
        tl.store(out_ptr + to, found, mask=kept)
    else:
        slot = piece.to(tl.int64) * Q + head
        part = partial_ptr + slot[None, :] * L + c[:, None]
        tl.store(part, found, mask=kept, cache_modifier=".cg")
        lse = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-30)), LOWEST)
        tl.store(lse_ptr + slot, lse, mask=real, cache_modifier=".cg")


def tokens_of_tile(num_heads: int, rows: int) -> int:
    """Tokens of a row that a tile of so many rows takes, if the row has many."""
    return max(1, rows // num_heads)


def cut_of(num_heads: int, item_bytes: int, processors: int) -> LatentCut:
    """A good cut on an H200."""
    if item_bytes == 4:
        tile = LatentTile(keys=16, rows=16, warps=4, stages=1, tma=False)
        return LatentCut(tile, tile, divide_up(num_heads, 16), processors)
    rows = max(16, min(SIDE, power_of_2(num_heads)))
    blocks = divide_up(num_heads, rows)
    if item_bytes == 1:
        # Numbers of a byte are widened on their way, which the copy engine's path does not take.
        one = LatentTile(keys=32, rows=rows, warps=4, stages=3, tma=False)
        many = LatentTile(keys=64, rows=SIDE, warps=8, stages=2, tma=False)
        if rows > 16:
            return LatentCut(replace(many, rows=rows), many, blocks, processors)
        return LatentCut(one, many, blocks, 2 * processors)  # two programs fit on one
    one = LatentTile(keys=64, rows=rows, warps=4 if rows <= 32 else 8, stages=2)
    many = LatentTile(keys=64, rows=max(rows, SIDE // 2), warps=4 if rows <= 32 else 8, stages=2)
    return LatentCut(one, many, blocks, processors)


def splits_of(rows: int, cut: LatentCut) -> int:
    """Even pieces of each row, a power of 2: enough that most processors have a program."""
    most = cut.processors // (rows * cut.blocks)
    return 1 << (max(1, min(MAX_SPLITS if rows < FEW else MAX_SPLITS // 2, most)).bit_length() - 1)


def aim_of(rows: int, cut: LatentCut) -> int:
    """Pieces of the list form."""
    return max(1, max(2 * cut.processors, 2 * rows) // cut.blocks)


def room_of(max_rows: int, cut: LatentCut) -> int:
    """Most pieces that any choice for up to `max_rows` rows makes."""
    choices = range(1, max_rows + 1)
    return max(max(aim_of(rows, cut) + rows, rows * splits_of(rows, cut)) for rows in choices)


def is_uneven(lens: NDArray[np.int32], cut: LatentCut) -> bool:
    """Whether the list form serves rows of these lengths better than even splits."""
    if len(lens) == 0:
        return False
    share = float(lens.sum()) * cut.blocks / cut.processors
    return float(lens.max()) / splits_of(len(lens), cut) > max(UNEVEN * share, LONG)


def attend_one(
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lens: Tensor,
    pieces: Pieces,
    tile: LatentTile,
    scale: float,
    out: Tensor,
) -> None:
    """Rows of one query each: q [R, Q, L + R] over pages [N, P, L + R] into out [R, Q, L].

    `lens` i32[R] counts the keys of each row, the newest included; they are stored already. With
    more than one piece a row results are left in the pieces: see `attention_pieces.py`.
    """
    rows, num_heads, _ = q.shape
    listed = pieces.splits == 0
    num_items = pieces.items.shape[1]
    heads = min(num_heads, tile.rows)
    blocks = divide_up(num_heads, heads)
    grid = (blocks, num_items) if listed else (blocks, rows, pieces.splits)
    _launch(
        grid, q, pages, table, lens, lens, pieces.items, out, pieces, tile, scale, heads, 1,
        listed=listed, many=False,
    )  # fmt: skip


def attend_many(
    q: Tensor, pages: Tensor, queries: Queries, tile: LatentTile, scale: float, out: Tensor
) -> None:
    """Rows of any number of queries: q [T, Q, L + R] over pages [N, P, L + R] into out [T, Q, L].

    A row's queries are the last of its keys; its tiles have `tokens_of_tile` tokens each.
    """
    num_heads = q.shape[1]
    heads = min(num_heads, tile.rows)
    blocks = divide_up(num_heads, heads)
    tokens = tokens_of_tile(num_heads, tile.rows)
    grid = (blocks, queries.tiles.shape[1])
    _launch(
        grid, q, pages, queries.table, queries.lens, queries.indptr, queries.tiles, out, None,
        tile, scale, heads, tokens, listed=False, many=True,
    )  # fmt: skip


def _launch(
    grid: tuple[int, ...],
    q: Tensor,
    pages: Tensor,
    table: Tensor,
    lens: Tensor,
    indptr: Tensor,
    items: Tensor,
    out: Tensor,
    pieces: Pieces | None,
    tile: LatentTile,
    scale: float,
    heads: int,
    tokens: int,
    *,
    listed: bool,
    many: bool,
) -> None:
    _, num_heads, size = q.shape
    rank = out.shape[2]
    tma = can_use_tma(pages, rank, tile)
    cells = pages.view(-1, size)
    latent_kernel[grid](
        q,
        pages,
        TensorDescriptor.from_tensor(cells, [tile.keys, rank]) if tma else pages,
        TensorDescriptor.from_tensor(cells, [tile.keys, size - rank]) if tma else pages,
        table,
        lens,
        indptr,
        items,
        out,
        out if pieces is None else pieces.partial,
        out if pieces is None else pieces.lse,
        scale,
        table.stride(0),
        items.shape[1],
        1 if pieces is None else max(1, pieces.splits),
        Q=num_heads,
        G=heads,
        TOKENS=tokens,
        M=max(16, power_of_2(heads * tokens)),
        L=rank,
        LP=max(16, power_of_2(rank)),
        R=size - rank,
        RP=max(16, power_of_2(size - rank)),
        P=pages.shape[1],
        BN=tile.keys,
        LIST=listed,
        MANY=many,
        TMA=tma,
        WIDE=pages.dtype in FP8,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl(q.device),
    )


def can_use_tma(pages: Tensor, rank: int, tile: LatentTile) -> bool:
    """Whether the bulk copy engine reads these pages [N, P, L + R]: a block lies in one page."""
    _, page, size = pages.shape
    whole = power_of_2(rank) == rank and power_of_2(size - rank) == size - rank >= 16
    fits = page % tile.keys == 0 and pages.numel() // size < 2**31
    return whole and fits and tile.tma and gpu_of(pages.device).pdl
