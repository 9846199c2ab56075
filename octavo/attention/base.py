"""The seam for attention: a backend stores keys and values in pages and attends over them.

A backend says what it cannot do (`supports`), how its pages lie (`layout`), prepares once a step
(`plan`) and runs once a layer (`forward`). Next file: `sdpa.py`, the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
