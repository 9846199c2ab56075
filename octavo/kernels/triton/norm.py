"""RMSNorm, alone and with the residual sum before it: one program a row.

Squares are summed in f32 whatever the row's dtype. The sum of the residual is rounded to the
row's dtype before it is normalized, as the reference does. Next file: `rotary.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.launch import pdl, power_of_2


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H], read if ADD
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    total_ptr,  # [T, H], written if ADD
    eps,
    x_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = norm(x) * weight, or with ADD total = x + residual and out = norm(total) * weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < H
    if PDL:
        gdc_launch_dependents()
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * H + column, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * H + column, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / H + eps)
    out = (wide * scale * weight).to(x.dtype)
    tl.store(out_ptr + row * H + column, out, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight [T, H]."""
    out = torch.empty_like(x)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [T, H] -> (norm of their sum, their sum)."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    eps: float,
    *,
    add: bool,
) -> None:
    rows, size = x.shape
    if rows == 0:
        return
    block = power_of_2(size)
    rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        out,
        total,
        eps,
        x.stride(0),
        H=size,
        BLOCK=block,
        ADD=add,
        num_warps=max(1, min(16, block // 512)),
        **pdl(x.device),
    )
