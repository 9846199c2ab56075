"""Products with plain weights on a GPU: which kernel takes how many rows.

Not for: quantized weights. Next file: `octavo/kernels/triton/skinny.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.triton.activation import silu_mul
from octavo.kernels.triton.gemv import gemv
from octavo.kernels.triton.skinny import skinny, suits


def plain(x: Tensor, data: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """x [T, K], data [N, K], bias [N] -> [T, N] in `out_dtype` or x's dtype."""
    if x.shape[0] == 1 and x.dtype.itemsize == 2:
        return gemv(x, data, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    if suits(x, data):
        return skinny(x, data, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, data, bias)
    if not x.is_cuda:
        wide_bias = None if bias is None else bias.to(out_dtype)
        return functional.linear(x.to(out_dtype), data.to(out_dtype), wide_bias)
    # The sum is kept in f32 and not rounded to x's dtype on its way.
    out = torch.mm(x, data.t(), out_dtype=torch.float32)
    out = out if bias is None else out + bias
    return out if out_dtype == torch.float32 else out.to(out_dtype)


def plain_silu(x: Tensor, data: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], data [2 * I, K] (gate rows, then up rows) -> silu(gate x) * up x [T, I]."""
    if x.shape[0] == 1 and x.dtype.itemsize == 2:
        return gemv(x, data, bias, silu=True)  # type: ignore[no-any-return]
    if suits(x, data):
        return skinny(x, data, bias, silu=True)  # type: ignore[no-any-return]
    return silu_mul(functional.linear(x, data, bias))  # type: ignore[no-any-return]
