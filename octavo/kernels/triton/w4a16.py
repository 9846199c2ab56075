"""Products with weights of 4 bits: one row on the CUDA cores, a few on the tensor cores.

A weight is packed once. Four words hold 32 columns: nibble i of word j is column 4 * i + j, so that
a thread which reads four words needs runs of four neighbours of x, and neither has to be moved
about between threads. A group's scale and zero point are the halves of another word, as float16.

A nibble becomes a number without a conversion: put into the mantissa of 128 (bfloat16) or 1024
(float16) it is that much above it, and the zero point takes that away again.
Not for: more than MAX_ROWS rows, for which `w4_plain` makes the weight whole again and the vendor's
library multiplies. Next file: `fp8.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.formats import Grouped
from octavo.kernels.triton.activation import silu
from octavo.kernels.triton.launch import divide_up, gpu_of, pdl

MAX_ROWS = 64
SMALL_GROUPS = 200_000  # of a weight: up to so many, programs of one row's kernel have two warps
WIDE_WORDS = 16  # of a tile of the kernel for some rows: 128 columns
OUTPUTS = 128  # weight rows of such a tile
MOST_CELLS = 4 << 20  # of all that programs which share a tile find
MOST_TILES = 8192


@triton.jit
def _unpack8(words, HALF: tl.constexpr, ASM: tl.constexpr):
    """Eight tensors of the words' shape: 128 + nibble i in bfloat16, or 1024 + it in float16."""
    if ASM:
        if HALF:
            return tl.inline_asm_elementwise(
                """
                { .reg .b32 a, b, t;
                prmt.b32 a, $8, $9, 0x5410;
                prmt.b32 b, $8, $9, 0x7632;
                lop3.b32 $0, a, 0x000F000F, 0x64006400, 0xEA;
                shr.u32 t, a, 4;  lop3.b32 $1, t, 0x000F000F, 0x64006400, 0xEA;
                shr.u32 t, a, 8;  lop3.b32 $2, t, 0x000F000F, 0x64006400, 0xEA;
                shr.u32 t, a, 12; lop3.b32 $3, t, 0x000F000F, 0x64006400, 0xEA;
                lop3.b32 $4, b, 0x000F000F, 0x64006400, 0xEA;
                shr.u32 t, b, 4;  lop3.b32 $5, t, 0x000F000F, 0x64006400, 0xEA;
                shr.u32 t, b, 8;  lop3.b32 $6, t, 0x000F000F, 0x64006400, 0xEA;
                shr.u32 t, b, 12; lop3.b32 $7, t, 0x000F000F, 0x64006400, 0xEA; }
                """,
                "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
                [words],
                dtype=(
                    tl.float16, tl.float16, tl.float16, tl.float16,
                    tl.float16, tl.float16, tl.float16, tl.float16,
                ),
                is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                """
                { .reg .b32 a, b, t;
                prmt.b32 a, $8, $9, 0x5410;
                prmt.b32 b, $8, $9, 0x7632;
                lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
                shr.u32 t, a, 4;  lop3.b32 $1, t, 0x000F000F, 0x43004300, 0xEA;
                shr.u32 t, a, 8;  lop3.b32 $2, t, 0x000F000F, 0x43004300, 0xEA;
                shr.u32 t, a, 12; lop3.b32 $3, t, 0x000F000F, 0x43004300, 0xEA;
                lop3.b32 $4, b, 0x000F000F, 0x43004300, 0xEA;
                shr.u32 t, b, 4;  lop3.b32 $5, t, 0x000F000F, 0x43004300, 0xEA;
                shr.u32 t, b, 8;  lop3.b32 $6, t, 0x000F000F, 0x43004300, 0xEA;
                shr.u32 t, b, 12; lop3.b32 $7, t, 0x000F000F, 0x43004300, 0xEA; }
                """,
                "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
                [words],
                dtype=(
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                    tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16,
                ),
                is_pure=True,
                pack=2,
            )  # fmt: skip
    else:
        MAGIC: tl.constexpr = 0x6400 if HALF else 0x4300
        DTYPE: tl.constexpr = tl.float16 if HALF else tl.bfloat16
        return (
            ((words & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 4) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 8) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 12) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 16) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 20) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 24) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
            (((words >> 28) & 15) | MAGIC).to(tl.int16).to(DTYPE, bitcast=True),
        )


@triton.jit
def _scale_zero(meta, HALF: tl.constexpr):
    """(scale, zero point and what `_unpack8` adds), f32."""
    BASE: tl.constexpr = 1024.0 if HALF else 128.0
    scale = (meta & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (meta >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero + BASE


@triton.jit
def _from_zero(codes, zero, ASM: tl.constexpr):
    """What `_unpack8` gave, less the zero point: exact, both being small whole numbers."""
    if ASM:
        return codes - zero
    else:  # the interpreter has no arithmetic of bfloat16
        return codes.to(tl.float32) - zero.to(tl.float32)


@triton.jit
def _weight(codes, zero, scale, ASM: tl.constexpr):
    """The weight, in the codes' dtype."""
    if ASM:
        return (codes - zero) * scale
    else:
        return (codes.to(tl.float32) - zero.to(tl.float32)) * scale.to(tl.float32)


@triton.jit
def _dot8(words, x0, x1, x2, x3, x4, x5, x6, x7, ASM: tl.constexpr):
    """Sum over the eight nibbles of each word of (128 + nibble i) * x_i: f32."""
    if ASM:
        # Two nibbles at a time are put into two bfloat16, whose bits are those of floats' heads.
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 p, t, u;
            lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA;
            shl.b32 u, t, 16;          mul.f32 $0, u, $2;
            and.b32 u, t, 0xFFFF0000;  fma.rn.f32 $0, u, $6, $0;
            shr.u32 p, $1, 4;  lop3.b32 t, p, 0x000F000F, 0x43004300, 0xEA;
            shl.b32 u, t, 16;          fma.rn.f32 $0, u, $3, $0;
            and.b32 u, t, 0xFFFF0000;  fma.rn.f32 $0, u, $7, $0;
            shr.u32 p, $1, 8;  lop3.b32 t, p, 0x000F000F, 0x43004300, 0xEA;
            shl.b32 u, t, 16;          fma.rn.f32 $0, u, $4, $0;
            and.b32 u, t, 0xFFFF0000;  fma.rn.f32 $0, u, $8, $0;
            shr.u32 p, $1, 12; lop3.b32 t, p, 0x000F000F, 0x43004300, 0xEA;
            shl.b32 u, t, 16;          fma.rn.f32 $0, u, $5, $0;
            and.b32 u, t, 0xFFFF0000;  fma.rn.f32 $0, u, $9, $0; }
            """,
            "=&f,r,f,f,f,f,f,f,f,f",
            [words, x0, x1, x2, x3, x4, x5, x6, x7],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        out = ((words & 15) + 128).to(tl.float32) * x0
        out += (((words >> 4) & 15) + 128).to(tl.float32) * x1
        out += (((words >> 8) & 15) + 128).to(tl.float32) * x2
        out += (((words >> 12) & 15) + 128).to(tl.float32) * x3
        out += (((words >> 16) & 15) + 128).to(tl.float32) * x4
        out += (((words >> 20) & 15) + 128).to(tl.float32) * x5
        out += (((words >> 24) & 15) + 128).to(tl.float32) * x6
        out += (((words >> 28) & 15) + 128).to(tl.float32) * x7
        return out


@triton.jit
def _one_row(
    words, meta, x_ptr, start,
    GROUPS: tl.constexpr, CW: tl.constexpr, BG: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products of a tile of words [BG, BN, CW] with one row, of the same shape in f32."""
    group, j = start + tl.arange(0, BG), tl.arange(0, CW)
    at = x_ptr + group[:, None] * (8 * CW) + (j // 4 * 32 + j % 4)[None, :]
    inside = (group < GROUPS)[:, None]
    x0 = tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x1 = tl.load(at + 4, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x2 = tl.load(at + 8, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x3 = tl.load(at + 12, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x4 = tl.load(at + 16, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x5 = tl.load(at + 20, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x6 = tl.load(at + 24, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    x7 = tl.load(at + 28, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    out = _dot8(words, x0, x1, x2, x3, x4, x5, x6, x7, ASM)
    total = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    scale, zero = _scale_zero(meta, False)
    return (out - zero[:, :, None] * total) * scale[:, :, None]


@triton.jit
def _row_of_tiles(
    words_ptr, meta_ptr, x_ptr, row, rows, words, meta,
    GROUPS: tl.constexpr, CW: tl.constexpr, BG: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Sums over all columns: f32 [BN]. `words` and `meta` are of the first tile."""
    acc = _one_row(words, meta, x_ptr, 0, GROUPS, CW, BG, ASM)
    group, word = tl.arange(0, BG), tl.arange(0, CW)
    at = row[None, :].to(tl.int64) * GROUPS + group[:, None]
    for start in range(BG, GROUPS, BG):
        inside = (row < rows)[None, :] & (start + group < GROUPS)[:, None]
        words = tl.load(
            words_ptr + ((at + start) * CW)[:, :, None] + word[None, None, :],
            mask=inside[:, :, None],
            other=0,
        )
        meta = tl.load(meta_ptr + at + start, mask=inside, other=0)
        acc += _one_row(words, meta, x_ptr, start, GROUPS, CW, BG, ASM)
    return tl.sum(tl.sum(acc, 2), 0)


@triton.jit
def w4_row_kernel(
    x_ptr,  # [K]
    words_ptr,  # i32 [N, GROUPS, CW]
    meta_ptr,  # i32 [N, GROUPS]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [N], or [N / 2] with SILU
    N,
    GROUPS: tl.constexpr,
    CW: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = weight x + bias; with SILU the halves are gate and up: out = silu(gate) * up."""
    if PDL:
        gdc_launch_dependents()
    rows = N // 2 if SILU else N
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    group, word = tl.arange(0, BG), tl.arange(0, CW)
    # Groups stand first: threads are dealt out along them, as along those of x.
    inside = (row < rows)[None, :] & (group < GROUPS)[:, None]
    at = row[None, :].to(tl.int64) * GROUPS + group[:, None]
    cell = (at * CW)[:, :, None] + word[None, None, :]
    words = tl.load(words_ptr + cell, mask=inside[:, :, None], other=0)
    meta = tl.load(meta_ptr + at, mask=inside, other=0)
    if SILU:
        up_words_ptr = words_ptr + rows.to(tl.int64) * GROUPS * CW
        up_meta_ptr = meta_ptr + rows.to(tl.int64) * GROUPS
        up_words = tl.load(up_words_ptr + cell, mask=inside[:, :, None], other=0)
        up_meta = tl.load(up_meta_ptr + at, mask=inside, other=0)
    if PDL:
        gdc_wait()
    out = _row_of_tiles(words_ptr, meta_ptr, x_ptr, row, rows, words, meta, GROUPS, CW, BG, ASM)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    if SILU:
        up = _row_of_tiles(
            up_words_ptr, up_meta_ptr, x_ptr, row, rows, up_words, up_meta,
            GROUPS, CW, BG, ASM,
        )  # fmt: skip
        if BIAS:
            up += tl.load(bias_ptr + rows + row, mask=row < rows, other=0.0).to(tl.float32)
        # Rounded as the product alone would be, so that both paths agree.
        dtype = x_ptr.dtype.element_ty
        out = silu(out.to(dtype).to(tl.float32)) * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + row, out, mask=row < rows)


@triton.jit
def _tile(
    x_ptr, words_ptr, meta_ptr, row, rows, m, in_m, start,
    GROUPS: tl.constexpr, CW: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words of W * 8 columns from `start` on, times rows of x: f32 [BN, BM]."""
    j = tl.arange(0, W)
    PER: tl.constexpr = W // CW  # groups of a tile
    group = start * PER + j // CW
    in_n = row < rows
    there = in_n[:, None] & (group < GROUPS)[None, :]
    at = row[:, None].to(tl.int64) * (GROUPS * CW) + start * W + j[None, :]
    words = tl.load(words_ptr + at, mask=there, other=0)
    K: tl.constexpr = GROUPS * CW * 8
    column = start * (8 * W) + j // 4 * 32 + j % 4
    xs = x_ptr + m[None, :].to(tl.int64) * K + column[:, None]
    ok = (group < GROUPS)[:, None] & in_m[None, :]
    w0, w1, w2, w3, w4, w5, w6, w7 = _unpack8(words, HALF, ASM)
    dtype = x_ptr.dtype.element_ty
    wide = dtype if ASM else tl.float32
    if PER == 1:  # one scale a row: it can wait until the products are summed
        meta = tl.load(meta_ptr + row.to(tl.int64) * GROUPS + start, mask=in_n, other=0)
        scale, zero = _scale_zero(meta, HALF)
        z = zero.to(dtype)[:, None]
        part = tl.dot(_from_zero(w0, z, ASM), tl.load(xs, mask=ok, other=0.0).to(wide))
        part = tl.dot(_from_zero(w1, z, ASM), tl.load(xs + 4, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_from_zero(w2, z, ASM), tl.load(xs + 8, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_from_zero(w3, z, ASM), tl.load(xs + 12, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_from_zero(w4, z, ASM), tl.load(xs + 16, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_from_zero(w5, z, ASM), tl.load(xs + 20, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_from_zero(w6, z, ASM), tl.load(xs + 24, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_from_zero(w7, z, ASM), tl.load(xs + 28, mask=ok, other=0.0).to(wide), part)
        return part * scale[:, None]
    else:
        meta = tl.load(
            meta_ptr + row[:, None].to(tl.int64) * GROUPS + group[None, :], mask=there, other=0
        )
        scale, zero = _scale_zero(meta, HALF)
        z, s = zero.to(dtype), scale.to(dtype)
        part = tl.dot(_weight(w0, z, s, ASM), tl.load(xs, mask=ok, other=0.0).to(wide))
        part = tl.dot(_weight(w1, z, s, ASM), tl.load(xs + 4, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_weight(w2, z, s, ASM), tl.load(xs + 8, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_weight(w3, z, s, ASM), tl.load(xs + 12, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_weight(w4, z, s, ASM), tl.load(xs + 16, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_weight(w5, z, s, ASM), tl.load(xs + 20, mask=ok, other=0.0).to(wide), part)
        part = tl.dot(_weight(w6, z, s, ASM), tl.load(xs + 24, mask=ok, other=0.0).to(wide), part)
        return tl.dot(_weight(w7, z, s, ASM), tl.load(xs + 28, mask=ok, other=0.0).to(wide), part)


@triton.jit(do_not_specialize=["M", "span"])
def w4_rows_kernel(
    x_ptr,  # [M, K]
    words_ptr,  # i32 [N, GROUPS, CW]
    meta_ptr,  # i32 [N, GROUPS]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N]
    partial_ptr,  # f32 [tiles, SPLITS, BM, BN]
    arrived_ptr,  # i32 [tiles]; zero before and after
    M,
    N,
    span,  # tiles of columns that a program multiplies
    GROUPS: tl.constexpr,
    CW: tl.constexpr,
    W: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x weight^T + bias. Columns are shared by SPLITS programs; the last adds up in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    in_m = m < M
    tiles = tl.cdiv(GROUPS * CW, W)
    last = tl.minimum(tiles, (split + 1) * span)
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(split * span, last):
        acc += _tile(x_ptr, words_ptr, meta_ptr, row, N, m, in_m, start, GROUPS, CW, W, HALF, ASM)
    at = m[None, :].to(tl.int64) * N + row[:, None]
    inside = (row < N)[:, None] & in_m[None, :]
    if SPLITS > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        cell = tl.arange(0, BM)[None, :] * BN + tl.arange(0, BN)[:, None]
        mine = partial_ptr + tile.to(tl.int64) * (SPLITS * BM * BN)
        tl.store(mine + split * (BM * BN) + cell, acc, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrived_ptr + tile, 0)
            acc = tl.zeros([BN, BM], tl.float32)
            for other in range(SPLITS):
                acc += tl.load(mine + other * (BM * BN) + cell, cache_modifier=".cg")
            if BIAS:
                acc += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        if BIAS:
            acc += tl.load(bias_ptr + row, mask=row < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def w4_plain_kernel(
    words_ptr,  # i32 [N, GROUPS, CW]
    meta_ptr,  # i32 [N, GROUPS]
    out_ptr,  # [N, K]
    N,
    GROUPS: tl.constexpr,
    CW: tl.constexpr,
    BN: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """The weight in the activations' dtype."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    group = tl.program_id(1)
    inside = row < N
    at = row.to(tl.int64) * GROUPS + group
    word = tl.arange(0, CW)
    words = tl.load(words_ptr + (at * CW)[:, None] + word[None, :], mask=inside[:, None], other=0)
    scale, zero = _scale_zero(tl.load(meta_ptr + at, mask=inside, other=0), HALF)
    w0, w1, w2, w3, w4, w5, w6, w7 = _unpack8(words, HALF, ASM)
    # Nibble 4 a + 2 b + c, outermost first once the words are last.
    low = tl.join(tl.join(w0, w4), tl.join(w2, w6))
    high = tl.join(tl.join(w1, w5), tl.join(w3, w7))
    every = tl.reshape(tl.join(low, high), (BN, CW // 4, 4, 2, 2, 2))
    every = tl.permute(every, (0, 1, 3, 4, 5, 2))
    every = tl.reshape(every, (BN, 8 * CW)).to(tl.float32)
    column = group * (8 * CW) + tl.arange(0, 8 * CW)
    out = (every - zero[:, None]) * scale[:, None]
    cell = row.to(tl.int64)[:, None] * (GROUPS * 8 * CW) + column[None, :]
    tl.store(out_ptr + cell, out.to(out_ptr.dtype.element_ty), mask=inside[:, None])


@dataclass(frozen=True, slots=True)
class Words:
    """A weight [N, K] of 4 bits as the kernels read it."""

    words: Tensor  # i32[N, K / 8]
    meta: Tensor  # i32[N, K / group]: scale and zero point as float16, scale in the low half
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0], self.words.shape[1] * 8


def pack_words(weight: Grouped) -> Words:
    """Puts a weight's codes into words; zero points are whole, groups are multiples of 32.

    Groups that the kernels do not know are cut into ones that they do.
    """
    rows, columns = weight.codes.shape
    unit = unit_of(weight.group)
    # [N, 32 columns each, nibble, word] -> a word's nibbles last
    codes = weight.codes.view(rows, columns // 32, 8, 4).transpose(2, 3)
    pairs = codes.reshape(rows, columns // 8, 4, 2)
    words = (pairs[..., 0] | (pairs[..., 1] << 4)).contiguous().view(torch.int32).squeeze(-1)
    repeat = weight.group // unit
    scale = weight.scale.repeat_interleave(repeat, 1).half()
    zero = weight.zero.repeat_interleave(repeat, 1).half()
    meta = torch.stack((scale, zero), dim=-1).contiguous().view(torch.int32).squeeze(-1)
    return Words(words.view(rows, columns // 8), meta.contiguous(), unit)


def unit_of(group: int) -> int:
    """The largest group that the kernels know and that divides `group`; 0 if there is none."""
    return next((unit for unit in (128, 64, 32) if group % unit == 0), 0)


def w4_row(
    x: Tensor,
    weight: Words,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    silu: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """x [1, K] -> [1, N] in `out_dtype` or x's dtype; with `silu` [1, N / 2].

    `tile` is (rows, groups, warps) of a program.
    """
    rows, columns = weight.shape
    outputs = rows // 2 if silu else rows
    groups = columns // weight.group
    out = torch.empty(1, outputs, dtype=out_dtype or x.dtype, device=x.device)
    block_rows, block_groups, warps = tile or row_tile(outputs, groups, weight.group // 8)
    w4_row_kernel[(divide_up(outputs, block_rows),)](
        x,
        weight.words,
        weight.meta,
        weight.words if bias is None else bias,
        out,
        rows,
        GROUPS=groups,
        CW=weight.group // 8,
        BN=block_rows,
        BG=block_groups,
        BIAS=bias is not None,
        SILU=silu,
        ASM=x.is_cuda,
        num_warps=warps,
        **pdl(x.device),
    )
    return out


def row_tile(outputs: int, groups: int, chunk: int) -> tuple[int, int, int]:
    """(rows, groups, warps) of a program that multiplies one row: good ones on an H200."""
    block = 32 * 16 // chunk if outputs * groups > SMALL_GROUPS else 16 * 16 // chunk
    while block > 8 and block // 2 >= groups:
        block //= 2
    return 8, block, 4 if block * chunk >= 32 * 16 else 2


@dataclass(frozen=True, slots=True)
class RowsCut:
    """How a product of some rows is cut."""

    rows: int  # of x in a tile
    outputs: int  # of a tile
    splits: int  # programs that share the columns of a tile
    warps: int
    stages: int


def w4_rows(
    x: Tensor,
    weight: Words,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    cut: RowsCut | None = None,
) -> Tensor:
    """x [M, K] -> [M, N] in `out_dtype` or x's dtype; M up to MAX_ROWS."""
    rows, columns = weight.shape
    count = x.shape[0]
    out = torch.empty(count, rows, dtype=out_dtype or x.dtype, device=x.device)
    cut = cut or rows_cut(count, rows, columns, gpu_of(x.device).processors)
    tiles = divide_up(columns, WIDE_WORDS * 8)
    span = divide_up(tiles, cut.splits)
    splits = divide_up(tiles, span)
    grid = (divide_up(rows, cut.outputs), splits, divide_up(count, cut.rows))
    room = _room_of(x.device)
    if splits > 1:
        assert grid[0] * grid[2] <= MOST_TILES, grid
        assert grid[0] * grid[1] * grid[2] * cut.rows * cut.outputs <= MOST_CELLS, grid
    w4_rows_kernel[grid](
        x.contiguous(),
        weight.words,
        weight.meta,
        weight.words if bias is None else bias,
        out,
        room[0],
        room[1],
        count,
        rows,
        span,
        GROUPS=columns // weight.group,
        CW=weight.group // 8,
        W=WIDE_WORDS,
        BM=cut.rows,
        BN=cut.outputs,
        SPLITS=splits,
        BIAS=bias is not None,
        HALF=x.dtype == torch.float16,
        ASM=x.is_cuda,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pdl(x.device),
    )
    return out


def rows_cut(count: int, outputs: int, columns: int, processors: int) -> RowsCut:
    """A good cut on an H200: about three programs a processor."""
    rows = 16 if count <= 16 else 32 if count <= 32 else 64
    tiles = divide_up(outputs, OUTPUTS) * divide_up(count, rows)
    room = MOST_CELLS // (tiles * rows * OUTPUTS)
    wanted = divide_up(3 * processors, tiles)
    splits = max(1, min(wanted, room, columns // (8 * WIDE_WORDS * 8), 8))
    long = count > 32 and columns > outputs
    return RowsCut(rows, OUTPUTS, splits, 8 if long else 4, 3)


@lru_cache(maxsize=16)
def _room_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for what programs find that share tiles, and the number that have."""
    return (
        torch.empty(MOST_CELLS, dtype=torch.float32, device=device),
        torch.zeros(MOST_TILES, dtype=torch.int32, device=device),
    )


def w4_plain(weight: Words, dtype: torch.dtype, *, outputs: int = 32) -> Tensor:
    """The weight [N, K] in `dtype`, bfloat16 or float16."""
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=dtype, device=weight.words.device)
    groups = columns // weight.group
    w4_plain_kernel[(divide_up(rows, outputs), groups)](
        weight.words,
        weight.meta,
        out,
        rows,
        GROUPS=groups,
        CW=weight.group // 8,
        BN=outputs,
        HALF=dtype == torch.float16,
        ASM=weight.words.is_cuda,
        num_warps=4,
        **pdl(weight.words.device),
    )
    return out
