"""Kernels of multi-head latent attention, on fresh random shapes, beside plain torch in f32."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from octavo.kernels import reference
from tests.gpu.measure import bound, distance, poison, poison_allocator

pytest.importorskip("triton")

from octavo.kernels.triton import latent, latent_attention, latent_expanded
from octavo.kernels.triton.attention_pieces import Pieces, list_pieces, merge
from octavo.kernels.triton.attention_varlen import Queries, list_tiles, tile_count
from octavo.kernels.triton.latent_attention import LatentCut

# (activations, cache); Triton's interpreter has no products of bf16.
TYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
]
types = pytest.mark.parametrize(("dtype", "cache"), TYPES)


@dataclass(frozen=True)
class Sizes:
    """A model's: heads, plain, rank, turned, value, and the page."""

    heads: int
    plain: int
    rank: int
    turned: int
    value: int
    page: int


SMALL = [Sizes(4, 24, 32, 16, 20, 16), Sizes(5, 16, 48, 8, 16, 32), Sizes(20, 16, 32, 16, 16, 64)]
PUBLISHED = [Sizes(16, 128, 512, 64, 128, page) for page in (16, 64, 128)]
PUBLISHED.append(Sizes(128, 128, 512, 64, 128, 64))


def sizes_of(device: torch.device, seed: int) -> Sizes:
    """Small ones for the interpreter, published ones too on a GPU."""
    return random.Random(seed).choice(SMALL + PUBLISHED if device.type == "cuda" else SMALL)


def skip_narrow(device: torch.device, dtype: torch.dtype) -> None:
    if device.type != "cuda" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no products of bf16")


def bound_of(device: torch.device, dtype: torch.dtype) -> float:
    """Arithmetic of f16 over FP8, and queries that are rounded twice."""
    return 2 * bound(device, dtype)


@types
@pytest.mark.parametrize("tokens", [1, 7, 70, 300])
def test_prepare(
    device: torch.device, seed: int, dtype: torch.dtype, cache: torch.dtype, tokens: int
) -> None:
    """Queries are absorbed and rotated; pages hold normalized latents and rotated rests."""
    skip_narrow(device, dtype)
    one = sizes_of(device, seed)
    if device.type != "cuda":
        tokens = min(tokens, 7)
    plain, rank, turned = one.plain, one.rank, one.turned
    width = one.heads * (plain + turned)
    both = torch.randn(tokens, width + rank + turned, device=device).to(dtype)
    heads, vector = both.split([width, rank + turned], dim=1)
    factor = (torch.randn(one.heads, plain, rank, device=device) / plain**0.5).to(dtype)
    norm = torch.rand(rank, device=device).to(dtype)
    table = torch.randn(50, turned, device=device)
    positions = torch.randint(0, 50, (tokens,), device=device, dtype=torch.int32)
    count = tokens // one.page + 3
    places = random.Random(seed).randrange(one.page) + torch.arange(tokens, device=device)
    blocks = torch.randperm(count, device=device)
    slots = (blocks[places // one.page] * one.page + places % one.page).int()
    slots[: tokens // 3] = -1
    pages = torch.randn(count, one.page, rank + turned, device=device).to(cache)
    before = pages.clone()
    poison_allocator(device)
    found = latent.prepare(
        heads,
        vector,
        pages,
        factor=factor,
        norm=norm,
        eps=1e-6,
        positions=positions,
        slot_map=slots,
        cos_sin=table,
    )
    apart = heads.float().view(tokens, one.heads, -1)
    q, k = reference.rope(apart[..., plain:], vector[:, None, rank:].float(), positions, table)
    absorbed = torch.einsum("tqc,qcl->tql", apart[..., :plain], factor.float())
    assert distance(found, torch.cat((absorbed, q), dim=2)) < bound(device, dtype)
    stored = reference.rms_norm(vector[:, :rank].float(), norm.float(), 1e-6)
    new = torch.cat((stored, k[:, 0]), dim=1).to(dtype).to(cache).float()
    expected = before.float().flatten(0, 1)
    kept = slots >= 0
    expected[slots[kept].long()] = new[kept]
    cleared = cells_cleared(slots.tolist(), one.page)
    expected[cleared] = 0.0
    written = pages.float().flatten(0, 1)
    # One step of the cache's own rounding, where a number lies on an edge.
    assert distance(written, expected) < max(bound(device, dtype, cache), 1e-2)
    untouched = torch.ones(len(written), dtype=torch.bool, device=device)
    untouched[slots[kept].long()] = False
    untouched[cleared] = False
    assert torch.equal(written[untouched], before.float().flatten(0, 1)[untouched])


def cells_cleared(slots: list[int], page: int) -> list[int]:
    """Those after a page's last token of a step, if the step began the page or wrote several."""
    found = []
    for index, slot in enumerate(slots):
        is_last = index + 1 == len(slots) or slots[index + 1] != slot + 1
        several = index > 0 and slots[index - 1] == slot - 1
        if slot >= 0 and is_last and (several or slot % page == 0):
            found += range(slot + 1, (slot // page + 1) * page)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 20, 300])
def test_project(device: torch.device, seed: int, dtype: torch.dtype, tokens: int) -> None:
    skip_narrow(device, dtype)
    one = sizes_of(device, seed)
    if device.type != "cuda":
        tokens = min(tokens, 20)
    sums = torch.randn(tokens, one.heads, one.rank, device=device).to(dtype)
    factor = (torch.randn(one.heads, one.rank, one.value, device=device) / one.rank**0.5).to(dtype)
    out = poison(torch.empty(tokens, one.heads * one.value, device=device, dtype=dtype))
    latent.project(sums, factor, out)
    exact = torch.einsum("tql,qlv->tqv", sums.float(), factor.float())
    assert distance(out, exact.flatten(1)) < bound(device, dtype)


def random_rows(
    device: torch.device, one: Sizes, cache: torch.dtype, lens: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages with NaN where no row has any, and a table and lengths.

    Cells after a row's last one in its page are finite, as whoever begins a page leaves them.
    """
    widths = [-(-length // one.page) for length in lens]
    order = torch.randperm(sum(widths) + 2)
    pages = torch.full((len(order), one.page, one.rank + one.turned), torch.nan)
    table = torch.zeros(len(lens), max(widths) + 1, dtype=torch.int32)
    for row, length in enumerate(lens):
        own = order[sum(widths[:row]) : sum(widths[: row + 1])]
        pages[own] = 3.0
        table[row, : widths[row]] = own.int()
        cells = torch.arange(length)
        values = torch.randn(length, one.rank + one.turned)
        pages[own[cells // one.page], cells % one.page] = values
    return (
        pages.to(device).to(cache),
        table.to(device),
        torch.tensor(lens, dtype=torch.int32, device=device),
    )


def attended(q: Tensor, pages: Tensor, blocks: Tensor, length: int, rank: int) -> Tensor:
    """One query [Q, D] over the first `length` cells of a row, in f32 -> [Q, L]."""
    cells = pages[blocks.long()].flatten(0, 1)[:length].float()
    weights = (q.float() @ cells.t() * 0.2).softmax(dim=-1)
    return weights @ cells[:, :rank]


def cut_for(one: Sizes, cache: torch.dtype) -> LatentCut:
    return latent_attention.cut_of(one.heads, cache.itemsize, 4)


@types
@pytest.mark.parametrize("splits", [1, 4, 0])
def test_rows_of_one_query(
    device: torch.device, seed: int, dtype: torch.dtype, cache: torch.dtype, splits: int
) -> None:
    """In one piece, in even ones (some without keys), in listed ones, with their projection."""
    skip_narrow(device, dtype)
    one = sizes_of(device, seed)
    source = random.Random(seed)
    lens = [source.randint(1, 90) for _ in range(5 if device.type != "cuda" else 30)]
    lens[1] = 1
    pages, table, length = random_rows(device, one, cache, lens)
    rows = len(lens)
    q = torch.randn(rows, one.heads, one.rank + one.turned, device=device).to(dtype)
    tile = cut_for(one, cache).one
    most = max(rows * max(1, splits), 8 + rows)
    firsts = torch.arange(rows, dtype=torch.int32, device=device) * splits
    counts = torch.full_like(firsts, splits)
    pieces = Pieces(
        splits,
        torch.zeros(3, 8 + rows, dtype=torch.int32, device=device),
        firsts,
        counts,
        poison(torch.empty(most * one.heads * one.rank, device=device)),
        poison(torch.empty(most * one.heads, device=device)),
        counts,
    )
    if splits == 0:
        list_pieces(length, pieces, aim=8, block=tile.keys)
    out = poison(torch.empty(rows, one.heads, one.rank, device=device, dtype=dtype))
    latent_attention.attend_one(q, pages, table, length, pieces, tile, 0.2, out)
    exact = torch.stack(
        [attended(q[row], pages, table[row], lens[row], one.rank) for row in range(rows)]
    )
    factor = (torch.randn(one.heads, one.rank, one.value, device=device) / one.rank**0.5).to(dtype)
    values = poison(torch.empty(rows, one.heads * one.value, device=device, dtype=dtype))
    projected = torch.einsum("tql,qlv->tqv", exact, factor.float()).flatten(1)
    if splits > 1:
        latent.project_splits(pieces, factor, values)
        assert distance(values, projected) < bound_of(device, dtype)
        few = poison(torch.empty_like(values[:3]))
        latent.project_splits(pieces, factor, few)
        assert distance(few, projected[:3]) < bound_of(device, dtype)
    if splits != 1:
        merge(pieces, None, out)
    assert distance(out, exact) < bound_of(device, dtype)


@types
def test_rows_of_many_queries(
    device: torch.device, seed: int, dtype: torch.dtype, cache: torch.dtype
) -> None:
    """Prompts, chunks after a history, and single queries among them."""
    skip_narrow(device, dtype)
    one = sizes_of(device, seed)
    source = random.Random(seed)
    queries = [source.randint(1, 40 if device.type == "cuda" else 9) for _ in range(4)]
    queries[2] = 1
    lens = [count + source.choice([0, 1, 30]) for count in queries]
    pages, table, length = random_rows(device, one, cache, lens)
    indptr = torch.tensor([0, *queries], device=device).cumsum(0).int()
    total = sum(queries)
    q = torch.randn(total, one.heads, one.rank + one.turned, device=device).to(dtype)
    tile = cut_for(one, cache).many
    tokens = latent_attention.tokens_of_tile(one.heads, tile.rows)
    tiles = torch.empty(
        2, tile_count(total, len(lens), tokens, 1), dtype=torch.int32, device=device
    )
    rows = Queries(indptr, length, table, tiles)
    list_tiles(rows, tile_rows=tokens, group=1)
    out = poison(torch.empty(total, one.heads, one.rank, device=device, dtype=dtype))
    latent_attention.attend_many(q, pages, rows, tile, 0.2, out)
    exact = []
    for row, count in enumerate(queries):
        for index in range(count):
            at = sum(queries[:row]) + index
            seen = lens[row] - count + index + 1
            exact.append(attended(q[at], pages, table[row], seen, one.rank))
    assert distance(out, torch.stack(exact)) < bound_of(device, dtype)


@pytest.mark.parametrize(("dtype", "cache"), [pair for pair in TYPES if pair[0] != torch.float32])
def test_expanded_rows(
    device: torch.device, seed: int, dtype: torch.dtype, cache: torch.dtype
) -> None:
    """Long rows by keys and values of their own: prompts, and chunks after a history."""
    skip_narrow(device, dtype)
    one = sizes_of(device, seed)
    source = random.Random(seed)
    queries = [source.randint(1, 300 if device.type == "cuda" else 20) for _ in range(4)]
    lens = [count + source.choice([0, 0, 1, 70]) for count in queries]
    pages, table, length = random_rows(device, one, cache, lens)
    total, keys = sum(queries), sum(lens)
    indptr = torch.tensor([0, *queries], device=device).cumsum(0).int()
    plain, rank, turned = one.plain, one.rank, one.turned
    heads = torch.randn(total, one.heads * (plain + turned) + 8, device=device).to(dtype)
    factor = (torch.randn(one.heads, plain, rank, device=device) / rank**0.5).to(dtype)
    values = (torch.randn(one.heads, rank, one.value, device=device) / rank**0.5).to(dtype)
    cos_sin = torch.randn(max(lens), turned, device=device)
    tiles = torch.empty(
        2, tile_count(total, 4, latent_expanded.ROWS, 1), dtype=torch.int32, device=device
    )
    rows = Queries(indptr, length, table, tiles)
    list_tiles(rows, tile_rows=latent_expanded.ROWS, group=1)
    poison_allocator(device)
    latents, rests, starts = latent_expanded.gather(pages, rows, keys, max(lens), rank, dtype)
    cells = [
        pages[table[row].long()].flatten(0, 1)[:count].float() for row, count in enumerate(lens)
    ]
    gathered = torch.cat((latents, rests), dim=1)
    # Triton's interpreter is wrong about the least numbers of FP8.
    assert distance(gathered, torch.cat(cells)) < (1e-9 if device.type == "cuda" else 1e-3)
    assert starts.tolist() == [sum(lens[:row]) for row in range(4)]
    k = torch.matmul(latents, factor.transpose(1, 2))
    v = torch.matmul(latents, values)
    out = poison(torch.empty(total, one.heads * one.value, device=device, dtype=dtype))
    latent_expanded.attend(heads, k, v, rests, starts, cos_sin, rows, 0.2, out)
    exact = []
    for row, count in enumerate(queries):
        own = slice(sum(queries[:row]), sum(queries[: row + 1]))
        q = heads[own, :-8].float().view(count, one.heads, -1)
        at = torch.arange(lens[row] - count, lens[row], device=device)
        turning, _ = reference.rope(q[..., plain:], q[..., plain:], at, cos_sin)
        absorbed = torch.einsum("tqc,qcl->tql", q[..., :plain], factor.float())
        whole = torch.cat((absorbed, turning), dim=2)
        for index in range(count):
            seen = lens[row] - count + index + 1
            exact.append(attended(whole[index], pages, table[row], seen, rank))
    projected = torch.einsum("tql,qlv->tqv", torch.stack(exact), values.float()).flatten(1)
    assert distance(out, projected) < bound_of(device, dtype)
