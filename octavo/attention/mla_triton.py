"""Paged multi-head latent attention on NVIDIA GPUs by our own Triton kernels.

Pages lie as [N, P, 1, L + R], of values there are none (`mla_sdpa.py`). Rows of one query take
even splits of their keys, or where lengths differ much a list of pieces; rows of more queries a
list of tiles. As in `triton.py` all that changes from step to step is read on the device, so steps
can be captured. Not for: models with keys and values of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import AttentionNeed, LatentRules
from octavo.attention.triton import DTYPES, EVEN, FP8, UNEVEN, device_reason
from octavo.forward import CacheLayout, ForwardBatch
from octavo.kernels.triton import latent as kernels
from octavo.kernels.triton import latent_attention as attention
from octavo.kernels.triton import latent_expanded as expanded
from octavo.kernels.triton.attention_pieces import Pieces, list_pieces, merge
from octavo.kernels.triton.attention_varlen import Queries, list_tiles, tile_count
from octavo.kernels.triton.launch import gpu_of

MAX_RANK, MAX_TURNED = 512, 128  # what tiles are made for
# Tokens, more than a captured step has, from which keys and values are made for a step's prompts,
# if their rows have no more than so many keys a token.
EXPANDED_FROM, MOST_KEYS = 1025, 2


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """A step's work: decode rows by pieces, and the rows after them by tiles."""

    decodes: int
    pieces: Pieces | None
    queries: Queries | None
    expanded: Expanded | None = None  # if the queries' rows are served so


@dataclass(frozen=True, slots=True)
class Expanded:
    """What the host knows of rows whose keys and values are made of the latents."""

    keys: int  # of all rows
    longest: int


@dataclass(frozen=True, slots=True)
class _Room:
    """Memory that plans point into, as long as the backend lives."""

    rows: int
    items: Tensor
    firsts: Tensor  # of the list form
    counts: Tensor
    partial: Tensor
    lse: Tensor
    even: tuple[tuple[Tensor, Tensor], ...]  # firsts and counts of so many even splits


class LatentTritonAttention:
    """An AttentionBackend, and a FusedLatent, over pages [N, P, 1, L + R]."""

    name = "mla_triton"
    forms = (EVEN, UNEVEN)

    def __init__(self) -> None:
        self._need: AttentionNeed | None = None
        self._room: _Room | None = None
        self._outgrown: list[_Room] = []  # captured graphs may still point into them

    def supports(self, need: AttentionNeed) -> str | None:
        """Latents up to 512 and 128 rotated dimensions, pages of 16 to 128, FP8 caches too."""
        reason = device_reason(need)
        if reason:
            return reason
        if not 0 < need.latent < need.head_dim or need.num_kv_heads != 1:
            return "only multi-head latent attention"
        turned = need.head_dim - need.latent
        if need.latent > MAX_RANK or turned > MAX_TURNED or need.latent % 8 or turned % 8:
            return (
                f"latents of {need.latent} and {turned} rotated dimensions: only multiples of 8 up "
                f"to {MAX_RANK} and {MAX_TURNED}"
            )
        if need.dtype not in DTYPES:
            return f"no {need.dtype}, only float32, bfloat16 and float16"
        if need.cache_dtype != need.dtype and need.cache_dtype not in FP8:
            return f"a cache of {need.cache_dtype} under activations of {need.dtype}"
        if need.cache_dtype in FP8 and need.dtype == torch.float32:
            return "an FP8 cache under activations of float32, only under bfloat16 and float16"
        if need.block_size not in (16, 32, 64, 128):
            return f"blocks of {need.block_size} tokens: only 16, 32, 64 and 128"
        if need.window or need.soft_cap or need.sinks:
            return "no window, soft cap or sinks over a latent cache"
        if (need.key_scale, need.value_scale) != (1.0, 1.0):
            return "no scales of keys and values over a latent cache"
        return None

    def layout(self, need: AttentionNeed, num_blocks: int) -> CacheLayout:
        """Latents [N, P, 1, L + R]; of values there are none. Plans are made for this need."""
        self._need = need
        pages = (num_blocks, need.block_size, 1)
        return CacheLayout((*pages, need.head_dim), (*pages, 0), need.cache_dtype)

    def reserve(self, max_rows: int) -> None:
        """Takes the memory for plans of up to `max_rows` decode rows; before any capture."""
        need, cut = self._needed(), self._cut()
        pieces = attention.room_of(max_rows, cut)
        device = torch.device(need.device)

        def ints(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        if self._room is not None:
            self._outgrown.append(self._room)
        self._room = _Room(
            max_rows,
            ints(3 * pieces),
            ints(max_rows),
            ints(max_rows),
            torch.zeros(pieces * need.num_heads * need.latent, device=device),
            torch.zeros(pieces * need.num_heads, device=device),
            tuple(_even(splits, max_rows, device) for splits in range(attention.MAX_SPLITS + 1)),
        )

    def choose(self, lens: NDArray[np.int32]) -> str:
        """The form for decode rows that attend to `lens` i32[R] keys: EVEN or UNEVEN."""
        return UNEVEN if attention.is_uneven(lens, self._cut()) else EVEN

    def plan(self, batch: ForwardBatch, form: str | None = None) -> LatentPlan:
        """Launches what all layers share. `form` None: chosen by the host's copy of lengths.

        Without such a copy in the batch the device is asked, which waits for it.
        """
        decodes = batch.num_decodes
        pieces = self._pieces(batch, form) if decodes else None
        if decodes == batch.num_rows:
            return LatentPlan(decodes, pieces, None)
        expanded = self._expanded(batch)
        return LatentPlan(decodes, pieces, self._queries(batch, expanded is not None), expanded)

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
        pages = batch.kv.keys[layer].squeeze(2)
        kernels.store(k.flatten(1), pages, batch.slot_map)
        plan = _planned(batch)
        out = self._attend(q.contiguous(), pages, need, batch, plan)
        if plan.pieces is not None and plan.pieces.splits != 1:
            merge(plan.pieces, None, out[: plan.decodes])
        return out.flatten(1)

    def forward_fused_latent(
        self,
        heads: Tensor,
        latent: Tensor,
        rules: LatentRules,
        layer: int,
        need: AttentionNeed,
        batch: ForwardBatch,
    ) -> Tensor:
        """See `FusedLatent`."""
        pages = batch.kv.keys[layer].squeeze(2)
        plan = _planned(batch)
        q = kernels.prepare(
            heads,
            latent,
            pages,
            factor=rules.factors.keys,
            norm=rules.norm,
            eps=rules.eps,
            positions=batch.positions,
            slot_map=batch.slot_map,
            cos_sin=rules.cos_sin,
            absorbed=None if plan.expanded is None else plan.decodes,
        )
        sums = self._attend(q, pages, need, batch, plan)
        values = rules.factors.values
        out: Tensor = q.new_empty(heads.shape[0], q.shape[1] * values.shape[2])
        done = 0  # rows
        if plan.pieces is not None and plan.pieces.splits > 1:
            done = plan.decodes
            kernels.project_splits(plan.pieces, values, out[:done])
        elif plan.pieces is not None and plan.pieces.splits == 0:
            merge(plan.pieces, None, sums[: plan.decodes])
        kernels.project(sums[done:], values, out[done : len(sums)])
        if plan.expanded is not None:
            self._attend_expanded(heads, pages, rules, need, plan, out)
        return out

    def _attend_expanded(
        self,
        heads: Tensor,
        pages: Tensor,
        rules: LatentRules,
        need: AttentionNeed,
        plan: LatentPlan,
        out: Tensor,
    ) -> None:
        """Rows of many queries, into out [T, Q * V], by keys and values of their own."""
        queries, known, factors = plan.queries, plan.expanded, rules.factors
        assert queries is not None
        assert known is not None
        latents, rests, starts = expanded.gather(
            pages, queries, known.keys, known.longest, need.latent, heads.dtype
        )
        k = torch.matmul(latents, factors.keys.transpose(1, 2))
        v = torch.matmul(latents, factors.values)
        expanded.attend(heads, k, v, rests, starts, rules.cos_sin, queries, need.scale, out)

    def _attend(
        self,
        q: Tensor,
        pages: Tensor,
        need: AttentionNeed,
        batch: ForwardBatch,
        plan: LatentPlan,
    ) -> Tensor:
        """Sums of latents [T, Q, L]; those of rows in more than one piece are still to merge."""
        out = q.new_empty(q.shape[0], q.shape[1], need.latent)
        rows = plan.decodes
        if plan.pieces is not None:
            attention.attend_one(
                q[:rows],
                pages,
                batch.block_table[:rows],
                batch.kv_lens[:rows],
                plan.pieces,
                self._cut().one,
                need.scale,
                out[:rows],
            )
        if plan.queries is not None and plan.expanded is None:
            attention.attend_many(q, pages, plan.queries, self._cut().many, need.scale, out)
        return out

    def _pieces(self, batch: ForwardBatch, form: str | None) -> Pieces:
        rows = batch.num_decodes
        cut = self._cut()
        if self._room is None or self._room.rows < rows:
            self.reserve(rows)
        if form is None:
            lens = batch.kv_lens_host
            form = self.choose(batch.kv_lens[:rows].cpu().numpy() if lens is None else lens[:rows])
        if form == EVEN:
            return self._room_for(attention.splits_of(rows, cut), 3)
        assert form == UNEVEN, form
        aim = attention.aim_of(rows, cut)
        pieces = self._room_for(0, 3 * (aim + rows))
        list_pieces(batch.kv_lens[:rows], pieces, aim=aim, block=cut.one.keys)
        return pieces

    def _room_for(self, splits: int, size: int) -> Pieces:
        room = self._room
        assert room is not None, "reserve comes first"
        items = room.items[:size].view(3, -1)
        firsts, counts = room.even[splits] if splits else (room.firsts, room.counts)
        # Nobody counts arrivals: all pieces are merged by a launch of its own.
        return Pieces(splits, items, firsts, counts, room.partial, room.lse, counts)

    def _expanded(self, batch: ForwardBatch) -> Expanded | None:
        """Whether the rows that are no decodes have so many queries that keys should be made."""
        lens, first = batch.kv_lens_host, batch.num_decodes
        tokens = batch.num_tokens - first
        if lens is None or tokens < EXPANDED_FROM or self._needed().dtype.itemsize != 2:
            return None
        lens = lens[first : batch.num_rows]
        keys = int(lens.sum())
        if keys > MOST_KEYS * tokens:  # a long history is read as it is, or memory might not do
            return None
        return Expanded(keys, int(lens.max()))

    def _queries(self, batch: ForwardBatch, is_expanded: bool) -> Queries:
        """The tiles of the rows that are no decodes."""
        first = batch.num_decodes
        tokens = expanded.ROWS
        if not is_expanded:
            tokens = attention.tokens_of_tile(self._needed().num_heads, self._cut().many.rows)
        count = tile_count(batch.num_tokens - first, batch.num_rows - first, tokens, 1)
        tiles = torch.empty(2, count, dtype=torch.int32, device=batch.q_indptr.device)
        queries = Queries(
            batch.q_indptr[first:], batch.kv_lens[first:], batch.block_table[first:], tiles
        )
        list_tiles(queries, tile_rows=tokens, group=1)
        return queries

    def _needed(self) -> AttentionNeed:
        assert self._need is not None, "layout comes first"
        return self._need

    def _cut(self) -> attention.LatentCut:
        need = self._needed()
        processors = gpu_of(torch.device(need.device)).processors
        return attention.cut_of(need.num_heads, need.cache_dtype.itemsize, processors)


def _even(splits: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(first piece of each row, number of its pieces): i32[rows] each."""
    firsts = torch.arange(rows, dtype=torch.int32, device=device) * splits
    return firsts, torch.full_like(firsts, splits)


def _planned(batch: ForwardBatch) -> LatentPlan:
    assert isinstance(batch.attn, LatentPlan), "the batch was planned by another backend"
    return batch.attn
