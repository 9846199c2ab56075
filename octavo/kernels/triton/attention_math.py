"""The inner loop of attention over pages, common to decode and prefill.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) in base 2, over blocks of BN keys, as
in FlashAttention (Dao et al. 2022, arXiv:2205.14135). Scores are in f32. A block lies within one
page when BN <= P; else every key's page is looked up. FP8 pages are widened to f16, which holds
e4m3 and e5m2 exactly and costs half of what bf16 costs to make.
Next file: `attention_decode.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # of scores: finite, so that differences are never NaN


@triton.jit
def page_offsets(
    table_ptr, start, stop, page_stride, P: tl.constexpr, BN: tl.constexpr, D: tl.constexpr
):
    """i64 [BN]: where the keys start..start+BN of a row lie, from the head's first page.

    Cells after a row's last key are read and weigh nothing; that their values are finite is
    what `rotary.py` sees to. A row's own last page stands for pages that it does not have.
    """
    if BN <= P:
        page = tl.load(table_ptr + start // P).to(tl.int64)
        return page * page_stride + (start % P + tl.arange(0, BN)) * D
    position = start + tl.arange(0, BN)
    page = tl.load(table_ptr + tl.minimum(position, stop - 1) // P).to(tl.int64)
    return page * page_stride + (position % P) * D


@triton.jit
def soft_capped(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP), by an exponential that may overflow to infinity without harm."""
    return CAP * (1.0 - 2.0 / (tl.exp(score * (2.0 / CAP)) + 1.0))


@triton.jit
def load_block(first_ptr, offsets, D: tl.constexpr, DP: tl.constexpr):
    """Cells [BN, DP] at `offsets` from the head's first page; zeros beyond D."""
    d = tl.arange(0, DP)
    if DP == D:
        return tl.load(first_ptr + offsets[:, None] + d[None, :])
    return tl.load(first_ptr + offsets[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)


@triton.jit
def widen_pairs(pairs, E4M3: tl.constexpr):
    """int16 [BN, D / 2], two FP8 numbers each -> f16 (those of even d, those of odd d).

    Tensor cores want values of neighbouring keys in one register. The memory's own transposing
    load does that for 16-bit elements, not for bytes: so bytes travel in pairs until here.
    """
    if E4M3:
        return tl.inline_asm_elementwise(
            """
            { .reg .b16 a, b; .reg .b32 x, y;
            mov.b32 {a, b}, $2;
            cvt.rn.f16x2.e4m3x2 x, a;
            cvt.rn.f16x2.e4m3x2 y, b;
            prmt.b32 $0, x, y, 0x5410;
            prmt.b32 $1, x, y, 0x7632; }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(  # e5m2 is the upper half of an f16
            """
            shl.b32 $0, $2, 8;
            and.b32 $0, $0, 0xFF00FF00;
            and.b32 $1, $2, 0xFF00FF00;
            """,
            "=&r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def weights_of(total, best, q, k, visible, scale, CAP: tl.constexpr, MASKED: tl.constexpr):
    """(weights f32 [M, BN], shrink [M], total, best) of one more block of keys [BN, DP]."""
    score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
    if CAP > 0:
        score = soft_capped(score * scale, CAP)
        factor = LOG2_E
    else:
        factor = scale * LOG2_E
    if MASKED:
        # Times the factor first: LOWEST must come out of the difference below as it went in.
        score = tl.where(visible, score * factor, LOWEST)
        new_best = tl.maximum(best, tl.max(score, 1))
        weight = tl.exp2(score - new_best[:, None])
    else:
        # The factor is above 0, so it may come after the maximum, and into one instruction.
        new_best = tl.maximum(best, tl.max(score, 1) * factor)
        weight = tl.exp2(score * factor - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    return weight, shrink, total * shrink + tl.sum(weight, 1), new_best


@triton.jit
def attend_block(
    acc,  # f32 [M, DP], not yet divided by total
    total,  # f32 [M]
    best,  # f32 [M], in base 2
    q,  # [M, DP]
    k,  # [BN, DP] in the pages' dtype
    v,
    visible,  # bool [M or 1, BN], read if MASKED
    scale,
    CAP: tl.constexpr,  # 0: none
    MASKED: tl.constexpr,
):
    """(acc, total, best) after one more block of keys."""
    weight, shrink, total, best = weights_of(total, best, q, k, visible, scale, CAP, MASKED)
    v = v.to(q.dtype)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, best
