"""Pieces of decode rows: where they begin and end, the list of them, and how they are merged.

A row's keys are cut into even parts, or into pieces of equal length that stand in a list, which is
made on the device each step. What pieces found is merged by their log-sum-exps.
Next file: `attention_newest.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention_math import LOG2_E, LOWEST
from octavo.kernels.triton.launch import pdl, power_of_2

LIST_CHUNK = 16  # pieces of the list form that are merged at once
MOST_ROWS = 512  # of a batch, as a rule: one kernel lists the pieces of all of them


@dataclass(frozen=True, slots=True)
class Pieces:
    """Where the pieces of a step are told and kept; memory that lives as long as the backend."""

    splits: int  # pieces of each row; 1 is the single form, 0 the list form
    items: Tensor  # i32[3, W] of the list form: row (-1: none), first block, last key + 1
    firsts: Tensor  # i32[R] of the list form: a row's first item
    counts: Tensor  # i32[R]: its number of items
    partial: Tensor  # f32, room for W * Q * D: what each piece found
    lse: Tensor  # f32, room for W * Q: its log-sum-exp, base 2
    arrived: Tensor  # i32[R * K] of the split form: pieces found so far, zero between launches


@triton.jit
def piece_of(length, part, splits, BN: tl.constexpr, WINDOW: tl.constexpr):
    """(first key that is seen, first key, last key + 1) of a part of a row."""
    begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    first = begin // BN if WINDOW > 0 else 0
    span = tl.cdiv(tl.cdiv(length, BN) - first, splits)
    low = (first + part * span) * BN
    return begin, low, tl.minimum(low + span * BN, length)


@triton.jit
def merged_pieces(
    partial_ptr,
    lse_ptr,
    sinks_ptr,
    first,
    count,
    heads,  # [H]
    Q: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
):
    """f32 [H, DP]: pieces first..first+count of query heads, weighed by their log-sum-exps."""
    d = tl.arange(0, DP)[None, None, :]
    best = tl.full(heads.shape, LOWEST, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if SINKS:
        best = tl.load(sinks_ptr + heads) * LOG2_E
        total += 1.0
    acc = tl.zeros([heads.shape[0], DP], tl.float32)
    for start in range(0, count, CHUNK):
        s = start + tl.arange(0, CHUNK)
        inside = (s < count)[None, :]
        at = (first + s).to(tl.int64)[None, :] * Q + heads[:, None]
        lse = tl.load(lse_ptr + at, mask=inside, other=LOWEST, cache_modifier=".cg")
        where = partial_ptr + at[:, :, None] * D + d
        mask = inside[:, :, None] & (d < D)
        part = tl.load(where, mask=mask, other=0.0, cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(lse, 1))
        weight = tl.where(lse > LOWEST, tl.exp2(lse - new_best[:, None]), 0.0)
        shrink = tl.exp2(best - new_best)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * shrink + tl.sum(weight, 1)
        best = new_best
    return acc / tl.maximum(total, 1e-30)[:, None]


@triton.jit
def merge_kernel(
    partial_ptr,  # f32 [W, Q, D]
    lse_ptr,  # f32 [W, Q]
    firsts_ptr,  # i32[R]
    counts_ptr,
    sinks_ptr,  # f32[Q], read if SINKS
    out_ptr,  # [R, Q, D]
    Q: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CHUNK: tl.constexpr,  # pieces read at once
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row and query head of the list form."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(firsts_ptr + row)
    count = tl.load(counts_ptr + row)
    heads = head + tl.arange(0, 1)
    out = merged_pieces(
        partial_ptr, lse_ptr, sinks_ptr, first, count, heads, Q, D, DP, CHUNK, SINKS
    )  # fmt: skip
    d = tl.arange(0, DP)[None, :]
    tl.store(out_ptr + (row.to(tl.int64) * Q + heads)[:, None] * D + d, out, mask=d < D)


def merge(pieces: Pieces, sinks: Tensor | None, out: Tensor) -> None:
    """What the pieces of a list found into out [R, Q, D]; `sinks` f32[Q]."""
    rows, num_heads, size = out.shape
    merge_kernel[(rows, num_heads)](
        pieces.partial,
        pieces.lse,
        pieces.firsts,
        pieces.counts,
        pieces.lse if sinks is None else sinks,
        out,
        Q=num_heads,
        D=size,
        DP=power_of_2(size),
        CHUNK=LIST_CHUNK,
        SINKS=sinks is not None,
        num_warps=4,
        **pdl(out.device),
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
    WINDOW: tl.constexpr,
    RP: tl.constexpr,  # a power of 2, R at least
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
    begin = tl.maximum(length - WINDOW, 0) // BN if WINDOW > 0 else length * 0
    blocks = tl.cdiv(length, BN) - begin
    span = tl.maximum(tl.cdiv(tl.sum(blocks, 0), pieces), 1)
    count = tl.cdiv(blocks, span)
    first = tl.sum(tl.where(r < row, count, 0), 0)
    mine = tl.sum(tl.where(r == row, count, 0), 0)
    my_length = tl.sum(tl.where(r == row, length, 0), 0)
    my_begin = tl.sum(tl.where(r == row, begin, 0), 0)
    stop = first + mine
    if row == rows:
        stop = num_items
    else:
        tl.store(firsts_ptr + row, first)
        tl.store(counts_ptr + row, mine)
    for start in range(first, stop, CHUNK):
        w = start + tl.arange(0, CHUNK)
        inside = w < stop
        low = my_begin + (w - first) * span
        tl.store(items_ptr + w, tl.where(row == rows, -1, row), mask=inside)
        tl.store(items_ptr + num_items + w, low, mask=inside)
        high = tl.minimum((low + span) * BN, my_length)
        tl.store(items_ptr + 2 * num_items + w, high, mask=inside)


def list_pieces(lens: Tensor, pieces: Pieces, *, aim: int, block: int, window: int = 0) -> None:
    """Cuts rows of `lens` i32[R] keys into about `aim` pieces of equal length; fills `pieces`.

    Pieces start at multiples of `block`; keys before a window's are in none.
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
        WINDOW=window,
        RP=max(MOST_ROWS, power_of_2(rows)),
        CHUNK=64,
        num_warps=4,
        **pdl(lens.device),
    )
