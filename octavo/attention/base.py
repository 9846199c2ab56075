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
from octavo.kernels.ops import HeadProduct


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
    windows_only: bool = False  # no layer of the model is without the window
    soft_cap: float = 0.0
    sinks: bool = False  # each head may also attend to nothing, by a learned score
    # Keys and values are stored divided by these; other than 1 only under an FP8 cache.
    key_scale: float = 1.0
    value_scale: float = 1.0
    # Multi-head latent attention: the one key head's first `latent` numbers are the values, and
    # values are not stored. 0: keys and values are apart. See `mla_sdpa.py`.
    latent: int = 0


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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, Q, D], k and v [T, K, D] already rotated -> [T, Q * D]. Causal.

        `sinks` f32[Q], given where `need.sinks` says so: a head's weights sum to 1 together with
        the exponential of its sink, which weighs no value.
        """


@dataclass(frozen=True, slots=True)
class HeadRules:
    """What a layer does to projected heads before it stores and attends."""

    cos_sin: Tensor  # f32[max_len, D], as of `layers/rope.py`
    query_norm: Tensor | None = None  # [D]
    key_norm: Tensor | None = None
    eps: float = 0.0  # of the norms
    sinks: Tensor | None = None  # f32[Q], as in `AttentionBackend.forward`


@runtime_checkable
class FusedAttention(Protocol):
    """An AttentionBackend that also takes a layer's projection as it comes, in fewer launches."""

    def forward_fused(
        self,
        qkv: Tensor,
        rules: HeadRules,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
        rows: Tensor | None = None,
    ) -> Tensor:
        """QKV [T, (Q + 2K) * D] not yet normalized nor rotated -> [T, Q * D].

        With `rows` i32[S], tokens whose result alone is wanted: [S, Q * D].
        """


@dataclass(frozen=True, slots=True)
class LatentFactors:
    """What a latent is multiplied by to be each head's key (but for what turns) and value."""

    keys: Tensor  # [Q, plain, L]
    values: Tensor  # [Q, L, V]
    # The same as products that the kernels know better than torch.bmm, where they do.
    by_keys: HeadProduct | None = None
    by_values: HeadProduct | None = None

    def absorb(self, query: Tensor) -> Tensor:
        """Queries [T, Q, plain + R] -> [T, Q, L + R], to be multiplied by what is cached."""
        plain = self.keys.shape[1]
        if self.by_keys is not None:
            latent = self.by_keys(query[..., :plain])
        else:
            latent = torch.bmm(query[..., :plain].transpose(0, 1), self.keys).transpose(0, 1)
        return torch.cat((latent, query[..., plain:]), dim=2)

    def value(self, latents: Tensor) -> Tensor:
        """Sums of latents [T, Q, L] -> [T, Q * V]."""
        if self.by_values is not None:
            return self.by_values(latents).flatten(1)
        return torch.bmm(latents.transpose(0, 1), self.values).transpose(0, 1).flatten(1)


@runtime_checkable
class LatentAttentionBackend(Protocol):
    """An AttentionBackend for latents that is given the factors, and may make keys and values."""

    def forward_latent(
        self,
        q: Tensor,
        stored: Tensor,
        factors: LatentFactors,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
    ) -> Tensor:
        """q [T, Q, plain + R], already rotated, stored [T, 1, L + R] -> [T, Q * V]. Causal."""


@dataclass(frozen=True, slots=True)
class LatentRules:
    """What a layer of latent attention does before and after it attends; see `layers/latent.py`."""

    cos_sin: Tensor  # f32[max_len, R]
    norm: Tensor  # [L], of the latents
    eps: float
    factors: LatentFactors


@runtime_checkable
class FusedLatent(Protocol):
    """An AttentionBackend that also takes a latent layer's projections as they come."""

    def forward_fused_latent(
        self,
        heads: Tensor,
        latent: Tensor,
        rules: LatentRules,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
    ) -> Tensor:
        """Heads [T, Q * (plain + R)], latent [T, L + R], neither rotated -> [T, Q * V].

        Rows of both may be parts of longer ones. Stores the latents of all T tokens.
        """
