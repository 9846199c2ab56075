"""What multi-head latent attention does beside attending: projections of heads, positions, store.

`prepare` takes a layer's projections as they come, in one launch: it multiplies queries by the
keys' factor, rotates what is to be rotated, normalizes the latents and stores them. Whoever begins
a page clears its later cells, since attention reads whole blocks (`rotary.py`). `project` takes
sums of latents to values. Pages lie as [N, P, L + R]: the latent of a token, then the rotated part
of its key (`layers/latent.py`). Not for: attending (`latent_attention.py`).
Next file: `latent_attention.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention_math import LOWEST
from octavo.kernels.triton.attention_pieces import Pieces
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2
from octavo.kernels.triton.rotary import clear_after


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
def _store_latent(
    latent_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, pages_ptr, token, tokens, eps,
    latent_stride, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr,
    P: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    """A token's latent, normalized, and its key's rest, rotated, into the pages."""
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        column = tl.arange(0, LP)
        pair = tl.arange(0, RP)
        in_pairs = pair < R // 2
        row = latent_ptr + token.to(tl.int64) * latent_stride
        vector = tl.load(row + column, mask=column < L, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(vector * vector, 0) / L + eps)
        weight = tl.load(norm_ptr + column, mask=column < L, other=0.0).to(tl.float32)
        dtype = latent_ptr.dtype.element_ty
        element = pages_ptr.dtype.element_ty
        # Rounded as the separate norm rounds it, so that all paths agree.
        vector = (vector * scale * weight).to(dtype)
        target = pages_ptr + slot.to(tl.int64) * (L + R)
        tl.store(target + column, vector.to(element), mask=column < L)
        table_row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * R
        first = tl.load(row + L + pair, mask=in_pairs, other=0.0).to(tl.float32)
        second = tl.load(row + L + R // 2 + pair, mask=in_pairs, other=0.0).to(tl.float32)
        cos = tl.load(table_row + pair, mask=in_pairs, other=0.0)
        sin = tl.load(table_row + R // 2 + pair, mask=in_pairs, other=0.0)
        one, other = first * cos - second * sin, second * cos + first * sin
        tl.store(target + L + pair, one.to(dtype).to(element), mask=in_pairs)
        tl.store(target + L + R // 2 + pair, other.to(dtype).to(element), mask=in_pairs)
        at = slot.to(tl.int64) * (L + R)
        clear_after(pages_ptr, slots_ptr, token, slot, tokens, at, P, L + R, 8, CELLS)


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
    P: tl.constexpr,
    CELLS: tl.constexpr,  # L + R rounded up to a power of 2
    PDL: tl.constexpr,
):
    """First a program each token, which stores; then one a head, BL latents, and BT tokens."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PARTS: tl.constexpr = (L + BL - 1) // BL
    program = tl.program_id(0)
    if program < tokens:
        _store_latent(
            latent_ptr, norm_ptr, positions_ptr, slots_ptr, table_ptr, pages_ptr, program,
            tokens, eps, latent_stride, L, LP, R, RP, P, CELLS,
        )  # fmt: skip
    else:
        other = program - tokens
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
    grid = tokens + divide_up(queries, block) * num_heads * divide_up(rank, columns)
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
        P=pages.shape[1],
        CELLS=power_of_2(size),
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
    columns = 32 if tokens <= 128 or wide else 64 if tokens <= 1024 else 128
    columns = max(16, min(columns, power_of_2(size)))
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


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def store_kernel(
    x_ptr,  # [T, D]
    slots_ptr,  # i32[T], below 0: not stored
    pages_ptr,  # [N * P, D]
    tokens,
    P: tl.constexpr,
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
        cell = slot.to(tl.int64) * D
        clear_after(pages_ptr, slots_ptr, token.to(tl.int32), slot, tokens, cell, P, D, 8, DP)


def store(x: Tensor, pages: Tensor, slot_map: Tensor) -> None:
    """Finished latents and keys' rests [T, L + R] into pages [N, P, L + R]."""
    x = x.contiguous()
    tokens, size = x.shape
    if tokens:
        store_kernel[(tokens,)](
            x,
            slot_map,
            pages,
            tokens,
            P=pages.shape[1],
            D=size,
            DP=power_of_2(size),
            num_warps=1,
            **pdl(x.device),
        )


@triton.jit(do_not_specialize=["pieces"])
def project_splits_kernel(
    partial_ptr,  # f32 [R * S, Q, L]
    lse_ptr,  # f32 [R * S, Q]
    factor_ptr,  # [Q, L, V]
    out_ptr,  # [R, Q, V]
    pieces,  # R * S
    Q: tl.constexpr,
    L: tl.constexpr,
    V: tl.constexpr,
    S: tl.constexpr,
    BT: tl.constexpr,  # pieces of a program: those of BT / S rows
    BV: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a head, BV of its values, and BT pieces, which are multiplied and then merged."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0)
    column = tl.program_id(1) * BV + tl.arange(0, BV)
    piece = tl.program_id(2) * BT + tl.arange(0, BT)
    there = piece < pieces
    slot = piece.to(tl.int64) * Q + head
    k = tl.arange(0, BK)
    source = partial_ptr + slot[:, None] * L + k[None, :]
    at = factor_ptr + head * L * V + k[:, None] * V + column[None, :]
    lse = tl.load(lse_ptr + slot, mask=there, other=LOWEST)
    acc = tl.zeros([BT, BV], tl.float32)
    for start in range(0, L, BK):
        left = start + k < L
        x = tl.load(source + start, mask=there[:, None] & left[None, :], other=0.0)
        factor = tl.load(at + start * V, mask=left[:, None] & (column < V)[None, :], other=0.0)
        acc = tl.dot(x.to(factor.dtype), factor, acc, input_precision="ieee")
    ROWS: tl.constexpr = BT // S
    lse = tl.reshape(lse, [ROWS, S])
    weight = tl.where(lse > LOWEST, tl.exp2(lse - tl.max(lse, 1)[:, None]), 0.0)
    weight = weight / tl.maximum(tl.sum(weight, 1), 1e-30)[:, None]
    found = tl.sum(tl.reshape(acc, [ROWS, S, BV]) * weight[:, :, None], 1)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    target = out_ptr + (row.to(tl.int64)[:, None] * Q + head) * V + column[None, :]
    tl.store(target, found, mask=(row * S < pieces)[:, None] & (column < V)[None, :])


def project_splits(pieces: Pieces, factor: Tensor, out: Tensor) -> None:
    """Sums of latents in even splits, a power of 2, times factor [Q, L, V], into out [R, Q * V].

    Every piece has been written, those without keys with a log-sum-exp of LOWEST.
    """
    num_heads, rank, size = factor.shape
    total = out.shape[0] * pieces.splits
    block = 16 if total <= 64 else 64  # splits are at most 16
    columns = max(16, min(32, power_of_2(size)))
    wide = factor.dtype.itemsize == 4
    project_splits_kernel[(num_heads, divide_up(size, columns), divide_up(total, block))](
        pieces.partial,
        pieces.lse,
        factor,
        out,
        total,
        Q=num_heads,
        L=rank,
        V=size,
        S=pieces.splits,
        BT=block,
        BV=columns,
        BK=max(16, min(32 if wide else 128, power_of_2(rank))),
        num_warps=4,
        num_stages=3,
        **pdl(out.device),
    )
