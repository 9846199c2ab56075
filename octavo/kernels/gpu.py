"""The table of kernels for NVIDIA GPUs: our Triton kernels, and the vendor's library for products.

Weights stay plain [N, K]: the library reads them as they are. One row is multiplied by our own
kernel, and on Hopper so are up to 64, or 256 by small weights; the library takes the rest.
Not for: attention (`octavo/attention/triton.py`) or graphs. Next file: `triton/__init__.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.cublaslt import products_of
from octavo.kernels.experts import GroupedExperts
from octavo.kernels.ops import Ops, PackedWeight
from octavo.kernels.triton.activation import gelu_mul, silu_mul
from octavo.kernels.triton.gemv import gemv
from octavo.kernels.triton.norm import add_rms_norm, rms_norm
from octavo.kernels.triton.rotary import rope
from octavo.kernels.triton.sample import sample, sample_checked
from octavo.kernels.triton.skinny import skinny, suits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_ops(dtype: torch.dtype, device: torch.device) -> Ops | str:
    """The table for activations of `dtype` on `device`, or the reason why there is none."""
    if dtype not in DTYPES:
        return f"no {dtype}, only float32, bfloat16 and float16"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}: 8.0 or later is needed"

    def pack(weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        return PackedWeight(weight.contiguous(), rows, columns, dtype, "plain")

    return Ops(
        name="triton",
        reason=f"compute capability {capability[0]}.{capability[1]}",
        pack=pack,
        linear=linear,
        embed=embed,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rope=rope,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        sample=sample,
        sample_checked=sample_checked,
        linear_silu=linear_silu,
        experts=lambda gate_up, down: GroupedExperts(silu_mul, gate_up, down),
    )


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [T, K], weight plain [N, K], bias [N] -> [T, N] in `out_dtype` or x's dtype."""
    data = weight.data
    if x.shape[0] == 1 and x.dtype.itemsize == 2:
        return gemv(x, data, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    if suits(x, data):
        return skinny(x, data, bias, out_dtype=out_dtype)  # type: ignore[no-any-return]
    if out_dtype is None or out_dtype == x.dtype:
        return _product(x, data, bias)
    if not x.is_cuda:
        return functional.linear(x.to(out_dtype), data.to(out_dtype), bias)
    # The sum is kept in f32 and not rounded to x's dtype on its way.
    out = torch.mm(x, data.t(), out_dtype=torch.float32)
    out = out if bias is None else out + bias
    return out if out_dtype == torch.float32 else out.to(out_dtype)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] by the library."""
    if bias is None and x.is_cuda:
        products = products_of(x.device)
        plan = products.find(x, weight)
        if plan is not None:
            return plan.run(x, weight)
        products.see(weight)
    return functional.linear(x, weight, bias)


def linear_silu(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K], weight plain [2 * I, K] (gate rows, then up rows) -> silu(gate x) * up x [T, I]."""
    if x.shape[0] == 1 and x.dtype.itemsize == 2:
        return gemv(x, weight.data, bias, silu=True)  # type: ignore[no-any-return]
    if suits(x, weight.data):
        return skinny(x, weight.data, bias, silu=True)  # type: ignore[no-any-return]
    return silu_mul(_product(x, weight.data, bias))  # type: ignore[no-any-return]


def embed(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Ids i32[T] -> rows [T, K]."""
    return weight.data.index_select(0, ids)
