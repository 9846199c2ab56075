"""Every kernel in plain torch: the oracle for all other kernels, and the path of last resort.

Written to be read and to be right: arithmetic in f32, one rounding to the activations' dtype at
the end. Not for: speed. Next file: `cpu/`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.ops import ExpertProduct, Ops, PackedWeight
from octavo.kernels.sample import sample


def reference_ops(dtype: torch.dtype) -> Ops:
    """The table for activations of `dtype`, on any device."""

    def pack(weight: Tensor) -> PackedWeight:
        rows, columns = weight.shape
        return PackedWeight(weight, rows, columns, dtype, "plain")

    return Ops(
        name="reference",
        reason="plain torch",
        pack=pack,
        linear=linear,
        embed=embed,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rope=rope,
        silu_mul=silu_mul,
        gelu_mul=gelu_mul,
        sample=sample,
        experts=experts,
    )


def linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """x [T, K], weight plain [N, K], bias [N] -> [T, N] in `out_dtype` or x's dtype."""
    if out_dtype is None or out_dtype == x.dtype:
        return functional.linear(x, weight.data, bias)
    # A wider result must not be rounded to x's dtype on its way.
    wide_bias = None if bias is None else bias.to(out_dtype)
    return functional.linear(x.to(out_dtype), weight.data.to(out_dtype), wide_bias)


def embed(ids: Tensor, weight: PackedWeight) -> Tensor:
    """Ids i32[T] -> rows [T, K]."""
    return weight.data.index_select(0, ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight, over each row."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x and residual [T, H] -> (norm of their sum, their sum)."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Q, D], k [T, K, D], positions i32[T], table f32[max_len, D] -> both rotated.

    Dimension i is paired with i + D/2 (halves, not neighbours).
    """
    table = cos_sin.index_select(0, positions).unsqueeze(1)  # [T, 1, D]
    cos, sin = table.chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def silu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I], gate half then up half -> silu(gate) * up [T, I]."""
    gate, up = x.float().chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(x.dtype)


def experts(gate_up: Tensor, down: Tensor) -> ExpertProduct:
    """gate_up [E, 2 * I, H], down [E, H, I] -> their product, an expert at a time."""

    def product(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        wide = x.float()
        out = torch.zeros_like(wide)
        for expert in sorted(set(chosen.flatten().tolist())):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            inner = silu_mul(functional.linear(wide[token], gate_up[expert].float()))
            part = functional.linear(inner, down[expert].float())
            out.index_add_(0, token, part * weights[token, place].unsqueeze(1))
        return out.to(x.dtype)

    return product


def gelu_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I], gate half then up half -> gelu(gate) * up [T, I], GELU in its tanh form."""
    gate, up = x.float().chunk(2, dim=-1)
    # 0.5 (1 + tanh(u)) is the sigmoid of 2u, which keeps its digits where that cancels.
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (gate * torch.sigmoid(2 * inner) * up).to(x.dtype)
