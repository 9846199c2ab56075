"""Rows of any number of queries on a GPU: our own kernels, and the seam for those of libraries.

A `Prefill` serves the rows of a step that are not decodes, over pages [N, K, P, D] that are filled
already. Not for: rows of one query (`kernels/triton/attention_decode.py`). Next file: `fa3.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.attention.base import AttentionNeed
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.triton import attention_tiles as tiles
from octavo.kernels.triton.attention_decode import Heads, Tile
from octavo.kernels.triton.attention_varlen import Queries, list_tiles, tile_count, varlen
from octavo.kernels.triton.launch import gpu_of

GLUON = "3.6"  # of Triton: the language of `attention_hopper.py` changes from version to version
TRIAL_ERROR = 1e-2  # relative, by norm: what bf16 explains


class Prefill(Protocol):
    """Attends, causally, over pages."""

    name: str
    takes_all: bool  # in a step with such rows also those of one query

    def supports(self, need: AttentionNeed) -> str | None:
        """None if it can, else the reason why not."""

    def plan(self, need: AttentionNeed, batch: ForwardBatch, first: int) -> object:
        """What all layers share, for the rows of a batch from `first` on."""

    def run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: Heads,
        planned: object,
        out: Tensor,
    ) -> None:
        """q [T, Q, D] over one layer's pages [N, K, P, D] into out [T, Q, D], both of all rows."""


@dataclass(frozen=True, slots=True)
class TritonRows:
    """A step's tiles."""

    queries: Queries
    tile_rows: int  # product rows of a tile
    tile: Tile
    counter: Tensor | None  # of the kernel for Hopper, if that one serves the step


class TritonPrefill:
    """Our own kernels: the one for Hopper where it can and rows are long, else the general one."""

    name = "triton"
    takes_all = False

    def __init__(self) -> None:
        self._counter: Tensor | None = None

    def supports(self, need: AttentionNeed) -> str | None:
        """Whatever the backend around it can."""
        return None

    def plan(self, need: AttentionNeed, batch: ForwardBatch, first: int) -> TritonRows:
        """Lists tiles on the device, in one launch."""
        group = need.num_heads // need.num_kv_heads
        rows, tile = tiles.varlen_tile(need.head_dim, need.cache_dtype.itemsize, group, batch.max_q)
        counter = self._hopper(need, batch, first)
        if counter is not None:
            rows = tiles.HOPPER_ROWS
        indptr = batch.q_indptr[first:]
        count = tile_count(batch.num_tokens - first, batch.num_rows - first, rows, group)
        tile_list = torch.empty(2, count, dtype=torch.int32, device=indptr.device)
        queries = Queries(indptr, batch.kv_lens[first:], batch.block_table[first:], tile_list)
        list_tiles(queries, tile_rows=rows, group=group)
        return TritonRows(queries, rows, tile, counter)

    def run(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: Heads,
        planned: object,
        out: Tensor,
    ) -> None:
        """q [T, Q, D] over one layer's pages [N, K, P, D] into out [T, Q, D], both of all rows."""
        assert isinstance(planned, TritonRows), "planned by another"
        queries = planned.queries
        if planned.counter is not None:
            from octavo.kernels.triton.attention_hopper import hopper

            hopper(q, keys, values, queries, heads, planned.counter, out)
        else:
            varlen(q, keys, values, queries, heads, planned.tile_rows, planned.tile, out)

    def _hopper(self, need: AttentionNeed, batch: ForwardBatch, first: int) -> Tensor | None:
        """The counter of the kernel for Hopper, if that one serves the rows from `first` on."""
        device = torch.device(need.device)
        group = need.num_heads // need.num_kv_heads
        if group > tiles.HOPPER_ROWS or not triton.__version__.startswith(GLUON):
            return None
        units = need.num_kv_heads * (batch.num_tokens - first) * group // tiles.HOPPER_ROWS
        processors = gpu_of(device).processors
        if not tiles.is_for_hopper(units, batch.max_q, batch.max_kv, processors):
            return None
        from octavo.kernels.triton.attention_hopper import can_serve

        if not can_serve(device, need.dtype, need.cache_dtype, need.head_dim, group):
            return None
        if self._counter is None:
            self._counter = torch.zeros(2, dtype=torch.int32, device=device)
        return self._counter


def trial(prefill: Prefill, need: AttentionNeed) -> str | None:
    """Why a library's kernel cannot be trusted here: it is run once, beside plain torch.

    Takes the need's shape, two rows on pages in disorder, one with a history.
    """
    lengths = ((need.block_size + 3, need.block_size + 3), (5, 2 * need.block_size + 1))
    batch, q = _trial_batch(need, lengths)
    out = torch.full_like(q, torch.nan)
    heads = Heads(need.num_heads, need.scale, need.window, need.soft_cap)
    keys, values = batch.kv.keys[0], batch.kv.values[0]
    try:
        prefill.run(q, keys, values, heads, prefill.plan(need, batch, 0), out)
        found = out.cpu()  # waits
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        return f"a trial failed: {(str(error).strip() or repr(error)).splitlines()[0]}"
    expected = _trial_answer(need, batch, q).cpu()
    off = float((found.float() - expected).norm() / expected.norm())
    if not off < TRIAL_ERROR:
        return f"a trial was off by {off:.1e}, more than {TRIAL_ERROR:.0e}"
    return None


def _trial_batch(
    need: AttentionNeed, lengths: tuple[tuple[int, int], ...]
) -> tuple[ForwardBatch, Tensor]:
    """Rows of (queries, keys) on random pages, and random queries [T, Q, D]."""
    device = torch.device(need.device)
    widths = [-(-keys // need.block_size) for _, keys in lengths]
    table = torch.zeros(len(lengths), max(widths), dtype=torch.int32, device=device)
    order = torch.randperm(sum(widths), device=device).int()
    for row, width in enumerate(widths):
        table[row, :width] = order[sum(widths[:row]) : sum(widths[: row + 1])]
    shape = (sum(widths), need.num_kv_heads, need.block_size, need.head_dim)
    pages = torch.randn((2, *shape), device=device).to(need.dtype)
    ends = np.cumsum([0, *(queries for queries, _ in lengths)])
    lens = np.array([keys for _, keys in lengths], np.int32)
    none = torch.empty(0, dtype=torch.int32, device=device)
    batch = ForwardBatch(
        num_rows=len(lengths),
        num_tokens=int(ends[-1]),
        num_decodes=0,
        positions=none,
        slot_map=none,
        q_indptr=torch.from_numpy(ends).to(device, torch.int32),
        kv_lens=torch.from_numpy(lens).to(device),
        block_table=table,
        sample_rows=none,
        max_q=max(queries for queries, _ in lengths),
        max_kv=max(keys for _, keys in lengths),
        kv=KVCache((pages[0],), (pages[1],), need.block_size),
        kv_lens_host=lens,
    )
    q = torch.randn(batch.num_tokens, need.num_heads, need.head_dim, device=device)
    return batch, q.to(need.dtype)


def _trial_answer(need: AttentionNeed, batch: ForwardBatch, q: Tensor) -> Tensor:
    """The same in f32 -> [T, Q, D]."""
    out = torch.empty(q.shape, device=q.device)
    group = need.num_heads // need.num_kv_heads
    starts = batch.q_indptr.tolist()
    for row, length in enumerate(batch.kv_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        at = torch.arange(length, device=q.device)
        where = batch.block_table[row].long()[at // need.block_size]
        cells = (
            pages[0][where, :, at % need.block_size].float().repeat_interleave(group, dim=1)
            for pages in (batch.kv.keys, batch.kv.values)
        )
        key, value = cells
        position = length - (stop - start) + torch.arange(stop - start, device=q.device)
        score = torch.einsum("qhd,khd->hqk", q[start:stop].float(), key) * need.scale
        if need.soft_cap:
            score = torch.tanh(score / need.soft_cap) * need.soft_cap
        hidden = at > position[:, None]
        if need.window:
            hidden |= at <= position[:, None] - need.window
        weight = score.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        out[start:stop] = torch.einsum("hqk,khd->qhd", weight, value)
    return out
