"""A few rows times a small weight matrix, by tensor cores.

Where a weight is small, reading it takes a few microseconds and the vendor's library as long again
to start and end. These kernels start while the one before them still runs (`launch.py`). A program
owns BN rows of the weight and all rows of x. Up to 16 rows the weight is the left operand, so that
every warp has weights of its own; with more rows x is. Larger weights are the library's.
Next file: `sample.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.activation import silu
from octavo.kernels.triton.launch import divide_up, pdl

FEW = 16
MAX_ROWS = 64
MAX_WEIGHT = 8 << 20  # elements, with more than FEW rows
MAX_WEIGHT_FEW = 20 << 20


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N], or [M, N / 2] with SILU
    M,
    N,
    K: tl.constexpr,  # a multiple of BK
    BM: tl.constexpr,  # M at least
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x weight^T + bias; with SILU the halves are gate and up: out = silu(gate) * up."""
    if PDL:
        gdc_launch_dependents()
    outputs = N // 2 if SILU else N
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_rows = (n < outputs)[:, None]
    weight = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x = x_ptr + m[:, None] * K + k[None, :]
    in_x = (m < M)[:, None]
    w = tl.load(weight, mask=in_rows, other=0.0)
    if SILU:
        half = outputs.to(tl.int64) * K
        up = tl.load(weight + half, mask=in_rows, other=0.0)
        acc_up = tl.zeros([BM, BN], tl.float32)
    if PDL:
        gdc_wait()
    a = tl.load(x, mask=in_x, other=0.0)
    acc = tl.dot(a, tl.trans(w))
    if SILU:
        acc_up = tl.dot(a, tl.trans(up))
    for start in range(BK, K, BK):
        w = tl.load(weight + start, mask=in_rows, other=0.0)
        a = tl.load(x + start, mask=in_x, other=0.0)
        acc = tl.dot(a, tl.trans(w), acc)
        if SILU:
            up = tl.load(weight + half + start, mask=in_rows, other=0.0)
            acc_up = tl.dot(a, tl.trans(up), acc_up)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    if SILU:
        if BIAS:
            bias = tl.load(bias_ptr + outputs + n, mask=n < outputs, other=0.0)
            acc_up += bias.to(tl.float32)[None, :]
        # Rounded as the product alone would be, so that both paths agree.
        dtype = x_ptr.dtype.element_ty
        acc = silu(acc.to(dtype).to(tl.float32)) * acc_up.to(dtype).to(tl.float32)
    inside = in_x & (n < outputs)[None, :]
    tl.store(out_ptr + m[:, None].to(tl.int64) * outputs + n[None, :], acc, mask=inside)


@triton.jit(do_not_specialize=["M"])
def few_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N], or [M, N / 2] with SILU
    M,
    N,
    K: tl.constexpr,  # a multiple of BK
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `skinny_kernel`, with the weight as the left operand."""
    if PDL:
        gdc_launch_dependents()
    outputs = N // 2 if SILU else N
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    in_rows = (n < outputs)[:, None]
    in_x = (m < M)[None, :]
    weight = weight_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    x = x_ptr + m[None, :] * K + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    if SILU:
        half = outputs.to(tl.int64) * K
        acc_up = tl.zeros([BN, BM], tl.float32)
    if PDL:
        gdc_wait()
    for start in range(0, K, BK):
        w = tl.load(weight + start, mask=in_rows, other=0.0)
        a = tl.load(x + start, mask=in_x, other=0.0)
        acc = tl.dot(w, a, acc)
        if SILU:
            up = tl.load(weight + half + start, mask=in_rows, other=0.0)
            acc_up = tl.dot(up, a, acc_up)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    if SILU:
        if BIAS:
            bias = tl.load(bias_ptr + outputs + n, mask=n < outputs, other=0.0)
            acc_up += bias.to(tl.float32)[:, None]
        dtype = x_ptr.dtype.element_ty
        acc = silu(acc.to(dtype).to(tl.float32)) * acc_up.to(dtype).to(tl.float32)
    inside = in_rows & in_x
    tl.store(out_ptr + m[None, :].to(tl.int64) * outputs + n[:, None], acc, mask=inside)


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    silu: bool = False,
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] like x; with `silu` [M, N / 2].

    K is a multiple of 64, M at most MAX_ROWS. `tile` is (rows of the weight, columns, warps,
    stages) of a program, None for a choice by shape.
    """
    rows, columns = weight.shape
    outputs = rows // 2 if silu else rows
    count = x.shape[0]
    out = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    block_rows, block_columns, warps, stages = tile or skinny_tile(
        count, outputs, columns, silu=silu
    )
    kernel = few_kernel if count <= FEW else skinny_kernel
    kernel[(divide_up(outputs, block_rows),)](
        x.contiguous(),
        weight,
        weight if bias is None else bias,
        out,
        count,
        rows,
        K=columns,
        BM=FEW if count <= FEW else MAX_ROWS,
        BN=block_rows,
        BK=block_columns,
        BIAS=bias is not None,
        SILU=silu,
        num_warps=warps,
        num_stages=stages,
        **pdl(x.device),
    )
    return out


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel multiplies x [M, K] by weight [N, K] faster than the library."""
    largest = MAX_WEIGHT_FEW if x.shape[0] <= FEW else MAX_WEIGHT
    small = weight.numel() <= largest and weight.shape[1] % 64 == 0
    return small and 1 < x.shape[0] <= MAX_ROWS and x.dtype.itemsize == 2


def skinny_tile(count: int, outputs: int, columns: int, *, silu: bool) -> tuple[int, int, int, int]:
    """(rows of the weight, columns, warps, stages) of a program, as measured on an H200."""
    if count <= FEW:
        tile = (64, 128, 4, 4) if silu else (16, 512, 1, 4)
    elif outputs <= 2048:  # a few programs, each with much in flight
        tile = (16, 128, 4, 5)
    else:
        tile = (32, 128, 4, 4)
    rows, block_columns, warps, stages = tile
    while columns % block_columns:
        block_columns //= 2
    return rows, block_columns, warps, stages
