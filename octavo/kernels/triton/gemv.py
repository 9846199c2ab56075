"""One row times a weight matrix, at the speed of reading the matrix.

A program owns BN rows of the weight. It accumulates a tile [BN, BK] elementwise on the CUDA cores
and sums it once at the end; the tensor cores would have nothing to do. The first tile of weights
is read before the wait for the row (`launch.py`), so that memory is busy while the kernel before
ends. More rows are multiplied elsewhere (`skinny.py`, or the vendor's library).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.activation import silu
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2

TILE = 2048  # elements of a program's tile: 16 for each of 128 threads


@triton.jit
def _dot_rows(x_ptr, weight_ptr, row, ROWS, K: tl.constexpr, BK: tl.constexpr, first):
    """Sum over K of x * weight[row]: f32 [BN]. `first` is the weight tile at column 0."""
    k = tl.arange(0, BK)
    at = weight_ptr + row[:, None].to(tl.int64) * K + k[None, :]
    x = tl.load(x_ptr + k, mask=k < K, other=0.0)
    total = first.to(tl.float32) * x.to(tl.float32)[None, :]
    for start in range(BK, K, BK):
        inside = start + k < K
        weight = tl.load(at + start, mask=inside[None, :] & (row < ROWS)[:, None], other=0.0)
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [N], or [N / 2] with SILU
    N,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = weight x + bias; with SILU the halves are gate and up: out = silu(gate) * up."""
    if PDL:
        gdc_launch_dependents()
    rows = N // 2 if SILU else N
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = (row < rows)[:, None] & (k < K)[None, :]
    at = row[:, None].to(tl.int64) * K + k[None, :]
    first = tl.load(weight_ptr + at, mask=inside, other=0.0)
    if SILU:
        up_ptr = weight_ptr + rows.to(tl.int64) * K
        up_first = tl.load(up_ptr + at, mask=inside, other=0.0)
    if PDL:
        gdc_wait()
    out = _dot_rows(x_ptr, weight_ptr, row, rows, K, BK, first)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=row < rows, other=0.0).to(tl.float32)
    if SILU:
        up = _dot_rows(x_ptr, up_ptr, row, rows, K, BK, up_first)
        if BIAS:
            up += tl.load(bias_ptr + rows + row, mask=row < rows, other=0.0).to(tl.float32)
        # Rounded as the product alone would be, so that both paths agree.
        dtype = x_ptr.dtype.element_ty
        out = silu(out.to(dtype).to(tl.float32)) * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + row, out, mask=row < rows)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    silu: bool = False,
    tile: tuple[int, int, int] | None = None,
) -> Tensor:
    """x [1, K], weight [N, K], bias [N] -> [1, N] in `out_dtype` or x's; with `silu` [1, N / 2].

    `tile` is (rows, columns, warps) of a program, None for a choice by shape.
    """
    rows, columns = weight.shape
    outputs = rows // 2 if silu else rows
    out = torch.empty(1, outputs, dtype=out_dtype or x.dtype, device=x.device)
    block_rows, block_columns, warps = tile or gemv_tile(columns, silu=silu)
    gemv_kernel[(divide_up(outputs, block_rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        K=columns,
        BN=block_rows,
        BK=block_columns,
        BIAS=bias is not None,
        SILU=silu,
        num_warps=warps,
        **pdl(x.device),
    )
    return out


def gemv_tile(columns: int, *, silu: bool) -> tuple[int, int, int]:
    """(rows, columns, warps) of a program: the best of 13, or near it, for ten shapes on an H200.

    A program reads its rows in tiles of TILE elements; wide tiles need fewer sums at the end.
    """
    block_columns = min(TILE, power_of_2(columns))
    while block_columns > 256 and columns % block_columns > 0:
        block_columns //= 2
    return max(1, TILE // block_columns), block_columns, 2 if silu and block_columns < TILE else 4
