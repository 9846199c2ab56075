"""Paged causal attention of rows with any number of queries: prefills, chunks, mixed batches.

A program owns a tile of BM product rows: the queries of BM / G tokens, all G heads of one key head
each, so keys and values are read once for the group and a decode row wastes no reads. Rows of a
step are found by a list of tiles made on the device once a step, those with most keys first.
Blocks of keys before the diagonal need no mask. Next file: `attention_hopper.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.attention_decode import FP8, Heads, Tile
from octavo.kernels.triton.attention_math import (
    LOG2_E,
    LOWEST,
    attend_block,
    load_block,
    page_offsets,
)
from octavo.kernels.triton.attention_pieces import MOST_ROWS
from octavo.kernels.triton.launch import gpu_of, pdl, power_of_2

TMA_TOKENS = 256  # from here on the copy engine's gain outweighs its longer launch


@triton.jit(
    do_not_specialize=["rows", "num_tiles"],
    do_not_specialize_on_alignment=["indptr_ptr", "lens_ptr"],
)
def tiles_kernel(
    indptr_ptr,  # i32[R+1]
    lens_ptr,  # i32[R]
    tiles_ptr,  # i32[2, tiles]
    rows,
    num_tiles,
    TOKENS: tl.constexpr,  # of a tile
    RP: tl.constexpr,  # a power of 2, R at least
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r < R places the tiles of row r; program R marks the unused rest of the list.

    A tile's place is the number of tiles that see more keys, which each row tells by arithmetic:
    its tiles see TOKENS more keys one after another.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    r = tl.arange(0, RP)
    start = tl.load(indptr_ptr + r, mask=r < rows, other=0)
    queries = tl.load(indptr_ptr + r + 1, mask=r < rows, other=0) - start
    before = tl.load(lens_ptr + r, mask=r < rows, other=0) - queries
    count = tl.cdiv(queries, TOKENS)
    if row == rows:
        for first in range(tl.sum(count, 0), num_tiles, CHUNK):
            place = first + tl.arange(0, CHUNK)
            tl.store(tiles_ptr + place, -1, mask=place < num_tiles)
    else:
        my_count = tl.sum(tl.where(r == row, count, 0), 0)
        my_before = tl.sum(tl.where(r == row, before, 0), 0)
        for first in range(0, my_count, CHUNK):
            tile = first + tl.arange(0, CHUNK)
            ahead = (my_before + (tile + 1) * TOKENS)[:, None] - before[None, :]
            fewer = tl.minimum(tl.maximum(ahead // TOKENS, 0), count[None, :])
            alike = (ahead == fewer * TOKENS) & (fewer > 0) & (r < row)[None, :]
            place = tl.sum(count[None, :] - fewer + alike.to(tl.int32), 1)
            tl.store(tiles_ptr + place, row, mask=tile < my_count)
            tl.store(tiles_ptr + num_tiles + place, tile * TOKENS, mask=tile < my_count)


@triton.jit
def _load_pair(
    keys, values, row_table, head, block, stop, page_stride, head_stride,
    P: tl.constexpr, BN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    K: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Keys and values block..block+BN of a row, [BN, DP] each."""
    if TMA:
        page = tl.load(row_table + block // P)
        cell = (page * K + head) * P + block % P
        return keys.load([cell, 0]), values.load([cell, 0])
    else:
        offsets = page_offsets(row_table, block, stop, page_stride, P, BN, D)
        offsets += head.to(tl.int64) * head_stride
        return load_block(keys, offsets, D, DP), load_block(values, offsets, D, DP)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "indptr_ptr", "lens_ptr"],
)
def varlen_kernel(
    q_ptr,  # [T, Q, D]
    keys_ptr,  # [N, K, P, D]
    values_ptr,
    table_ptr,  # i32[R, B]
    indptr_ptr,  # i32[R+1]
    lens_ptr,  # i32[R]
    tiles_ptr,  # i32[2, tiles]
    out_ptr,  # [T, Q, D]
    sinks_ptr,  # f32[Q], read if SINKS
    scale,
    value_scale,
    page_stride,
    head_stride,
    table_stride,
    Q: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    K: tl.constexpr,
    TMA: tl.constexpr,  # keys_ptr and values_ptr are descriptors of [N * K * P, D], blocks [BN, D]
    WIDE: tl.constexpr,  # FP8 pages: arithmetic in f16
    PDL: tl.constexpr,
):
    """One program a tile and key head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + tile)
    if row < 0:
        return
    first = tl.load(tiles_ptr + tl.num_programs(1) + tile)  # token within the row
    TOKENS: tl.constexpr = BM // G
    q_start = tl.load(indptr_ptr + row)
    q_len = tl.load(indptr_ptr + row + 1) - q_start
    length = tl.load(lens_ptr + row)
    m = tl.arange(0, BM)
    token = first + m // G
    d = tl.arange(0, DP)
    inside = ((token < q_len) & (m < TOKENS * G))[:, None] & (d < D)[None, :]
    at = ((q_start + token).to(tl.int64) * Q + head * G + m % G)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    if WIDE:
        q = q.to(tl.float16)
    position = length - q_len + token
    first_position = length - q_len + first
    stop = tl.minimum(length, first_position + TOKENS)
    if WINDOW > 0:
        start = tl.maximum(first_position - WINDOW + 1, 0) // BN * BN
        masked_from = start
    else:
        start = 0
        masked_from = (first_position + 1) // BN * BN
    if SINKS:
        best = tl.load(sinks_ptr + head * G + m % G) * LOG2_E
        total = tl.full([BM], 1.0, tl.float32)
    else:
        best = tl.full([BM], LOWEST, tl.float32)
        total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, DP], tl.float32)
    row_table = table_ptr + row.to(tl.int64) * table_stride
    for block in range(start, masked_from, BN):
        k, v = _load_pair(
            keys_ptr, values_ptr, row_table, head, block, stop, page_stride, head_stride,
            P, BN, D, DP, K, TMA,
        )  # fmt: skip
        acc, total, best = attend_block(acc, total, best, q, k, v, inside, scale, CAP, False)
    for block in range(masked_from, stop, BN):
        k, v = _load_pair(
            keys_ptr, values_ptr, row_table, head, block, stop, page_stride, head_stride,
            P, BN, D, DP, K, TMA,
        )  # fmt: skip
        key_position = block + tl.arange(0, BN)
        visible = key_position[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key_position[None, :] > position[:, None] - WINDOW)
        acc, total, best = attend_block(acc, total, best, q, k, v, visible, scale, CAP, True)
    out = acc * (value_scale / tl.maximum(total, 1e-30))[:, None]
    tl.store(out_ptr + at, out, mask=inside)


@dataclass(frozen=True, slots=True)
class Queries:
    """Rows of any number of queries: where they are, and the tiles that cover them."""

    indptr: Tensor  # i32[R+1]
    lens: Tensor  # i32[R]
    table: Tensor  # i32[R, B]
    tiles: Tensor  # i32[2, tiles]: row (-1: none) and first token within it, most keys first


def tile_count(tokens: int, rows: int, tile_rows: int, group: int) -> int:
    """Tiles that `rows` rows with `tokens` queries in all may need."""
    return tokens // (tile_rows // group) + rows


def list_tiles(queries: Queries, *, tile_rows: int, group: int) -> None:
    """Fills `tiles` i32[2, tile_count] for rows which may start at any token."""
    rows, tiles = queries.lens.shape[0], queries.tiles
    tiles_kernel[(rows + 1,)](
        queries.indptr,
        queries.lens,
        tiles,
        rows,
        tiles.shape[1],
        TOKENS=tile_rows // group,
        RP=max(MOST_ROWS, power_of_2(rows)),
        CHUNK=16,
        num_warps=4,
        **pdl(tiles.device),
    )


def varlen(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Queries,
    heads: Heads,
    tile_rows: int,
    tile: Tile,
    out: Tensor,
    *,
    tma: bool | None = None,
) -> None:
    """Attention of q [T, Q, D] over pages [N, K, P, D] into out [T, Q, D], causal.

    A row's queries are the last of its `lens` keys, which are stored already. `tma` reads pages
    by the bulk copy engine; None: where it can and the work is worth the longer launch.
    """
    _, num_heads, size = q.shape
    _, kv_heads, page, _ = keys.shape
    if tma is None:
        tma = q.shape[0] >= TMA_TOKENS and can_use_tma(keys, tile)
    varlen_kernel[(kv_heads, queries.tiles.shape[1])](
        q,
        _describe(keys, tile) if tma else keys,
        _describe(values, tile) if tma else values,
        queries.table,
        queries.indptr,
        queries.lens,
        queries.tiles,
        out,
        queries.lens if heads.sinks is None else heads.sinks,
        heads.scale,
        heads.value_scale,
        keys.stride(0),
        keys.stride(1),
        queries.table.stride(0),
        Q=num_heads,
        G=num_heads // kv_heads,
        D=size,
        DP=power_of_2(size),
        P=page,
        BM=tile_rows,
        BN=tile.keys,
        WINDOW=heads.window,
        CAP=heads.soft_cap,
        SINKS=heads.sinks is not None,
        K=kv_heads,
        TMA=tma,
        WIDE=keys.dtype in FP8,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **pdl(q.device),
    )


def can_use_tma(pages: Tensor, tile: Tile) -> bool:
    """Whether the bulk copy engine reads these pages [N, K, P, D]: a block lies in one page."""
    _, _, page, size = pages.shape
    whole = page % tile.keys == 0 and power_of_2(size) == size
    return whole and gpu_of(pages.device).pdl and pages.numel() // size < 2**31


def _describe(pages: Tensor, tile: Tile) -> TensorDescriptor:
    """Pages [N, K, P, D] as cells [N * K * P, D] that are copied in blocks of `tile.keys`."""
    cells = pages.view(-1, pages.shape[-1])
    return TensorDescriptor.from_tensor(cells, [tile.keys, pages.shape[-1]])
