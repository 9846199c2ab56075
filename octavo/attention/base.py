"""The seam for attention: a backend stores keys and values in pages and attends over them.

A backend says what it cannot do (`supports`), how its pages lie (`layout`), prepares once a step
(`plan`) and runs once a layer (`forward`). Next file: `sdpa.py`, the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from octavo.forward import CacheLayout, ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionNeed:
    """What a model asks of attention on this device."""

    num_heads: int  # Q
    num_kv_heads: int  # K
    head_dim: int  # D
    scale: float
    block_size: int  # P
    dtype: torch.dtype  # of the activations
    cache_dtype: torch.dtype
    device: str
    window: int = 0  # sliding window in tokens, 0 is none
    soft_cap: float = 0.0


class AttentionBackend(Protocol):
    """Stores KV, then attends, for grouped-query attention."""

    name: str

    def supports(self, need: AttentionNeed) -> str | None:
        """None if it can, else the reason why not."""

    def layout(self, need: AttentionNeed, num_blocks: int) -> CacheLayout:
        """Shape of one layer's pages."""

    def plan(self, batch: ForwardBatch) -> object:
        """Work common to all layers of a step; the result is put into `batch.attn`."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, need: AttentionNeed, batch: ForwardBatch
    ) -> Tensor:
        """q [T, Q, D], k and v [T, K, D] already rotated -> [T, Q * D]. Causal."""


@dataclass(frozen=True, slots=True)
class HeadRules:
    """What a layer does to projected heads before it stores and attends."""

    cos_sin: Tensor  # f32[max_len, D], as of `layers/rope.py`
    query_norm: Tensor | None = None  # [D]
    key_norm: Tensor | None = None
    eps: float = 0.0  # of the norms


@runtime_checkable
class FusedAttention(Protocol):
    """An AttentionBackend that also takes a layer's projection as it comes, in fewer launches."""

    def forward_fused(
        self, qkv: Tensor, rules: HeadRules, layer: int, need: AttentionNeed, batch: ForwardBatch
    ) -> Tensor:
        """QKV [T, (Q + 2K) * D] not yet normalized nor rotated -> [T, Q * D]."""
