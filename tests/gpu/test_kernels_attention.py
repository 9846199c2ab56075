"""Attention over pages on the GPU against dense attention in f32, on fresh random batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.attention.base import AttentionNeed, HeadRules
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels import reference
from tests.gpu.measure import bound, distance, poison, poison_allocator

pytest.importorskip("triton")

from octavo.attention.prefill import TritonRows
from octavo.attention.triton import EVEN, UNEVEN, TritonAttention
from octavo.kernels.triton import attention_tiles as tiles
from octavo.kernels.triton import rotary
from octavo.kernels.triton.launch import gpu_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def make_need(device: torch.device, **changes: object) -> AttentionNeed:
    need = AttentionNeed(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        scale=0.125,
        block_size=16,
        dtype=BF16,
        cache_dtype=BF16,
        device=str(device),
    )
    need = replace(need, **changes)
    if device.type == "cpu" and need.dtype == BF16:  # the interpreter multiplies no bf16
        cache = F16 if need.cache_dtype == BF16 else need.cache_dtype
        return replace(need, dtype=F16, cache_dtype=cache)
    return need


def make_batch(
    need: AttentionNeed, backend: TritonAttention, q_lens: list[int], kv_lens: list[int]
) -> ForwardBatch:
    """Rows on random pages; keys of earlier steps are random, unused cells hold NaN."""
    device, page = torch.device(need.device), need.block_size
    widths = [-(-length // page) for length in kv_lens]
    layout = backend.layout(need, sum(widths) + 3)
    order = torch.randperm(sum(widths) + 3)
    table = torch.full((len(kv_lens), max(widths) + 2), 0, dtype=torch.int32)
    used = 0
    for row, width in enumerate(widths):
        table[row, :width] = order[used : used + width].int()
        used += width
    pages = [poison(torch.empty(layout.key, dtype=layout.dtype)) for _ in range(2)]
    slots, positions = [], []
    for row, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        at = torch.arange(kv_len)
        where = table[row].long()[at // page]
        for cells in pages:
            values = torch.randn(kv_len, need.num_kv_heads, need.head_dim)
            cells[where, :, at % page] = values.to(layout.dtype)
            # Earlier steps left the rest of the last page clear; where this step is the page's
            # first, or fills several cells, clearing is its own work.
            if q_len == 1 and kv_len % page != 1:
                rest = cells[int(where[-1]), :, (kv_len - 1) % page + 1 :]
                rest.copy_(torch.zeros_like(rest))
        new = at[kv_len - q_len :]
        positions += new.tolist()
        slots += (where[new] * page + new % page).tolist()
    ends = np.cumsum([0, *q_lens])
    return ForwardBatch(
        num_rows=len(q_lens),
        num_tokens=int(ends[-1]),
        num_decodes=next((i for i, n in enumerate(q_lens) if n != 1), len(q_lens)),
        positions=torch.tensor(positions, dtype=torch.int32, device=device),
        slot_map=torch.tensor(slots, dtype=torch.int32, device=device),
        q_indptr=torch.tensor(ends, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        block_table=table.to(device),
        sample_rows=torch.tensor(ends[1:] - 1, dtype=torch.int32, device=device),
        max_q=max(q_lens),
        max_kv=max(kv_lens),
        kv=KVCache((pages[0].to(device),), (pages[1].to(device),), page),
        kv_lens_host=np.array(kv_lens, np.int32),
    )


def dense(
    q: Tensor, need: AttentionNeed, batch: ForwardBatch, sinks: Tensor | None = None
) -> Tensor:
    """The same attention in f32 over the pages as they are, row by row."""
    out = torch.empty(q.shape, dtype=F32)
    q = q.float().cpu()
    page, group = need.block_size, need.num_heads // need.num_kv_heads
    keys, values = (cells[0].float().cpu() for cells in (batch.kv.keys, batch.kv.values))
    ends = batch.q_indptr.tolist()
    for row, length in enumerate(batch.kv_lens.tolist()):
        at = torch.arange(length)
        where = batch.block_table[row].cpu().long()[at // page]
        k = keys[where, :, at % page].repeat_interleave(group, dim=1) * need.key_scale
        v = values[where, :, at % page].repeat_interleave(group, dim=1) * need.value_scale
        start, stop = ends[row], ends[row + 1]
        position = length - (stop - start) + torch.arange(stop - start)
        score = torch.einsum("qhd,khd->hqk", q[start:stop], k) * need.scale
        if need.soft_cap:
            score = torch.tanh(score / need.soft_cap) * need.soft_cap
        hidden = at[None, :] > position[:, None]
        if need.window:
            hidden |= at[None, :] <= position[:, None] - need.window
        score = score.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            extra = sinks.cpu()[:, None, None].expand(-1, stop - start, 1)
            score = torch.cat((score, extra), dim=-1)
        weight = score.softmax(dim=-1)[..., :length]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weight, v)
    return out.flatten(1)


def check(need: AttentionNeed, q_lens: list[int], kv_lens: list[int], form: str | None) -> None:
    backend = TritonAttention()
    assert backend.supports(need) is None
    batch = make_batch(need, backend, q_lens, kv_lens)
    device = torch.device(need.device)
    tokens = batch.num_tokens
    q = torch.randn(tokens, need.num_heads, need.head_dim, device=device).to(need.dtype)
    k, v = torch.randn(2, tokens, need.num_kv_heads, need.head_dim, device=device).to(need.dtype)
    sinks = torch.randn(need.num_heads, device=device) * 2 if need.sinks else None
    poison_allocator(device)
    batch = replace(batch, attn=backend.plan(batch, form))
    found = backend.forward(q, k, v, 0, need, batch, sinks=sinks)
    error = distance(found, dense(q, need, batch, sinks))
    assert found.dtype == need.dtype
    assert error < bound(device, need.dtype)


CASES = [
    {},
    {"dtype": F16, "cache_dtype": F16},
    {"dtype": F32, "cache_dtype": F32},
    {"cache_dtype": E4M3},
    {"dtype": F16, "cache_dtype": E5M2, "block_size": 64},
    {"block_size": 128, "head_dim": 128, "num_heads": 4, "num_kv_heads": 1},
    {"head_dim": 80, "num_heads": 7, "num_kv_heads": 1},
    {"head_dim": 256, "num_heads": 2, "num_kv_heads": 2, "block_size": 32},
    {"head_dim": 16, "num_heads": 3, "num_kv_heads": 3},
    {"soft_cap": 2.0},
    {"window": 20},
    {"window": 1, "block_size": 64},
    {"sinks": True},
    {"sinks": True, "window": 20, "cache_dtype": E4M3, "key_scale": 0.02, "value_scale": 0.5},
    {"cache_dtype": E5M2, "key_scale": 4.0, "value_scale": 0.01, "block_size": 32},
]


@pytest.mark.parametrize("form", [EVEN, UNEVEN])
@pytest.mark.parametrize("changes", CASES)
def test_decode(device: torch.device, changes: dict[str, object], form: str) -> None:
    lens = [1, 16, 17, 150, 3]
    check(make_need(device, **changes), [1] * len(lens), lens, form)


@pytest.mark.parametrize("windows_only", [False, True])
@pytest.mark.parametrize("changes", [c for c in CASES if "window" in c])
def test_windows_in_a_list_of_pieces(
    device: torch.device,
    changes: dict[str, object],
    windows_only: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As layers with a large window take, here with small ones."""
    monkeypatch.setattr(tiles, "LONG", -1)
    lens = [1, 16, 17, 150, 3]
    need = make_need(device, windows_only=windows_only, **changes)
    check(need, [1] * len(lens), lens, UNEVEN)


@pytest.mark.parametrize("changes", CASES)
def test_prefill(device: torch.device, changes: dict[str, object]) -> None:
    check(make_need(device, **changes), [70, 2, 33], [70, 50, 100], None)


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 128},
        {"head_dim": 64, "dtype": F16, "cache_dtype": F16, "block_size": 32},
        {"head_dim": 128, "block_size": 128, "num_heads": 4, "num_kv_heads": 4},
        {"head_dim": 64, "block_size": 64, "num_heads": 32, "num_kv_heads": 1, "sinks": True},
        {"head_dim": 128, "window": 100, "soft_cap": 3.0},
        {"head_dim": 64, "window": 1000, "sinks": True, "scale": 3.0},
    ],
)
def test_long_rows(device: torch.device, changes: dict[str, object]) -> None:
    """Those that the kernel for Hopper serves: chunks at any place, and rows of decodes before."""
    if device.type != "cuda" or not gpu_of(device).hopper:
        pytest.skip("no Hopper GPU")
    need = make_need(device, **changes)
    backend = TritonAttention()
    q_lens, kv_lens = [1, 70, 2, 600, 129], [500, 2101, 60, 600, 333]
    batch = make_batch(need, backend, q_lens, kv_lens)
    rows = backend.plan(batch).prefill
    assert isinstance(rows, TritonRows)
    assert rows.counter is not None
    for _ in range(3):
        check(need, q_lens, kv_lens, None)


@pytest.mark.parametrize("changes", [{}, {"cache_dtype": E4M3}, {"window": 9}])
def test_mixed(device: torch.device, changes: dict[str, object]) -> None:
    """Decode rows and chunks in one step, a chunk of one token among them."""
    check(make_need(device, **changes), [1, 1, 40, 1, 5], [70, 9, 45, 20, 5], None)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("form", [EVEN, UNEVEN])
def test_rows_of_padding(device: torch.device, rows: int, form: str) -> None:
    """Rows without keys give zeros and store nothing; their neighbours are as they were."""
    need = make_need(device)
    backend = TritonAttention()
    batch = make_batch(need, backend, [1] * rows, [30] * rows)
    lens, slots = batch.kv_lens.clone(), batch.slot_map.clone()
    lens[0], slots[0] = 0, -1
    batch = replace(batch, kv_lens=lens, slot_map=slots)
    q = torch.randn(rows, need.num_heads, need.head_dim, device=device).to(need.dtype)
    k, v = torch.randn(2, rows, need.num_kv_heads, need.head_dim, device=device).to(need.dtype)
    before = batch.kv.keys[0].clone()
    poison_allocator(device)
    batch = replace(batch, attn=backend.plan(batch, form))
    found = backend.forward(q, k, v, 0, need, batch)
    assert bool((found[0] == 0).all())
    assert bool(torch.isfinite(found.float()).all())
    stored = (batch.kv.keys[0].view(torch.int16) != before.view(torch.int16)).any(-1).sum()
    assert int(stored) == (rows - 1) * need.num_kv_heads


@pytest.mark.parametrize("form", [EVEN, UNEVEN])
@pytest.mark.parametrize("cache", [BF16, E4M3])
def test_a_captured_step_serves_other_lengths(
    device: torch.device, cache: torch.dtype, form: str
) -> None:
    """A graph fixes rows and form; lengths, pages and slots are read when it is replayed."""
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    need = make_need(device, cache_dtype=cache, block_size=64)
    backend = TritonAttention()
    lens = [900, 60, 300, 5]
    batch = make_batch(need, backend, [1] * 4, lens)
    backend.reserve(16)
    q = torch.randn(4, need.num_heads, need.head_dim, device=device).to(BF16)
    k, v = torch.randn(2, 4, need.num_kv_heads, need.head_dim, device=device).to(BF16)

    def step() -> Tensor:
        planned = replace(batch, attn=backend.plan(batch, form))
        return backend.forward(q, k, v, 0, need, planned)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for shorter in (0, 1, 4):
        changed = [max(1, length - 70 * shorter) for length in lens]
        batch.kv_lens.copy_(torch.tensor(changed, dtype=torch.int32))
        at = torch.tensor(changed) - 1
        pages = batch.block_table.cpu()[torch.arange(4), at // 64]
        batch.slot_map.copy_((pages * 64 + at % 64).int())
        q.normal_()
        poison(found)
        graph.replay()
        assert distance(found, dense(q, need, batch)) < bound(device, BF16)


@pytest.mark.parametrize("norms", [False, True])
def test_fused_equals_apart(device: torch.device, norms: bool) -> None:
    need = make_need(device, dtype=F32, cache_dtype=F32)
    backend = TritonAttention()
    batch = make_batch(need, backend, [1, 6], [33, 20])
    tokens, size = batch.num_tokens, need.head_dim
    qkv = torch.randn(tokens, (need.num_heads + 2 * need.num_kv_heads) * size, device=device)
    table = torch.randn(64, size, device=device)
    weights = [torch.randn(size, device=device) for _ in range(2)] if norms else [None, None]
    batch = replace(batch, attn=backend.plan(batch))
    rules = HeadRules(table, weights[0], weights[1], 1e-6)
    found = backend.forward_fused(qkv, rules, 0, need, batch)
    heads = [need.num_heads, need.num_kv_heads, need.num_kv_heads]
    q, k, v = qkv.view(tokens, -1, size).split(heads, dim=1)
    if norms:
        q, k = (reference.rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
    q, k = reference.rope(q, k, batch.positions, table)
    assert distance(found, backend.forward(q, k, v, 0, need, batch)) < 1e-5


@pytest.mark.parametrize(("norms", "form"), [(False, UNEVEN), (True, EVEN)])
@pytest.mark.parametrize("changes", CASES)
def test_newest_tokens_within_attention(
    device: torch.device,
    changes: dict[str, object],
    norms: bool,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where all rows decode: the same results and the same pages as of a launch before it."""
    need = make_need(device, **changes)
    backend = TritonAttention()
    lens = [1, 16, 17, 150, 3, 129]
    batch = make_batch(need, backend, [1] * len(lens), lens)
    backend.reserve(len(lens))
    slots = batch.slot_map.clone()
    slots[2] = -1
    batch = replace(batch, slot_map=slots)
    size, heads = need.head_dim, need.num_heads + 2 * need.num_kv_heads
    qkv = torch.randn(len(lens), heads * size, device=device).to(need.dtype)
    weights = [torch.rand(size, device=device).to(need.dtype) if norms else None for _ in "qk"]
    sinks = torch.randn(need.num_heads, device=device) * 2 if need.sinks else None
    rules = HeadRules(torch.randn(200, size, device=device), weights[0], weights[1], 1e-6, sinks)
    apart = replace(
        batch,
        kv=KVCache((batch.kv.keys[0].clone(),), (batch.kv.values[0].clone(),), need.block_size),
    )
    poison_allocator(device)
    monkeypatch.setattr(tiles, "turns_newest", lambda *_, norms: norms in (True, False))
    planned = replace(backend.plan(batch, form), even=True)  # a list can do it too
    found = backend.forward_fused(qkv, rules, 0, need, replace(batch, attn=planned))
    q = rotary.rope_store(
        qkv,
        apart.kv.keys[0],
        apart.kv.values[0],
        positions=batch.positions,
        slot_map=slots,
        num_heads=need.num_heads,
        cos_sin=rules.cos_sin,
        query_norm=rules.query_norm,
        key_norm=rules.key_norm,
        eps=rules.eps,
        key_scale=need.key_scale,
        value_scale=need.value_scale,
    )
    expected = dense(q, need, apart, sinks)
    stored = torch.tensor([0, 1, 3, 4, 5])  # what is not stored nobody can compare
    assert distance(found[stored], expected[stored]) < bound(device, need.dtype)
    for one, other in ((batch.kv.keys, apart.kv.keys), (batch.kv.values, apart.kv.values)):
        new, old = one[0].float(), other[0].float()
        assert torch.equal(new.isnan(), old.isnan())
        error = distance(new.nan_to_num(), old.nan_to_num())
        assert error < bound(device, need.dtype, need.cache_dtype)


@pytest.mark.parametrize(
    "changes", [{}, {"window": 9, "sinks": True}, {"cache_dtype": E4M3, "soft_cap": 2.0}]
)
def test_tokens_that_are_wanted_alone(device: torch.device, changes: dict[str, object]) -> None:
    """As of all tokens, whichever they are, and wherever in their rows."""
    need = make_need(device, **changes)
    backend = TritonAttention()
    batch = make_batch(need, backend, [1, 40, 1, 25], [33, 50, 7, 25])
    heads, size = need.num_heads + 2 * need.num_kv_heads, need.head_dim
    qkv = torch.randn(batch.num_tokens, heads * size, device=device).to(need.dtype)
    sinks = torch.randn(need.num_heads, device=device) if need.sinks else None
    rules = HeadRules(torch.randn(64, size, device=device), sinks=sinks)
    batch = replace(batch, attn=backend.plan(batch))
    rows = torch.tensor([66, 0, 40, 41, 17, 17], dtype=torch.int32, device=device)
    every = backend.forward_fused(qkv, rules, 0, need, batch)
    few = backend.forward_fused(qkv, rules, 0, need, batch, rows)
    assert torch.equal(few, every[rows.long()])


@pytest.mark.parametrize("cache", [E4M3, E5M2])
def test_keys_and_values_are_stored_by_scale(device: torch.device, cache: torch.dtype) -> None:
    """As projected and as heads alike: divided, rounded, and cut at the largest number."""
    # The interpreter rounds badly, and does not cut at the largest number.
    real = device.type == "cuda"
    value_scale = 0.5**14 if real else 0.5**4
    error = (0.04 if cache == E4M3 else 0.08) if real else 0.2
    need = make_need(
        device, cache_dtype=cache, key_scale=0.25, value_scale=value_scale, block_size=32
    )
    backend = TritonAttention()
    largest = torch.finfo(cache).max
    for fused in (False, True):
        batch = make_batch(need, backend, [40], [40])
        heads = (need.num_heads, need.num_kv_heads, need.num_kv_heads)
        qkv = torch.randn(40, sum(heads) * need.head_dim, device=device).to(need.dtype)
        q, k, v = qkv.view(40, -1, need.head_dim).split(list(heads), dim=1)
        batch = replace(batch, attn=backend.plan(batch))
        if fused:
            still = torch.zeros(40, need.head_dim, device=device)
            still[:, : need.head_dim // 2] = 1.0  # cosines: no rotation
            backend.forward_fused(qkv, HeadRules(still), 0, need, batch)
        else:
            backend.forward(q, k, v, 0, need, batch)
        where = batch.slot_map.long()
        for cells, new, scale in (
            (batch.kv.keys[0], k, need.key_scale),
            (batch.kv.values[0], v, need.value_scale),
        ):
            found = cells.float().transpose(1, 2).flatten(0, 1)[where]
            wanted = (new.float() / scale).clamp(-largest, largest)
            assert distance(found, wanted) < error
            assert float(found.abs().max()) <= largest


def test_refusals(device: torch.device) -> None:
    backend = TritonAttention()
    for changes, word in [
        ({"head_dim": 72}, "multiples of 16"),
        ({"block_size": 24}, "16, 32, 64 and 128"),
        ({"num_heads": 7}, "do not divide"),
        ({"cache_dtype": F32}, "a cache of"),
        ({"dtype": F32, "cache_dtype": E4M3}, "FP8"),
        ({"key_scale": 2.0}, "only over FP8"),
        ({"dtype": torch.float64}, "float64"),
    ]:
        reason = backend.supports(make_need(device, **changes))
        assert reason is not None
        assert word in reason
