"""Paged multi-head latent attention in plain torch, over a cache of one vector a token.

The cached vector is the latent that all heads' keys and values are made of, and the rotated part of
the keys beside it (DeepSeek-V2, arXiv:2405.04434). Decoding takes the keys' projection into the
queries, and results are weighted sums of latents, so no head's keys or values are made: a query
head is a row over one shared key. Prompts make them where that is less work, which `expands` says.
Any device, any block size; the oracle for others.
Not for: models with keys and values of their own (`sdpa.py`, whose plan this shares).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.base import AttentionNeed, LatentFactors
from octavo.attention.sdpa import DTYPES, FP8, Cells, DecodeGroup, SdpaAttention, SdpaPlan
from octavo.forward import CacheLayout, ForwardBatch

QUERY_ROWS = 4096  # most rows, query tokens times heads, that are scored together
EXPANDED = 1 << 24  # most numbers of keys that are made at a time


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
        assert sinks is None, "latent attention has no sinks"
        plan, cells = self._store(k, layer, batch)
        out = q.new_empty(*q.shape[:2], need.latent)
        for group in plan.decodes:
            out[group.start : group.stop] = _decode(q[group.start : group.stop], cells, group, need)
        for row in plan.prefills:
            own = slice(row.start, row.start + row.length)
            out[own] = _absorbed(q[own], cells.read(row.slots, q.dtype).squeeze(1), need)
        return out.flatten(1)

    def forward_latent(
        self,
        q: Tensor,
        stored: Tensor,
        factors: LatentFactors,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
    ) -> Tensor:
        """q [T, Q, plain + R], stored [T, 1, L + R] -> [T, Q * V].

        Keys and values of heads are made for the rows for which `expands` says so.
        """
        plan, cells = self._store(stored, layer, batch)
        out = q.new_empty(len(q), q.shape[1] * factors.values.shape[2])
        for group in plan.decodes:
            own = slice(group.start, group.stop)
            out[own] = factors.value(_decode(factors.absorb(q[own]), cells, group, need))
        for row in plan.prefills:
            own = slice(row.start, row.start + row.length)
            key = cells.read(row.slots, q.dtype).squeeze(1)
            if expands(len(key) - row.length, row.length, factors):
                out[own] = _expanded(q[own], key, factors, need)
            else:
                out[own] = factors.value(_absorbed(factors.absorb(q[own]), key, need))
        return out

    def _store(self, stored: Tensor, layer: int, batch: ForwardBatch) -> tuple[SdpaPlan, Cells]:
        plan = batch.attn
        assert isinstance(plan, SdpaPlan), "the batch was planned by another backend"
        cells = Cells(batch.kv.keys[layer], 1.0)
        cells.store(plan.slot_map, stored)
        return plan, cells


def expands(before: int, new: int, factors: LatentFactors) -> bool:
    """Whether `new` queries after `before` cached tokens are worth making keys and values.

    Those of the new tokens cost as much as taking the projections into queries and out of results
    does, so what counts is making them for the cached ones, against the pairs of query and key,
    each of which then multiplies a head's key and value and not a latent twice. The multiplications
    of pairs, which go through scores, take about twice the time of others.
    """
    plain, latent = factors.keys.shape[1:]
    value = factors.values.shape[2]
    pairs = new * before + new * (new + 1) // 2
    return before * latent * (plain + value) < 2 * pairs * (2 * latent - plain - value)


def _decode(q: Tensor, cells: Cells, group: DecodeGroup, need: AttentionNeed) -> Tensor:
    """q [rows, Q, L + R] -> sums of latents [rows, Q, L]."""
    rows, length = group.slots.shape
    key = cells.read(group.slots.flatten(), q.dtype).view(rows, length, -1)
    mask = torch.arange(length, device=q.device) < group.kv_lens
    head = key.unsqueeze(1)  # its end is dropped from results: torch's fast path wants sizes alike
    found = functional.scaled_dot_product_attention(
        q.unsqueeze(1), head, head, attn_mask=mask[:, None, None], scale=need.scale
    )
    return found.squeeze(1)[..., : need.latent]


def _absorbed(q: Tensor, key: Tensor, need: AttentionNeed) -> Tensor:
    """One row's queries [n, Q, L + R], the last n of key [N, L + R] -> [n, Q, L]."""
    heads = key.expand(1, q.shape[1], *key.shape)
    # The whole key is the value, whose end is dropped: torch's fast path wants sizes alike.
    return _causal(q, heads, heads, need)[..., : need.latent]


def _expanded(q: Tensor, key: Tensor, factors: LatentFactors, need: AttentionNeed) -> Tensor:
    """One row's queries [n, Q, plain + R], the last n of key [N, L + R] -> [n, Q * V].

    A few heads at a time, so that their keys and values take a bounded part of memory.
    """
    latents, turned = key[:, : need.latent], key[:, need.latent :]
    size = factors.values.shape[2]
    at_once = max(1, EXPANDED // (len(key) * q.shape[2]))
    parts = []
    for first in range(0, q.shape[1], at_once):
        own = slice(first, first + at_once)
        keys = torch.matmul(latents, factors.keys[own].transpose(1, 2))
        keys = torch.cat((keys, turned.expand(len(keys), *turned.shape)), dim=2)
        values = torch.matmul(latents, factors.values[own])
        if size < q.shape[2]:
            values = functional.pad(values, (0, q.shape[2] - size))
        parts.append(_causal(q[:, own], keys[None], values[None], need)[..., :size])
    return torch.cat(parts, dim=1).flatten(1)


def _causal(q: Tensor, key: Tensor, value: Tensor, need: AttentionNeed) -> Tensor:
    """q [n, Q, D], the last n of key and value [1, Q, N, D] -> [n, Q, D]; in blocks of queries."""
    length, heads = q.shape[:2]
    before = key.shape[2] - length
    size = max(1, QUERY_ROWS // heads)
    parts = []
    for start in range(0, length, size):
        stop = min(length, start + size)
        reach = before + stop
        query = torch.arange(before + start, reach, device=q.device).unsqueeze(1)
        mask = torch.arange(reach, device=q.device) <= query
        part = functional.scaled_dot_product_attention(
            q[None, start:stop].transpose(1, 2),
            key[:, :, :reach],
            value[:, :, :reach],
            attn_mask=mask,
            scale=need.scale,
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts) if parts else q
