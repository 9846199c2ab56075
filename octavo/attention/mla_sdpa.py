"""Paged multi-head latent attention in plain torch, over a cache of one vector a token.

The cached vector is the latent that all heads' keys and values are made of, and the rotated part of
the keys beside it (DeepSeek-V2, arXiv:2405.04434). Queries come with the keys' projection taken
into them and results leave as weighted sums of latents, so no head's keys or values are ever
made: a query head is a row over one shared key. Any device, any block size; the oracle for others.
Not for: models with keys and values of their own (`sdpa.py`, whose plan this shares).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.base import AttentionNeed
from octavo.attention.sdpa import DTYPES, FP8, Cells, SdpaAttention, SdpaPlan
from octavo.forward import CacheLayout, ForwardBatch

QUERY_ROWS = 4096  # most rows, query tokens times heads, that are scored together


class LatentSdpaAttention:
    """An AttentionBackend over pages [N, P, 1, L + R], without pages of values."""

    __slots__ = ("_paging",)

    name = "mla_sdpa"

    def __init__(self) -> None:
        self._paging = SdpaAttention()

    def supports(self, need: AttentionNeed) -> str | None:
        """Latent attention of any shape; the cache in f32, bf16, f16 or FP8."""
        if not 0 < need.latent <= need.head_dim or need.num_kv_heads != 1:
            return "only multi-head latent attention"
        if need.dtype not in DTYPES:
            return f"no {need.dtype}, only float32, bfloat16 and float16"
        if need.cache_dtype not in DTYPES + FP8:
            return f"no cache of {need.cache_dtype}, only float32, bfloat16, float16 and FP8"
        if need.window or need.soft_cap or need.sinks:
            return "no window, soft cap or sinks over a latent cache"
        if (need.key_scale, need.value_scale) != (1.0, 1.0):
            return "no scales of keys and values over a latent cache"
        return None

    def layout(self, need: AttentionNeed, num_blocks: int) -> CacheLayout:
        """Latents [N, P, 1, L + R]; of values there are none."""
        pages = (num_blocks, need.block_size, 1)
        return CacheLayout((*pages, need.head_dim), (*pages, 0), need.cache_dtype)

    def plan(self, batch: ForwardBatch) -> SdpaPlan:
        """Turns block tables into cells, padding included."""
        return self._paging.plan(batch)

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
        """q [T, Q, L + R], k [T, 1, L + R] -> [T, Q * L]; `v` is a part of k and not looked at."""
        plan = batch.attn
        assert isinstance(plan, SdpaPlan), "the batch was planned by another backend"
        assert sinks is None, "latent attention has no sinks"
        cells = Cells(batch.kv.keys[layer], 1.0)
        cells.store(plan.slot_map, k)
        out = q.new_empty(*q.shape[:2], need.latent)
        for group in plan.decodes:
            rows, length = group.slots.shape
            key = cells.read(group.slots.flatten(), q.dtype).view(rows, length, -1)
            mask = torch.arange(length, device=q.device) < group.kv_lens
            own = slice(group.start, group.stop)
            out[own] = _attend(q[own], key, mask.unsqueeze(1), need)
        for row in plan.prefills:
            key = cells.read(row.slots, q.dtype).view(1, len(row.slots), -1)
            _prefill(q[row.start : row.start + row.length], key, need, out, row.start)
        return out.flatten(1)


def _prefill(q: Tensor, key: Tensor, need: AttentionNeed, out: Tensor, at: int) -> None:
    """One row's queries [n, Q, D], the last n of key [1, L, D], into out[at:]; in blocks."""
    length, heads = q.shape[:2]
    before = key.shape[1] - length
    size = max(1, QUERY_ROWS // heads)
    for start in range(0, length, size):
        stop = min(length, start + size)
        reach = before + stop
        query = torch.arange(before + start, reach, device=q.device).unsqueeze(1)
        mask = torch.arange(reach, device=q.device) <= query
        packed = q[start:stop].reshape(1, -1, q.shape[2])
        part = _attend(packed, key[:, :reach], mask.repeat_interleave(heads, 0), need)
        out[at + start : at + stop] = part.view(stop - start, heads, -1)


def _attend(q: Tensor, key: Tensor, mask: Tensor, need: AttentionNeed) -> Tensor:
    """q [b, m, D], key [b, n, D], mask to [b, m, n] -> [b, m, L]."""
    value = key[..., : need.latent]
    return functional.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=need.scale)
