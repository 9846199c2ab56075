"""Products of 8-bit floats: rounding activations, and few rows times a weight.

Activations get a scale a token, a given one, or one for each 128 values of a token. Up to FEW rows
are multiplied by our own kernel, at the speed of reading the weight; the vendor's library takes the
rest (`octavo/kernels/gpu.py`). Next file: `skinny.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.formats import BLOCK, FP8
from octavo.kernels.triton.launch import divide_up, gpu_of, pdl, power_of_2

FEW = 16
MOST_CELLS = 4 << 20  # of all that programs which share a tile find
MOST_TILES = 8192


@triton.jit
def _rounded(x, inverse):
    """x * inverse as an 8-bit float; NaN stays NaN, what is too large becomes the largest."""
    scaled = tl.minimum(x * inverse, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(scaled, -448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def quantize_kernel(
    x_ptr,  # [M, K]
    out_ptr,  # e4m3 [M, K]
    scale_ptr,  # f32 [M]; read if STATIC: [1]
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rounds a row by its own largest value, or by a given scale."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    if STATIC:
        inverse = 1.0 / tl.load(scale_ptr)
    else:
        # Infinity and NaN make the scale so, and with it the whole row of the product.
        top = tl.reduce(tl.abs(x), 0, _largest)
        scale = tl.maximum(top / 448.0, 1e-12, propagate_nan=tl.PropagateNan.ALL)
        tl.store(scale_ptr + row, scale)
        inverse = 1.0 / scale
    tl.store(out_ptr + row * K + column, _rounded(x, inverse), mask=column < K)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize_blocks_kernel(
    x_ptr,  # [M, K]
    out_ptr,  # e4m3 [M, K]
    scale_ptr,  # f32 [K / WIDTH, M]
    M,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rounds each run of WIDTH values of a row by its own largest."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    top = tl.reduce(tl.abs(x), 1, _largest)
    scale = tl.maximum(top / 448.0, 1e-12, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scale_ptr + group.to(tl.int64) * M + row, scale, mask=group * WIDTH < K)
    inverse = 1.0 / scale
    tl.store(out_ptr + row * K + column, _rounded(x, inverse[:, None]), mask=column < K)


@triton.jit(do_not_specialize=["M", "span"])
def fp8_rows_kernel(
    x_ptr,  # e4m3 [M, K]; if STATIC it may be what is still to be rounded
    weight_ptr,  # e4m3 [N, K]
    x_scale_ptr,  # f32 [M], [1] if STATIC, or [K / BK, M] if BLOCKED
    scale_ptr,  # f32 [N], or [N, K / BK] if BLOCKED
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N]
    partial_ptr,  # f32 [tiles, SPLITS, BM, BN]
    arrived_ptr,  # i32 [tiles]; zero before and after
    M,
    N,
    span,  # blocks of columns that a program multiplies
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x weight^T + bias. Columns are shared by SPLITS programs; the last adds up in order."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    split = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_m, in_n = m < M, n < N
    blocks = tl.cdiv(K, BK)
    weight_at = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x_at = x_ptr + m[:, None].to(tl.int64) * K + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    if STATIC:
        inverse = 1.0 / tl.load(x_scale_ptr)
    for block in range(split * span, tl.minimum(blocks, (split + 1) * span)):
        inside = block * BK + k < K
        weight = tl.load(weight_at + block * BK, mask=in_n[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_at + block * BK, mask=in_m[:, None] & inside[None, :], other=0.0)
        if STATIC and x_ptr.dtype.element_ty != tl.float8e4nv:
            x = _rounded(x.to(tl.float32), inverse)
        if WIDEN:  # the interpreter multiplies no 8-bit floats
            weight, x = weight.to(tl.float32), x.to(tl.float32)
        if BLOCKED:
            x_scale = tl.load(x_scale_ptr + block * M + m, mask=in_m, other=0.0)
            scale = tl.load(scale_ptr + n.to(tl.int64) * blocks + block, mask=in_n, other=0.0)
            acc += tl.dot(x, tl.trans(weight)) * x_scale[:, None] * scale[None, :]
        else:
            acc = tl.dot(x, tl.trans(weight), acc)
    if SPLITS > 1:
        cell = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        mine = partial_ptr + tl.program_id(0).to(tl.int64) * (SPLITS * BM * BN)
        tl.store(mine + split * (BM * BN) + cell, acc, cache_modifier=".cg")
        tl.debug_barrier()  # all of this program's stores come before its arrival
        arrived = tl.atomic_add(arrived_ptr + tl.program_id(0), 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + tl.program_id(0), 0)
            acc = tl.zeros([BM, BN], tl.float32)
            for other in range(SPLITS):
                acc += tl.load(mine + other * (BM * BN) + cell, cache_modifier=".cg")
            _store(
                acc, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, m, n, M, N, STATIC, BLOCKED, BIAS
            )
    else:
        _store(acc, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, m, n, M, N, STATIC, BLOCKED, BIAS)


@triton.jit
def _store(
    acc, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, m, n, M, N,
    STATIC: tl.constexpr, BLOCKED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    if not BLOCKED:
        if STATIC:
            acc *= tl.load(x_scale_ptr)
        else:
            acc *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
        acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None].to(tl.int64) * N + n[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def quantize(x: Tensor, static: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (e4m3 [M, K], its scales f32[M]); `static` f32[1] is the scale, if given."""
    rows, columns = x.shape
    x = x.contiguous()
    out = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scale = torch.empty(rows, device=x.device) if static is None else static
    if rows:
        block = power_of_2(columns)
        quantize_kernel[(rows,)](
            x,
            out,
            scale,
            K=columns,
            BLOCK=block,
            STATIC=static is not None,
            num_warps=max(1, min(16, block // 512)),
            **pdl(x.device),
        )
    return out, scale


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> (e4m3 [M, K], a scale for each BLOCK values f32[K / BLOCK, M])."""
    rows, columns = x.shape
    x = x.contiguous()
    groups = divide_up(columns, BLOCK)
    out = torch.empty(rows, columns, dtype=FP8, device=x.device)
    scale = torch.empty(groups, rows, device=x.device)
    if rows:
        quantize_blocks_kernel[(rows, divide_up(groups, 16))](
            x, out, scale, rows, K=columns, WIDTH=BLOCK, GROUPS=16, num_warps=4, **pdl(x.device)
        )
    return out, scale


@dataclass(frozen=True, slots=True)
class Fp8Cut:
    """How a product of few rows is cut."""

    outputs: int  # of a tile
    columns: int  # of a block; BLOCK where scales are of blocks
    splits: int  # programs that share the columns of a tile
    warps: int
    stages: int


def fp8_rows(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    cut: Fp8Cut | None = None,
) -> Tensor:
    """x e4m3[M, K], weight e4m3[N, K] and their scales -> [M, N]; M up to FEW.

    With a static scale x may be what is still to be rounded. Scales are f32[M] (or [1]) and [N], or
    those of `quantize_blocks` and [N, K / BLOCK].
    """
    count, columns = x.shape
    rows = weight.shape[0]
    blocked = scale.dim() == 2
    cut = cut or fp8_cut(rows, columns, gpu_of(x.device).processors, blocked=blocked)
    assert not blocked or cut.columns == BLOCK
    blocks = divide_up(columns, cut.columns)
    span = divide_up(blocks, cut.splits)
    splits = divide_up(blocks, span)
    tiles = divide_up(rows, cut.outputs)
    out = torch.empty(count, rows, dtype=out_dtype, device=x.device)
    room = _room_of(x.device)
    if splits > 1:
        assert tiles <= MOST_TILES, tiles
        assert tiles * splits * FEW * cut.outputs <= MOST_CELLS, (tiles, splits)
    fp8_rows_kernel[(tiles, splits)](
        x,
        weight,
        x_scale,
        scale,
        scale if bias is None else bias,
        out,
        room[0],
        room[1],
        count,
        rows,
        span,
        K=columns,
        BM=FEW,
        BN=cut.outputs,
        BK=cut.columns,
        SPLITS=splits,
        STATIC=x_scale.numel() == 1 and not blocked,
        BLOCKED=blocked,
        BIAS=bias is not None,
        WIDEN=not x.is_cuda,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pdl(x.device),
    )
    return out


def fp8_cut(rows: int, columns: int, processors: int, *, blocked: bool) -> Fp8Cut:
    """A good cut on an H200."""
    tiles = divide_up(rows, 64)
    room = MOST_CELLS // (tiles * FEW * 64)
    if blocked:
        splits = max(1, min(divide_up(4 * processors, tiles), columns // (4 * BLOCK), 8, room))
        return Fp8Cut(64, BLOCK, splits, 4, 5)
    if tiles <= processors:  # one program a processor, with much under way
        return Fp8Cut(64, 512, 1, 4, 4)
    return Fp8Cut(64, 256, max(1, min(2, room)), 4, 3)


@lru_cache(maxsize=16)
def _room_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for what programs find that share tiles, and the number that have."""
    return (
        torch.empty(MOST_CELLS, dtype=torch.float32, device=device),
        torch.zeros(MOST_TILES, dtype=torch.int32, device=device),
    )
