"""What multi-head latent attention does beside attending: projections of heads, positions, store.

`prepare` takes a layer's projections as they come, in one launch: it multiplies queries by the
keys' factor, rotates what is to be rotated, normalizes the latents and stores them. `project` takes
sums of latents to values. Pages lie as [N, P, L + R]: the latent of a token, then the rotated part
of its key (`layers/latent.py`). Not for: attending (`latent_attention.py`).
Next file: `latent_attention.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention_decode import Pieces
from octavo.kernels.triton.attention_math import LOWEST
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2

FEW = 16  # rows whose pieces are merged one by one


@triton.jit
def _rotated(source, inside, table_row, pair, R: tl.constexpr):
    """Halves f32 [B, R / 2] of what lies at `source`, rotated; `table_row` points to cosines."""
    kept = inside[:, None] & (pair < R // 2)[None, :]
    first = tl.load(source + pair[None, :], mask=kept, other=0.0).to(tl.float32)
    second = tl.load(source + R // 2 + pair[None, :], mask=kept, other=0.0).to(tl.float32)
    cos = tl.load(table_row + pair[None, :], mask=kept, other=0.0)
    sin = tl.load(table_row + R // 2 + pair[None, :], mask=kept, other=0.0)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _store_latents(
    latent_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, pages_ptr, first, tokens, eps,
    latent_stride, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    BS: tl.constexpr,
):  # fmt: skip
    """Latents of BS tokens, normalized, and their keys' rest, rotated, into the pages."""
    token = first + tl.arange(0, BS)
    inside = token < tokens
    slot = tl.load(slots_ptr + token, mask=inside, other=-1)
    inside = inside & (slot >= 0)
    column = tl.arange(0, LP)
    pair = tl.arange(0, RP)
    in_latent = inside[:, None] & (column < L)[None, :]
    in_pairs = inside[:, None] & (pair < R // 2)[None, :]
    row = latent_ptr + token.to(tl.int64)[:, None] * latent_stride
    vector = tl.load(row + column[None, :], mask=in_latent, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(vector * vector, 1) / L + eps)
    weight = tl.load(norm_ptr + column, mask=column < L, other=0.0).to(tl.float32)
    dtype = latent_ptr.dtype.element_ty
    element = pages_ptr.dtype.element_ty
    # Rounded as the separate norm rounds it, so that all paths agree.
    vector = (vector * scale[:, None] * weight[None, :]).to(dtype)
    target = pages_ptr + slot.to(tl.int64)[:, None] * (L + R)
    tl.store(target + column[None, :], vector.to(element), mask=in_latent)
    position = tl.load(positions_ptr + token, mask=inside, other=0)
    table_row = table_ptr + position.to(tl.int64)[:, None] * R
    one, other = _rotated(row + L, inside, table_row, pair, R)
    tl.store(target + L + pair[None, :], one.to(dtype).to(element), mask=in_pairs)
    tl.store(target + L + R // 2 + pair[None, :], other.to(dtype).to(element), mask=in_pairs)


@triton.jit
def _absorb(
    heads_ptr, factor_ptr, positions_ptr, table_ptr, q_ptr, head, part, first, tokens,
    heads_stride, Q: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, L: tl.constexpr,
    R: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """BL latents of one head's query of BT tokens, and its rotated part with the first ones."""
    token = first + tl.arange(0, BT)
    inside = token < tokens
    row = heads_ptr + token.to(tl.int64)[:, None] * heads_stride + head * (C + R)
    c = tl.arange(0, CP)
    column = part * BL + tl.arange(0, BL)
    plain = tl.load(row + c[None, :], mask=inside[:, None] & (c < C)[None, :], other=0.0)
    at = factor_ptr + head * C * L + c[:, None] * L + column[None, :]
    factor = tl.load(at, mask=(c < C)[:, None] & (column < L)[None, :], other=0.0)
    found = tl.dot(plain, factor, input_precision="ieee")
    target = q_ptr + (token.to(tl.int64)[:, None] * Q + head) * (L + R)
    tl.store(target + column[None, :], found, mask=inside[:, None] & (column < L)[None, :])
    if part == 0:
        pair = tl.arange(0, RP)
        in_pairs = inside[:, None] & (pair < R // 2)[None, :]
        position = tl.load(positions_ptr + token, mask=inside, other=0)
        table_row = table_ptr + position.to(tl.int64)[:, None] * R
        one, other = _rotated(row + C, inside, table_row, pair, R)
        tl.store(target + L + pair[None, :], one, mask=in_pairs)
        tl.store(target + L + R // 2 + pair[None, :], other, mask=in_pairs)


@triton.jit(do_not_specialize=["tokens", "queries"], do_not_specialize_on_alignment=["slots_ptr"])
def prepare_kernel(
    heads_ptr,  # [T, Q * (C + R)]
    latent_ptr,  # [T, L + R]
    factor_ptr,  # [Q, C, L]
    norm_ptr,  # [L]
    positions_ptr,  # i32[T]
    slots_ptr,  # i32[T], below 0: not stored
    table_ptr,  # f32[max_len, R], cos half then sin half
    q_ptr,  # [T, Q, L + R]
    pages_ptr,  # [N * P, L + R]
    tokens,
    queries,  # the first tokens, whose queries are made
    eps,
    heads_stride,
    latent_stride,
    Q: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    R: tl.constexpr,
    RP: tl.constexpr,  # R / 2 rounded up to a power of 2
    BT: tl.constexpr,
    BL: tl.constexpr,
    BS: tl.constexpr,  # tokens of a program that stores
    PDL: tl.constexpr,
):
    """First programs that store BS tokens; then one a head, BL of its latents, and BT tokens."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PARTS: tl.constexpr = (L + BL - 1) // BL
    program = tl.program_id(0)
    storing = tl.cdiv(tokens, BS)
    if program < storing:
        _store_latents(
            latent_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, pages_ptr, program * BS,
            tokens, eps, latent_stride, L, LP, R, RP, BS,
        )  # fmt: skip
    else:
        other = program - storing
        _absorb(
            heads_ptr, factor_ptr, positions_ptr, table_ptr, q_ptr, other // PARTS % Q,
            other % PARTS, other // PARTS // Q * BT, queries, heads_stride,
            Q, C, CP, L, R, RP, BT, BL,
        )  # fmt: skip


def prepare(
    heads: Tensor,
    latent: Tensor,
    pages: Tensor,
    *,
    factor: Tensor,
    norm: Tensor,
    eps: float,
    positions: Tensor,
    slot_map: Tensor,
    cos_sin: Tensor,
    absorbed: int | None = None,
) -> Tensor:
    """Heads [T, Q * (C + R)], latent [T, L + R], factor [Q, C, L] -> queries [T, Q, L + R].

    Rows of `heads` and `latent` may be parts of longer ones. The latents, normalized by `norm` [L],
    and their keys' rotated parts go to `pages` [N, P, L + R]. Of the queries only the first
    `absorbed` are made, [absorbed, Q, L + R]; None is all.
    """
    tokens = heads.shape[0]
    num_heads, plain, rank = factor.shape
    size = pages.shape[-1]
    queries = tokens if absorbed is None else absorbed
    q = heads.new_empty(queries, num_heads, size)
    if tokens == 0:
        return q
    wide = heads.dtype.itemsize == 4
    block = 16 if queries <= 128 or wide else 64
    columns = min(64 if wide else 128, power_of_2(rank))
    storing = 1 if tokens <= 64 else 4
    grid = divide_up(tokens, storing)
    grid += divide_up(queries, block) * num_heads * divide_up(rank, columns)
    prepare_kernel[(grid,)](
        heads,
        latent,
        factor,
        norm,
        positions,
        slot_map,
        cos_sin,
        q,
        pages,
        tokens,
        queries,
        eps,
        heads.stride(0),
        latent.stride(0),
        Q=num_heads,
        C=plain,
        CP=max(16, power_of_2(plain)),
        L=rank,
        R=size - rank,
        RP=power_of_2((size - rank) // 2),
        LP=power_of_2(rank),
        BT=block,
        BL=columns,
        BS=storing,
        num_warps=4,
        **pdl(heads.device),
    )
    return q


@triton.jit(do_not_specialize=["tokens"])
def project_kernel(
    x_ptr,  # [T, Q, L]
    factor_ptr,  # [Q, L, V]
    out_ptr,  # [T, Q, V]
    tokens,
    Q: tl.constexpr,
    L: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, BV of its values, and BT tokens."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    token = tl.program_id(2) * BT + tl.arange(0, BT)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    inside = token < tokens
    k = tl.arange(0, BK)
    source = x_ptr + (token.to(tl.int64)[:, None] * Q + head) * L + k[None, :]
    at = factor_ptr + head * L * V + k[:, None] * V + column[None, :]
    if PDL:
        gdc_wait()
    acc = tl.zeros([BT, BV], tl.float32)
    for start in range(0, L, BK):
        left = start + k < L
        x = tl.load(source + start, mask=inside[:, None] & left[None, :], other=0.0)
        factor = tl.load(at + start * V, mask=left[:, None] & (column < V)[None, :], other=0.0)
        acc = tl.dot(x, factor, acc, input_precision="ieee")
    target = out_ptr + (token.to(tl.int64)[:, None] * Q + head) * V + column[None, :]
    tl.store(target, acc, mask=inside[:, None] & (column < V)[None, :])


def project(latents: Tensor, factor: Tensor, out: Tensor) -> None:
    """Sums of latents [T, Q, L], times factor [Q, L, V], into out [T, Q * V]."""
    tokens, num_heads, rank = latents.shape
    size = factor.shape[2]
    if tokens == 0:
        return
    wide = latents.dtype.itemsize == 4
    block = 16 if tokens <= 128 or wide else 64
    columns = max(16, min(32 if tokens <= 128 or wide else 128, power_of_2(size)))
    project_kernel[(num_heads, divide_up(size, columns), divide_up(tokens, block))](
        latents,
        factor,
        out,
        tokens,
        Q=num_heads,
        L=rank,
        V=size,
        BT=block,
        BV=columns,
        BK=max(16, min(32 if wide else 128 if tokens <= 128 else 64, power_of_2(rank))),
        num_warps=4,
        num_stages=3,
        **pdl(latents.device),
    )


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def store_kernel(
    x_ptr,  # [T, D]
    slots_ptr,  # i32[T], below 0: not stored
    pages_ptr,  # [N * P, D]
    D: tl.constexpr,
    DP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, DP)
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        x = tl.load(x_ptr + token * D + column, mask=column < D)
        at = pages_ptr + slot.to(tl.int64) * D + column
        tl.store(at, x.to(pages_ptr.dtype.element_ty), mask=column < D)


def store(x: Tensor, pages: Tensor, slot_map: Tensor) -> None:
    """Finished latents and keys' rests [T, L + R] into pages [N, P, L + R]."""
    x = x.contiguous()
    tokens, size = x.shape
    if tokens:
        store_kernel[(tokens,)](
            x, slot_map, pages, D=size, DP=power_of_2(size), num_warps=1, **pdl(x.device)
        )


@triton.jit(do_not_specialize=["rows"])
def project_pieces_kernel(
    partial_ptr,  # f32 [W, Q, L]
    lse_ptr,  # f32 [W, Q]
    firsts_ptr,  # i32[R]
    counts_ptr,
    factor_ptr,  # [Q, L, V]
    out_ptr,  # [R, Q, V]
    rows,
    Q: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, BV of its values, and BT rows; the factor is read before the wait."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.program_id(2) * BT + tl.arange(0, BT)
    inside = row < rows
    k = tl.arange(0, LP)
    at = factor_ptr + head * L * V + k[:, None] * V + column[None, :]
    factor = tl.load(at, mask=(k < L)[:, None] & (column < V)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    first = tl.load(firsts_ptr + row, mask=inside, other=0)
    count = tl.load(counts_ptr + row, mask=inside, other=0)
    best = tl.full([BT], LOWEST, tl.float32)
    total = tl.zeros([BT], tl.float32)
    x = tl.zeros([BT, LP], tl.float32)
    for piece in range(tl.max(count, 0)):
        there = piece < count
        slot = (first + piece).to(tl.int64) * Q + head
        lse = tl.load(lse_ptr + slot, mask=there, other=LOWEST)
        mask = (there & (lse > LOWEST))[:, None] & (k < L)[None, :]
        part = tl.load(partial_ptr + slot[:, None] * L + k[None, :], mask=mask, other=0.0)
        new_best = tl.maximum(best, lse)
        weight = tl.where(lse > LOWEST, tl.exp2(lse - new_best), 0.0)
        shrink = tl.exp2(best - new_best)
        x = x * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        best = new_best
    x = x / tl.maximum(total, 1e-30)[:, None]
    found = tl.dot(x.to(factor.dtype), factor, input_precision="ieee")
    target = out_ptr + (row.to(tl.int64)[:, None] * Q + head) * V + column[None, :]
    tl.store(target, found, mask=inside[:, None] & (column < V)[None, :])


@triton.jit
def project_row_kernel(
    partial_ptr,  # f32 [W, Q, L]
    lse_ptr,  # f32 [W, Q]
    firsts_ptr,  # i32[R]
    counts_ptr,
    factor_ptr,  # [Q, L, V]
    out_ptr,  # [R, Q, V]
    Q: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,  # pieces on their way together
    PDL: tl.constexpr,
):
    """One program a head, BV of its values, and a row; the factor is read before the wait."""
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    row = tl.program_id(2)
    k = tl.arange(0, LP)
    at = factor_ptr + head * L * V + k[:, None] * V + column[None, :]
    factor = tl.load(at, mask=(k < L)[:, None] & (column < V)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    first = tl.load(firsts_ptr + row)
    count = tl.load(counts_ptr + row)
    best = LOWEST
    total = 0.0
    x = tl.zeros([LP], tl.float32)
    for start in range(0, count, CHUNK):
        piece = start + tl.arange(0, CHUNK)
        slot = (first + piece).to(tl.int64) * Q + head
        lse = tl.load(lse_ptr + slot, mask=piece < count, other=LOWEST)
        there = (piece < count)[:, None] & (k < L)[None, :]
        part = tl.load(partial_ptr + slot[:, None] * L + k[None, :], mask=there, other=0.0)
        new_best = tl.maximum(best, tl.max(lse, 0))
        weight = tl.where(lse > LOWEST, tl.exp2(lse - new_best), 0.0)
        shrink = tl.exp2(best - new_best)
        x = x * shrink + tl.sum(part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        best = new_best
    # Rounded as sums that are in one piece are.
    x = (x / tl.maximum(total, 1e-30)).to(factor.dtype).to(tl.float32)
    found = tl.sum(x[:, None] * factor.to(tl.float32), 0)
    target = out_ptr + (row.to(tl.int64) * Q + head) * V + column
    tl.store(target, found, mask=column < V)


def project_pieces(pieces: Pieces, factor: Tensor, out: Tensor) -> None:
    """Merges pieces of rows' sums of latents, times factor [Q, L, V], into out [R, Q * V].

    Every piece has been written, those without keys with a log-sum-exp of LOWEST.
    """
    num_heads, rank, size = factor.shape
    rows = out.shape[0]
    given = (pieces.partial, pieces.lse, pieces.firsts, pieces.counts, factor, out)
    shape = {"Q": num_heads, "L": rank, "LP": max(16, power_of_2(rank)), "V": size}
    if rows <= FEW:
        columns = min(32, power_of_2(size))
        project_row_kernel[(num_heads, divide_up(size, columns), rows)](
            *given, **shape, BV=columns, CHUNK=16, num_warps=4, **pdl(out.device)
        )
    else:
        project_pieces_kernel[(num_heads, divide_up(size, 16), divide_up(rows, 16))](
            *given, rows, **shape, BT=16, BV=16, num_warps=4, **pdl(out.device)
        )
