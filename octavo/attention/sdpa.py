"""Paged attention in plain torch: pages are gathered, then torch's own attention runs.

The oracle for other backends, and the path where there is no compiler. Runs on any device, with
any block size. Decode rows run in padded groups, prefill rows one by one and in query blocks, so
that neither masks nor gathered pages grow without bound. Next file: `select.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from octavo.attention.base import AttentionNeed
from octavo.forward import CacheLayout, ForwardBatch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GROUP_SLOTS = 65536  # most cells gathered for a group of decode rows
QUERY_BLOCK = 256  # most query tokens that share a mask


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Neighbouring decode rows, padded to the longest of them."""

    start: int  # first row, which is also its first token
    stop: int
    slots: Tensor  # i64[rows, L]: the cell of each position
    kv_lens: Tensor  # i32[rows, 1]


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of more than one token, or one that is not sampled."""

    start: int  # first token in the batch
    length: int  # q_len: its tokens are the last ones of kv_len
    slots: Tensor  # i64[kv_len]


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """A step's cells, the same for all layers."""

    slot_map: Tensor  # i64[T]
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillRow, ...]


class SdpaAttention:
    """An AttentionBackend over pages [N, P, K, D]."""

    __slots__ = ()

    name = "sdpa"

    def supports(self, need: AttentionNeed) -> str | None:
        """Any shape; activations and cache in f32, bf16 or f16, the cache in FP8 as well."""
        if need.dtype not in DTYPES:
            return f"no {need.dtype}, only float32, bfloat16 and float16"
        if need.cache_dtype not in DTYPES + FP8:
            return f"no cache of {need.cache_dtype}, only float32, bfloat16, float16 and FP8"
        if need.cache_dtype not in FP8 and (need.key_scale, need.value_scale) != (1.0, 1.0):
            return f"scales of keys and values over a cache of {need.cache_dtype}, only over FP8"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} heads do not divide over {need.num_kv_heads} key/value heads"
        return None

    def layout(self, need: AttentionNeed, num_blocks: int) -> CacheLayout:
        """Keys and values alike: [N, P, K, D]."""
        shape = (num_blocks, need.block_size, need.num_kv_heads, need.head_dim)
        return CacheLayout(shape, shape, need.cache_dtype)

    def plan(self, batch: ForwardBatch) -> SdpaPlan:
        """Turns block tables into cells, padding included."""
        kv_lens = batch.kv_lens.tolist()
        starts = batch.q_indptr.tolist()
        prefills = []
        for row in range(batch.num_decodes, batch.num_rows):
            slots = _slots(batch, row, row + 1, kv_lens[row])
            prefills.append(PrefillRow(starts[row], starts[row + 1] - starts[row], slots[0]))
        groups = _groups(kv_lens[: batch.num_decodes])
        decodes = tuple(
            DecodeGroup(
                start,
                stop,
                _slots(batch, start, stop, max(kv_lens[start:stop])),
                batch.kv_lens[start:stop].unsqueeze(1),
            )
            for start, stop in groups
        )
        return SdpaPlan(batch.slot_map.long(), decodes, tuple(prefills))

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
        """q [T, Q, D], k and v [T, K, D] already rotated -> [T, Q * D]. Causal."""
        plan = batch.attn
        assert isinstance(plan, SdpaPlan), "the batch was planned by another backend"
        keys = Cells(batch.kv.keys[layer], need.key_scale)
        values = Cells(batch.kv.values[layer], need.value_scale)
        keys.store(plan.slot_map, k)
        values.store(plan.slot_map, v)
        out = torch.empty_like(q)
        for group in plan.decodes:
            out[group.start : group.stop] = _decode(q, keys, values, group, need, sinks)
        for row in plan.prefills:
            _prefill(q, keys, values, row, need, sinks, out)
        return out.view(q.shape[0], -1)


def _groups(kv_lens: list[int]) -> list[tuple[int, int]]:
    """Cuts rows into runs whose padded size stays below GROUP_SLOTS, one row at least."""
    groups = []
    start = longest = 0
    for row, length in enumerate(kv_lens):
        longest = max(longest, length)
        if row > start and (row + 1 - start) * longest > GROUP_SLOTS:
            groups.append((start, row))
            start, longest = row, length
    if kv_lens:
        groups.append((start, len(kv_lens)))
    return groups


def _slots(batch: ForwardBatch, start: int, stop: int, length: int) -> Tensor:
    """i64[rows, length]: the cell of each position of rows start..stop.

    Positions beyond a row's end get its first cell: it is masked, but it must be a number, and
    a cell that was never written may hold anything, NaN included.
    """
    size = batch.kv.block_size
    positions = torch.arange(length, device=batch.block_table.device)
    pages = batch.block_table[start:stop].long()
    slots = pages[:, positions // size] * size + positions % size
    inside = positions < batch.kv_lens[start:stop].unsqueeze(1)
    return torch.where(inside, slots, slots[:, :1])


class Cells:
    """The keys or the values of one layer's pages [N, P, K, D], as cells."""

    __slots__ = ("_cells", "_dtype", "_scale")

    def __init__(self, pages: Tensor, scale: float) -> None:
        """A number is stored divided by `scale`."""
        self._dtype, self._scale = pages.dtype, scale
        cells = pages.flatten(0, 1)
        # Torch moves FP8 about only as bytes.
        self._cells = cells.view(torch.uint8) if pages.dtype in FP8 else cells

    def store(self, slots: Tensor, new: Tensor) -> None:
        """new [T, K, D] into cells i64[T]; what FP8 cannot hold becomes its largest number."""
        if self._scale != 1.0:
            new = new / self._scale
        if self._dtype in FP8:
            largest = torch.finfo(self._dtype).max
            new = new.float().clamp(-largest, largest).to(self._dtype).view(torch.uint8)
        self._cells.index_copy_(0, slots, new.to(self._cells.dtype))

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Cells i64[L] -> [L, K, D] of `dtype`."""
        found = self._cells.index_select(0, slots).view(self._dtype).to(dtype)
        return found if self._scale == 1.0 else found * self._scale


def _decode(
    q: Tensor,
    keys: Cells,
    values: Cells,
    group: DecodeGroup,
    need: AttentionNeed,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one group -> [rows, Q, D]. Heads that share a key are rows of one product."""
    rows, length = group.slots.shape
    packed = q[group.start : group.stop].view(rows, need.num_kv_heads, -1, need.head_dim)
    flat = group.slots.flatten()
    key = keys.read(flat, q.dtype).view(rows, length, -1, need.head_dim).transpose(1, 2)
    value = values.read(flat, q.dtype).view(rows, length, -1, need.head_dim).transpose(1, 2)
    positions = torch.arange(length, device=q.device)
    mask = positions < group.kv_lens
    if need.window:
        mask &= positions >= group.kv_lens - need.window
    sink = None if sinks is None else sinks.view(need.num_kv_heads, -1, 1)
    out = _attend(packed, key, value, mask[:, None, None, :], need, sink)
    return out.reshape(rows, need.num_heads, need.head_dim)


def _prefill(
    q: Tensor,
    keys: Cells,
    values: Cells,
    row: PrefillRow,
    need: AttentionNeed,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Attention of one row into out[row], a block of queries at a time."""
    key = keys.read(row.slots, q.dtype).transpose(0, 1)  # [K, kv_len, D]
    value = values.read(row.slots, q.dtype).transpose(0, 1)
    before = len(row.slots) - row.length  # positions computed in earlier steps
    group = need.num_heads // need.num_kv_heads
    for start in range(0, row.length, QUERY_BLOCK):
        size = min(QUERY_BLOCK, row.length - start)
        first = before + start
        stop = first + size
        low = max(0, first - need.window + 1) if need.window else 0
        block = slice(row.start + start, row.start + start + size)
        packed = q[block].view(size, need.num_kv_heads, group, need.head_dim)
        packed = packed.permute(1, 2, 0, 3).reshape(1, need.num_kv_heads, -1, need.head_dim)
        mask = _causal(first, stop, low, need.window, q.device).repeat(group, 1)
        sink = None
        if sinks is not None:
            sink = sinks.view(need.num_kv_heads, group, 1).repeat_interleave(size, dim=1)
        part = _attend(packed, key[None, :, low:stop], value[None, :, low:stop], mask, need, sink)
        part = part.view(need.num_kv_heads, group, size, need.head_dim)
        out[block] = part.permute(2, 0, 1, 3).reshape(size, need.num_heads, need.head_dim)


def _causal(first: int, stop: int, low: int, window: int, device: torch.device) -> Tensor:
    """Which of positions low..stop each of the queries first..stop may see: bool[queries, keys]."""
    query = torch.arange(first, stop, device=device).unsqueeze(1)
    key = torch.arange(low, stop, device=device)
    mask = key <= query
    if window:
        mask &= key > query - window
    return mask


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, need: AttentionNeed, sink: Tensor | None
) -> Tensor:
    """q [b, K, m, D], k and v [b, K, n, D], mask to [b, K, m, n], sink [K, m, 1] -> like q."""
    if not need.soft_cap and sink is None:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=need.scale)
    scores = q.float() @ k.float().transpose(-1, -2) * need.scale
    if need.soft_cap:
        scores = torch.tanh(scores / need.soft_cap) * need.soft_cap
    scores = scores.masked_fill(~mask, -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.float().expand(*scores.shape[:-1], 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return (weights @ v.float()).to(q.dtype)
