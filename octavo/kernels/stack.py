"""A decoder as data for `Ops.stack`: packed weights, norms and sizes, and no behaviour.

`octavo/models/fused.py` gathers it from a Decoder. Next file: `cpu/stack.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.ops import PackedWeight


@dataclass(frozen=True, slots=True)
class StackBlock:
    """One decoder block; vectors are in the activations' dtype, None where the model has none."""

    norm: Tensor  # [H]
    qkv: PackedWeight  # [(Q + 2 * K) * D, H]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [D]
    key_norm: Tensor | None
    output: PackedWeight  # [H, Q * D]
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: PackedWeight  # [2 * I, H]
    gate_up_bias: Tensor | None
    down: PackedWeight  # [H, I]
    down_bias: Tensor | None
    window: int  # 0 is none
    key_scale: float = 1.0  # pages of 8-bit floats hold numbers divided by these
    value_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class StackModel:
    """All that a stack of blocks needs."""

    blocks: tuple[StackBlock, ...]
    embedding: PackedWeight  # [V, H]
    norm: Tensor
    head: PackedWeight  # [V, H]
    cos_sin: Tensor  # f32 [max_len, D]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    eps: float
    scale: float
    soft_cap: float
    cache_dtype: torch.dtype | None = None  # of pages in 8-bit floats; None: the activations'
