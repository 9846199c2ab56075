"""Paged attention of rows with one query each: one pass, split keys, or a list of pieces.

All heads that share a key head are rows of one product (grouped-query packing), so keys and values
are read once. Three forms, after PagedAttention (Kwon et al. 2023, arXiv:2309.06180) and
Flash-Decoding (Dao et al. 2023):

    single  one program a row and key head, no merge (v1)
    split   each row's keys in `splits` even pieces, merged by their log-sum-exp (v2)
    list    pieces of equal length from a list made on the device each step: rows of very
            different lengths keep all processors busy; without a window

Lengths are read on the device alone, so a captured graph serves any lengths. A row of length 0 is
padding and gives zeros. Next file: `attention_plan.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention_math import (
    LOWEST,
    attend_block,
    load_block,
    page_offsets,
    weights_of,
    widen_pairs,
)
from octavo.kernels.triton.launch import pdl, power_of_2

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer asks of attention: sizes and rules."""

    num_heads: int
    scale: float
    window: int = 0  # 0 is none
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is cut: keys a block, warps a program, blocks in flight."""

    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the pieces of a step are told and kept; memory that lives as long as the backend."""

    splits: int  # pieces of each row; 1 is the single form, 0 the list form
    items: Tensor  # i32[3, W] of the list form: row (-1: none), first block, last key + 1
    firsts: Tensor  # i32[R] of the list form: a row's first item
    counts: Tensor  # i32[R]: its number of items
    partial: Tensor  # f32, room for W * Q * D: what each piece found
    lse: Tensor  # f32, room for W * Q: its log-sum-exp, base 2


@triton.jit(
    do_not_specialize=["num_items", "splits", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr"],
)
def decode_kernel(
    q_ptr,  # [R, Q, D]
    keys_ptr,  # [N, K, P, D]
    values_ptr,
    table_ptr,  # i32[R, B]
    lens_ptr,  # i32[R]
    items_ptr,  # i32[3, W], read if LIST
    out_ptr,  # [R, Q, D]
    partial_ptr,  # f32 [R * S or W, Q, D]
    lse_ptr,  # f32 [R * S or W, Q]
    scale,
    page_stride,
    head_stride,
    table_stride,
    num_items,  # W
    splits,  # S
    Q: tl.constexpr,
    G: tl.constexpr,  # query heads a key head
    GP: tl.constexpr,  # G rounded up to a power of 2, 16 at least
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    FORM: tl.constexpr,  # 0 single, 1 split, 2 list
    WIDE: tl.constexpr,  # FP8 pages: arithmetic in f16
    PAIRS: tl.constexpr,  # values_ptr is of int16, two FP8 numbers each
    E4M3: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece and key head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    if FORM == 2:
        piece = tl.program_id(0)
        row = tl.load(items_ptr + piece)
        if row < 0:
            return
        low = tl.load(items_ptr + num_items + piece) * BN
        high = tl.load(items_ptr + 2 * num_items + piece)
        begin = 0
    else:
        row = tl.program_id(0)
        piece = row * splits + tl.program_id(2)
        length = tl.load(lens_ptr + row)
        begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
        first = begin // BN if WINDOW > 0 else 0
        if FORM == 0:
            low = first * BN
            high = length
        else:
            span = tl.cdiv(tl.cdiv(length, BN) - first, splits)
            low = (first + tl.program_id(2) * span) * BN
            high = tl.minimum(low + span * BN, length)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    inside = (g < G)[:, None] & (d < D)[None, :]
    at = (head * G + g)[:, None] * D + d[None, :]
    q = tl.load(q_ptr + row.to(tl.int64) * Q * D + at, mask=inside, other=0.0)
    if WIDE:
        q = q.to(tl.float16)
    best = tl.full([GP], LOWEST, tl.float32)
    total = tl.zeros([GP], tl.float32)
    row_table = table_ptr + row.to(tl.int64) * table_stride
    key_ptr = keys_ptr + head.to(tl.int64) * head_stride
    if PAIRS:
        acc = tl.zeros([GP, DP // 2], tl.float32)  # even d
        value_ptr = values_ptr + head.to(tl.int64) * (head_stride // 2)
    else:
        acc = tl.zeros([GP, DP], tl.float32)
        value_ptr = values_ptr + head.to(tl.int64) * head_stride
    odd = acc  # odd d, if PAIRS
    for start in range(low, high, BN):
        position = start + tl.arange(0, BN)
        offsets = page_offsets(row_table, start, high, page_stride, P, BN, D)
        visible = position < high
        if WINDOW > 0:
            visible = visible & (position >= begin)
        k = load_block(key_ptr, offsets, D, DP)
        if PAIRS:
            v = load_block(value_ptr, offsets // 2, D // 2, DP // 2)
            weight, shrink, total, best = weights_of(
                total, best, q, k, visible[None, :], scale, CAP, True
            )
            v_even, v_odd = widen_pairs(v, E4M3)
            weight = weight.to(tl.float16)
            acc = tl.dot(weight, v_even, acc * shrink[:, None])
            odd = tl.dot(weight, v_odd, odd * shrink[:, None])
        else:
            v = load_block(value_ptr, offsets, D, DP)
            acc, total, best = attend_block(
                acc, total, best, q, k, v, visible[None, :], scale, CAP, True
            )
    if PAIRS:
        acc = tl.interleave(acc, odd)
    out = acc / tl.maximum(total, 1e-30)[:, None]
    if FORM == 0:
        tl.store(out_ptr + row.to(tl.int64) * Q * D + at, out, mask=inside)
    else:
        at_piece = piece.to(tl.int64) * Q
        tl.store(partial_ptr + at_piece * D + at, out, mask=inside)
        lse = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-30)), LOWEST)
        tl.store(lse_ptr + at_piece + head * G + g, lse, mask=g < G)


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    partial_ptr,  # f32 [pieces, Q, D]
    lse_ptr,  # f32 [pieces, Q]
    firsts_ptr,  # i32[R], read if LIST
    counts_ptr,
    out_ptr,  # [R, Q, D]
    splits,
    Q: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,  # pieces read at once
    LIST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row and query head: the pieces' results, weighed by their log-sum-exps."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    if LIST:
        first = tl.load(firsts_ptr + row)
        count = tl.load(counts_ptr + row)
    else:
        first = row * splits
        count = splits
    d = tl.arange(0, DP)
    best = LOWEST
    total = 0.0
    acc = tl.zeros([DP], tl.float32)
    for start in range(0, count, CHUNK):
        s = start + tl.arange(0, CHUNK)
        inside = s < count
        at = (first + s).to(tl.int64) * Q + head
        lse = tl.load(lse_ptr + at, mask=inside, other=LOWEST)
        mask = inside[:, None] & (d < D)[None, :]
        part = tl.load(partial_ptr + at[:, None] * D + d[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, tl.max(lse, 0))
        weight = tl.where(lse > LOWEST, tl.exp2(lse - new_best), 0.0)
        shrink = tl.exp2(best - new_best)
        acc = acc * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        best = new_best
    out = acc / tl.maximum(total, 1e-30)
    tl.store(out_ptr + (row.to(tl.int64) * Q + head) * D + d, out, mask=d < D)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lens: Tensor,
    heads: Heads,
    pieces: Pieces,
    tile: Tile,
    out: Tensor,
) -> None:
    """Attention of q [R, Q, D] over pages [N, K, P, D] by table i32[R, B] into out [R, Q, D].

    `lens` i32[R] counts the keys of each row, the newest included; they are stored already.
    """
    rows, num_heads, size = q.shape
    _, kv_heads, page, _ = keys.shape
    form = 2 if pieces.splits == 0 else min(1, pieces.splits - 1)
    num_items = pieces.items.shape[1]
    splits = max(1, pieces.splits)
    grid = (num_items, kv_heads) if form == 2 else (rows, kv_heads, splits)
    group = num_heads // kv_heads
    early = pdl(q.device)
    pairs = keys.dtype in FP8 and early["PDL"]
    decode_kernel[grid](
        q,
        keys,
        values.view(torch.int16) if pairs else values,
        table,
        lens,
        pieces.items,
        out,
        pieces.partial,
        pieces.lse,
        heads.scale,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        num_items,
        splits,
        Q=num_heads,
        G=group,
        GP=max(16, power_of_2(group)),
        D=size,
        DP=power_of_2(size),
        P=page,
        BN=tile.keys,
        WINDOW=heads.window,
        CAP=heads.soft_cap,
        FORM=form,
        WIDE=keys.dtype in FP8,
        PAIRS=pairs,
        E4M3=keys.dtype == torch.float8_e4m3fn,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early,
    )
    if form == 0:
        return
    merge_kernel[(rows, num_heads)](
        pieces.partial,
        pieces.lse,
        pieces.firsts,
        pieces.counts,
        out,
        splits,
        Q=num_heads,
        D=size,
        DP=power_of_2(size),
        CHUNK=16 if form == 2 else min(16, power_of_2(splits)),
        LIST=form == 2,
        num_warps=4,
        **early,
    )


@triton.jit(
    do_not_specialize=["rows", "num_items", "pieces"],
    do_not_specialize_on_alignment=["lens_ptr"],
)
def list_kernel(
    lens_ptr,  # i32[R]
    items_ptr,  # i32[3, W]
    firsts_ptr,  # i32[R]
    counts_ptr,  # i32[R]
    rows,
    num_items,  # W
    pieces,  # aimed at; W is at least pieces + R
    BN: tl.constexpr,
    RP: tl.constexpr,  # R rounded up to a power of 2
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r < R writes the items of row r; program R marks the unused rest of the list."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    r = tl.arange(0, RP)
    length = tl.load(lens_ptr + r, mask=r < rows, other=0)
    blocks = tl.cdiv(length, BN)
    span = tl.maximum(tl.cdiv(tl.sum(blocks, 0), pieces), 1)
    count = tl.cdiv(blocks, span)
    first = tl.sum(tl.where(r < row, count, 0), 0)
    mine = tl.sum(tl.where(r == row, count, 0), 0)
    my_length = tl.sum(tl.where(r == row, length, 0), 0)
    stop = first + mine
    if row == rows:
        stop = num_items
    else:
        tl.store(firsts_ptr + row, first)
        tl.store(counts_ptr + row, mine)
    for start in range(first, stop, CHUNK):
        w = start + tl.arange(0, CHUNK)
        inside = w < stop
        low = (w - first) * span
        tl.store(items_ptr + w, tl.where(row == rows, -1, row), mask=inside)
        tl.store(items_ptr + num_items + w, low, mask=inside)
        high = tl.minimum((low + span) * BN, my_length)
        tl.store(items_ptr + 2 * num_items + w, high, mask=inside)


def list_pieces(lens: Tensor, pieces: Pieces, *, aim: int, block: int) -> None:
    """Cuts rows of `lens` i32[R] keys into about `aim` pieces of equal length; fills `pieces`.

    Pieces start at multiples of `block`. There is no window in this form.
    """
    rows, num_items = lens.shape[0], pieces.items.shape[1]
    assert num_items >= aim + rows, (num_items, aim, rows)
    list_kernel[(rows + 1,)](
        lens,
        pieces.items,
        pieces.firsts,
        pieces.counts,
        rows,
        num_items,
        aim,
        BN=block,
        RP=power_of_2(rows),
        CHUNK=64,
        num_warps=4,
        **pdl(lens.device),
    )
