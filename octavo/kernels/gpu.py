"""The table of kernels for NVIDIA GPUs: our Triton kernels, and the vendor's library for products.

Weights stay plain [N, K]: the library reads them as they are. One row is multiplied by our own
kernel, and on Hopper so are up to 64, or 256 by small weights; the library takes the rest.
Quantized weights have their own module, `gpu_quantized.py`.
Not for: attention (`octavo/attention/triton.py`) or graphs. Next file: `gpu_products.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from octavo.kernels import gpu_products as products
from octavo.kernels import gpu_quantized as quantized
from octavo.kernels.gpu_quantized import pack_fp8, pack_grouped
from octavo.kernels.ops import Ops, PackedWeight
from octavo.kernels.triton.activation import gelu_mul, silu_mul
from octavo.kernels.triton.moe import TritonClampedExperts, TritonExperts
from octavo.kernels.triton.norm import add_rms_norm, rms_norm
from octavo.kernels.triton.rotary import rope
from octavo.kernels.triton.routing import route
from octavo.kernels.triton.sample import sample, sample_checked

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def triton_ops(dtype: torch.dtype, device: torch.device, *, copies: bool = False) -> Ops | str:
    """The table for activations of `dtype` on `device`, or the reason why there is none.

    With `copies` weights of 4 bits are kept plain as well, for products of many rows.
    """
    if dtype not in DTYPES:
        return f"no {dtype}, only float32, bfloat16 and float16"
    if not torch.cuda.is_available():
        return "no CUDA device can be used"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"compute capability {capability[0]}.{capability[1]}: 8.0 or later is needed"
    return table_of(dtype, capability, copies=copies)


def table_of(dtype: torch.dtype, capability: tuple[int, int], *, copies: bool = False) -> Ops:
    """The table, wherever Triton runs: its interpreter serves tensors on the CPU."""

    def pack(weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        return PackedWeight(weight.contiguous(), rows, columns, dtype, "plain")

    small = dtype.itemsize == 2
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
        pack_grouped=partial(pack_grouped, dtype=dtype, copy=copies) if small else None,
        pack_fp8=partial(pack_fp8, dtype=dtype) if small and capability >= (8, 9) else None,
        experts=TritonExperts,
        clamped_experts=TritonClampedExperts,
        route=route,
    )


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [T, K], weight [N, K], bias [N] -> [T, N] in `out_dtype` or x's dtype."""
    if weight.layout != "plain":
        return quantized.linear(x, weight, bias, out_dtype)
    return products.plain(x, weight.data, bias, out_dtype)


def linear_silu(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [2 * I, K] (gate rows, then up rows) -> silu(gate x) * up x [T, I]."""
    if weight.layout != "plain":
        return quantized.linear_silu(x, weight, bias)
    return products.plain_silu(x, weight.data, bias)


def embed(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Ids i32[T] -> rows [T, K]."""
    return weight.data.index_select(0, ids)
