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
def attend_block(
    acc,  # f32 [M, DP], not yet divided by total
    total,  # f32 [M]
    best,  # f32 [M], in base 2
    q,  # [M, DP]
    key_ptr,  # of this head's first page
    value_ptr,
    offsets,  # i64 [BN]
    visible,  # bool [M or 1, BN], read if MASKED
    scale,
    D: tl.constexpr,
    DP: tl.constexpr,  # D rounded up to a power of 2
    CAP: tl.constexpr,  # 0: none
    MASKED: tl.constexpr,
):
    """(acc, total, best) after one more block of keys."""
    d = tl.arange(0, DP)
    at = offsets[:, None] + d[None, :]
    if DP == D:
        k = tl.load(key_ptr + at)
        v = tl.load(value_ptr + at)
    else:
        k = tl.load(key_ptr + at, mask=(d < D)[None, :], other=0.0)
        v = tl.load(value_ptr + at, mask=(d < D)[None, :], other=0.0)
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAP > 0:
        score = soft_capped(score * scale, CAP)
        factor = LOG2_E
    else:
        factor = scale * LOG2_E
    if MASKED:
        score = tl.where(visible, score, LOWEST)
    # The factor is above 0, so it may come after the maximum: one instruction less an element.
    new_best = tl.maximum(best, tl.max(score, 1) * factor)
    weight = tl.exp2(score * factor - new_best[:, None])
    shrink = tl.exp2(best - new_best)
    total = total * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_best
