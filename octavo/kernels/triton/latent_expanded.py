"""Latent attention of long prompts with keys and values made of the latents, a head at a time.

Multiplying by latents costs three times what multiplying by a head's own keys and values does, so
that for many queries it pays to make them: the latents of a step's rows are gathered from the
pages, multiplied by both factors, and attended over in plain memory. Not for: steps that are
captured, as the host must know how many keys there are.
Next file: `octavo/attention/mla_triton.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention_math import LOG2_E, LOWEST
from octavo.kernels.triton.attention_pieces import MOST_ROWS
from octavo.kernels.triton.attention_varlen import Queries
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2

GATHERED = 64  # keys that a program gathers
ROWS = 128  # queries of a tile


@triton.jit(
    do_not_specialize=["rows", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr"],
)
def gather_kernel(
    pages_ptr,  # [N * P, L + R]
    table_ptr,  # i32[R, B]
    lens_ptr,  # i32[R]
    latents_ptr,  # [K, L]
    rests_ptr,  # [K, R]
    starts_ptr,  # i32[R]: where each row's keys begin
    rows,
    table_stride,
    P: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row and BN of its keys."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    r = tl.arange(0, ROWS)
    lens = tl.load(lens_ptr + r, mask=r < rows, other=0)
    start = tl.sum(tl.where(r < row, lens, 0), 0)
    length = tl.sum(tl.where(r == row, lens, 0), 0)
    if tl.program_id(1) == 0:
        tl.store(starts_ptr + row, start)
    key = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = key < length
    page = tl.load(table_ptr + row.to(tl.int64) * table_stride + key // P, mask=inside, other=0)
    cell = pages_ptr + (page.to(tl.int64) * P + key % P)[:, None] * (L + R)
    to = (start + key).to(tl.int64)[:, None]
    c = tl.arange(0, LP)[None, :]
    d = tl.arange(0, RP)[None, :]
    dtype = latents_ptr.dtype.element_ty
    kept = inside[:, None] & (c < L)
    tl.store(latents_ptr + to * L + c, tl.load(cell + c, mask=kept).to(dtype), mask=kept)
    kept = inside[:, None] & (d < R)
    tl.store(rests_ptr + to * R + d, tl.load(cell + L + d, mask=kept).to(dtype), mask=kept)


@triton.jit
def _attend(
    acc, total, best, q, first, second, k_ptr, v_ptr, rests_ptr, key, stop, position, factor,
    C: tl.constexpr, CP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(acc, total, best) after the keys `key` [BN] of a row."""
    c = tl.arange(0, CP)[None, :]
    e = tl.arange(0, VP)[None, :]
    d = tl.arange(0, RP)[None, :]
    there = (key < stop)[:, None]
    at = key.to(tl.int64)[:, None]
    k = tl.load(k_ptr + at * C + c, mask=there & (c < C), other=0.0)
    v = tl.load(v_ptr + at * V + e, mask=there & (e < V), other=0.0)
    in_half = there & (d < R // 2)
    one = tl.load(rests_ptr + at * R + d, mask=in_half, other=0.0)
    other = tl.load(rests_ptr + at * R + R // 2 + d, mask=in_half, other=0.0)
    score = tl.dot(q, tl.trans(k))
    score = tl.dot(first, tl.trans(one), score)
    score = tl.dot(second, tl.trans(other), score)
    if MASKED:
        score = tl.where(key[None, :] <= position[:, None], score * factor, LOWEST)
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
    else:
        # The factor is above 0, so it may come after the maximum, and into one instruction.
        new_best = tl.maximum(best, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return acc, total * shrink + tl.sum(weight, 1), new_best


@triton.jit(do_not_specialize=["keys"], do_not_specialize_on_alignment=["indptr_ptr", "lens_ptr"])
def expanded_kernel(
    heads_ptr,  # [T, Q * (C + R)], not rotated
    k_ptr,  # [Q, K, C]
    v_ptr,  # [Q, K, V]
    rests_ptr,  # [K, R]
    table_ptr,  # f32[max_len, R]
    indptr_ptr,  # i32[R + 1]
    lens_ptr,  # i32[R]
    starts_ptr,  # i32[R]
    tiles_ptr,  # i32[2, W]
    out_ptr,  # [T, Q, V]
    scale,
    keys,  # K
    heads_stride,
    Q: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,  # R / 2 rounded up to a power of 2, 16 at least
    BM: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head and a tile of queries of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = tl.load(tiles_ptr + tile)
    if row < 0:
        return
    begin = tl.load(tiles_ptr + tl.num_programs(1) + tile)
    start_token = tl.load(indptr_ptr + row)
    count = tl.load(indptr_ptr + row + 1) - start_token
    length = tl.load(lens_ptr + row)
    m = begin + tl.arange(0, BM)
    inside = m < count
    position = length - count + m
    low = length - count + begin  # the position of the tile's first query
    stop = tl.minimum(length, low + BM)
    source = heads_ptr + (start_token + m).to(tl.int64)[:, None] * heads_stride + head * (C + R)
    c = tl.arange(0, CP)[None, :]
    q = tl.load(source + c, mask=inside[:, None] & (c < C), other=0.0)
    pair = tl.arange(0, RP)[None, :]
    kept = inside[:, None] & (pair < R // 2)
    a = tl.load(source + C + pair, mask=kept, other=0.0).to(tl.float32)
    b = tl.load(source + C + R // 2 + pair, mask=kept, other=0.0).to(tl.float32)
    turns = table_ptr + position.to(tl.int64)[:, None] * R + pair
    cos = tl.load(turns, mask=kept, other=0.0)
    sin = tl.load(turns + R // 2, mask=kept, other=0.0)
    first = (a * cos - b * sin).to(q.dtype)
    second = (b * cos + a * sin).to(q.dtype)
    start = tl.load(starts_ptr + row).to(tl.int64)
    k_ptr += (head.to(tl.int64) * keys + start) * C
    v_ptr += (head.to(tl.int64) * keys + start) * V
    rests_ptr += start * R
    best = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VP], tl.float32)
    factor = scale * LOG2_E
    masked_from = (low + 1) // BN * BN
    for block in range(0, masked_from, BN):
        key = block + tl.arange(0, BN)
        acc, total, best = _attend(
            acc, total, best, q, first, second, k_ptr, v_ptr, rests_ptr, key, stop, position,
            factor, C, CP, V, VP, R, RP, False,
        )  # fmt: skip
    for block in range(masked_from, stop, BN):
        key = block + tl.arange(0, BN)
        acc, total, best = _attend(
            acc, total, best, q, first, second, k_ptr, v_ptr, rests_ptr, key, stop, position,
            factor, C, CP, V, VP, R, RP, True,
        )  # fmt: skip
    e = tl.arange(0, VP)[None, :]
    target = out_ptr + ((start_token + m).to(tl.int64)[:, None] * Q + head) * V + e
    tl.store(target, acc / tl.maximum(total, 1e-30)[:, None], mask=inside[:, None] & (e < V))


def gather(
    pages: Tensor, queries: Queries, keys: int, longest: int, rank: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages [N, P, L + R] -> latents [K, L], rests [K, R], where rows' keys begin i32[R].

    `keys` is how many the rows have in all, `longest` how many one has at most.
    """
    rows = queries.lens.shape[0]
    size = pages.shape[-1]
    latents = torch.empty(keys, rank, dtype=dtype, device=pages.device)
    rests = torch.empty(keys, size - rank, dtype=dtype, device=pages.device)
    starts = torch.empty(rows, dtype=torch.int32, device=pages.device)
    gather_kernel[(rows, divide_up(longest, GATHERED))](
        pages,
        queries.table,
        queries.lens,
        latents,
        rests,
        starts,
        rows,
        queries.table.stride(0),
        P=pages.shape[1],
        L=rank,
        LP=power_of_2(rank),
        R=size - rank,
        RP=power_of_2(size - rank),
        BN=GATHERED,
        ROWS=max(MOST_ROWS, power_of_2(rows)),
        num_warps=8,
        **pdl(pages.device),
    )
    return latents, rests, starts


def attend(
    heads: Tensor,
    k: Tensor,
    v: Tensor,
    rests: Tensor,
    starts: Tensor,
    cos_sin: Tensor,
    queries: Queries,
    scale: float,
    out: Tensor,
) -> None:
    """Heads [T, Q * (C + R)], not rotated, k [Q, K, C], v [Q, K, V], rests [K, R] into out.

    Out is [T, Q * V]. Tiles of `queries` have ROWS queries.
    """
    num_heads, keys, plain = k.shape
    size, turned = v.shape[2], rests.shape[1]
    expanded_kernel[(num_heads, queries.tiles.shape[1])](
        heads,
        k,
        v,
        rests,
        cos_sin,
        queries.indptr,
        queries.lens,
        starts,
        queries.tiles,
        out,
        scale,
        keys,
        heads.stride(0),
        Q=num_heads,
        C=plain,
        CP=max(16, power_of_2(plain)),
        V=size,
        VP=max(16, power_of_2(size)),
        R=turned,
        RP=max(16, power_of_2(turned // 2)),
        BM=ROWS,
        BN=64,
        num_warps=8,
        num_stages=3,
        **pdl(heads.device),
    )
