"""What decode attention does for the newest token of a row: norms, rotation, and the store.

A step in which all rows decode needs no launch for these: the programs that attend turn the
queries that they use, and the one that owns a row's last key makes it, stores it for later steps
and attends to it from its registers. So nobody reads what is stored in the same step. Each program
begins later by that, which is worth it where all of them run side by side
(`attention_tiles.turns_newest`). The arithmetic is that of `rotary.py`.
Next file: `attention_tiles.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.triton.attention_math import LOG2_E, LOWEST, soft_capped
from octavo.kernels.triton.rotary import clear_after, scaled


@dataclass(frozen=True, slots=True)
class Newest:
    """A projection that is yet to be turned, and what that takes; see `rotary.rope_store`."""

    qkv: Tensor  # [R, (Q + 2K) * D]
    positions: Tensor  # i32[R]
    slots: Tensor  # i32[R], below 0: not stored
    cos_sin: Tensor | None  # f32[max_len, D]
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None
    eps: float
    key_scale: float
    value_scale: float


@triton.jit
def turned(
    first_ptr,  # head 0 of a token's queries or keys
    heads,  # [H]
    position,
    norm_ptr,  # [D], read if NORM
    table_ptr,  # f32[max_len, D], cos half then sin half, read if ROPE
    eps,
    D: tl.constexpr,
    DP: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
):
    """[H, DP]: heads normalized and rotated, in their own dtype; zeros beyond D."""
    d = tl.arange(0, DP)
    inside = d < D
    source = first_ptr + heads[:, None] * D
    x = tl.load(source + d[None, :], mask=inside[None, :], other=0.0)
    dtype = x.dtype
    if NORM or ROPE:
        x = x.to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        weight = tl.load(norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
        # Rounded as the separate norm rounds it, so that both paths agree.
        x = (x * scale * weight[None, :]).to(dtype).to(tl.float32)
    if ROPE:
        HALF: tl.constexpr = D // 2
        other = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(source + other[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(norm_ptr + other, mask=inside, other=0.0).to(tl.float32)
            y = (y * scale * weight[None, :]).to(dtype).to(tl.float32)
        row = table_ptr + position.to(tl.int64) * D + tl.minimum(d, other)
        cos = tl.load(row, mask=inside, other=0.0)[None, :]
        sin = tl.load(row + HALF, mask=inside, other=0.0)[None, :]
        x = x * cos + tl.where((d < HALF)[None, :], -sin, sin) * y
    return x.to(dtype)


@triton.jit
def store_newest(
    k,  # [1, D rounded up] in the pages' dtype
    value_ptr,  # the head's value of the row
    keys_ptr,
    values_ptr,
    slots_ptr,
    row,
    head,
    value_factor,
    page_stride,
    head_stride,
    P: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Key and value into the row's cell; what lies after the first cell of a page is cleared."""
    slot = tl.load(slots_ptr + row)
    if slot >= 0:
        d = tl.arange(0, DP)[None, :]
        inside = d < D
        at = (slot // P).to(tl.int64) * page_stride + head * head_stride + (slot % P) * D
        v = scaled(tl.load(value_ptr + d, mask=inside, other=0.0), value_factor, SCALED)
        tl.store(keys_ptr + at + d, k, mask=inside)
        tl.store(values_ptr + at + d, v.to(values_ptr.dtype.element_ty), mask=inside)
        # Rows of one token each: no other token of this step is in the page.
        clear_after(values_ptr, slots_ptr, row, slot, row + 1, at, P, D, 16, DP)


@triton.jit
def newest_score(q, k, scale, CAP: tl.constexpr):
    """f32 [G]: scores of the queries [G, DP] with one key [1, DP], in base 2."""
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    if CAP > 0:
        score = soft_capped(score, CAP)
    return score * LOG2_E


@triton.jit
def with_newest(best, total, score, owns, real):
    """(best, total) of the softmax with one key more, of weight exp2(score - best), if `owns`.

    `real` [G] are the heads that exist; the others stay without keys.
    """
    score = tl.where(owns & real, score, LOWEST)
    new_best = tl.maximum(best, score)
    weight = tl.where(owns & real, tl.exp2(score - new_best), 0.0)
    return new_best, total * tl.exp2(best - new_best) + weight, weight
