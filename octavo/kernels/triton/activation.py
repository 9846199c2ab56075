"""SiLU or GELU times a gate, the activations of gated MLPs. Next file: `gemv.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.launch import divide_up, pdl

BLOCK = 1024


@triton.jit
def silu(x):
    """x * sigmoid(x) in f32; for x far below 0 the exponential is infinite and the result -0."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    """GELU in its tanh form: 0.5 x (1 + tanh(u)) is x * sigmoid(2u)."""
    twice = x * (1.5957691216057308 + 0.07135481627159119 * x * x)
    return x / (1.0 + tl.exp(-twice))


@triton.jit
def gated_kernel(
    x_ptr,  # [T, 2 * I]
    out_ptr,  # [T, I]
    size,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = silu(first half) * second half, or with GELU gelu(first half) * second half."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        active = gelu(gate)
    else:
        active = silu(gate)
    tl.store(out_ptr + row * size + column, active * up, mask=inside)


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I], gate half then up half -> silu(gate) * up [T, I]."""
    return _gated(x, gelu=False)


def gelu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I], gate half then up half -> gelu(gate) * up [T, I], GELU in its tanh form."""
    return _gated(x, gelu=True)


def _gated(x: Tensor, *, gelu: bool) -> Tensor:
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    for start in range(0, rows, 65535):  # the grid's second axis holds no more
        part = out[start : start + 65535]
        grid = (divide_up(size, BLOCK), part.shape[0])
        gated_kernel[grid](
            x[start:], part, size, BLOCK=BLOCK, GELU=gelu, num_warps=4, **pdl(x.device)
        )
    return out
