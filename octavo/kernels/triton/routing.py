"""Which experts a token goes to, and the order that brings each expert's tokens together.

`route` makes scores of a router's logits and picks experts, in one launch. `sort` puts the pairs of
a token and an expert into the order of experts, lists the tiles that products are cut into, and
copies the tokens' rows into that order: one launch too, and nothing is asked of the device.
Not for: products (`experts.py`). Next file: `experts.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.ops import RouteRules
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2
from octavo.kernels.triton.pairs import Sorted, tile_room

LOW = tl.constexpr(-1e30)  # below any score; a score that is taken gets it
COPIED = 512  # columns of a row that a program of the sort copies
CHUNK = 512  # pairs of a program, of very many


@triton.jit
def _take_best(values, index):
    """(value, place) of each row's greatest, the first of equals: f32[B], i32[B]."""
    best = tl.max(values, 1)
    at = tl.min(tl.where(values == best[:, None], index[None, :], 1 << 30), 1)
    return best, at


@triton.jit
def _within_groups(
    choice, expert, GROUPS: tl.constexpr, GP: tl.constexpr, SIZE: tl.constexpr,
    CHOSEN: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """Scores f32[B, EP], those outside of the CHOSEN best groups lowered."""
    group = tl.arange(0, GP)
    worth = tl.full([choice.shape[0], GP], LOW, tl.float32)
    for g in tl.static_range(GROUPS):
        inside = (expert >= g * SIZE) & (expert < (g + 1) * SIZE)
        here = tl.where(inside[None, :], choice, LOW)
        value, at = _take_best(here, expert)
        if TWO:
            value += tl.max(tl.where(expert[None, :] == at[:, None], LOW, here), 1)
        worth = tl.where((group == g)[None, :], value[:, None], worth)
    kept = choice < 2 * LOW  # of none
    for _ in tl.static_range(CHOSEN):
        value, at = _take_best(worth, group)
        kept = kept | (expert[None, :] // SIZE == at[:, None])
        worth = tl.where(group[None, :] == at[:, None], 2 * LOW, worth)
    return tl.where(kept, choice, LOW)


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr,  # f32[T, E]
    correction_ptr,  # f32[E], read if CORRECTED
    experts_ptr,  # i32[T, TOP]
    weights_ptr,  # f32[T, TOP]
    tokens,
    scale,
    E: tl.constexpr,
    EP: tl.constexpr,
    TOP: tl.constexpr,
    GROUPS: tl.constexpr,
    GP: tl.constexpr,
    CHOSEN: tl.constexpr,  # groups; GROUPS is all
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    TOPP: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BT tokens."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    real = (expert < E)[None, :]
    inside = (token < tokens)[:, None] & real
    at = token.to(tl.int64)[:, None] * E + expert[None, :]
    logits = tl.load(logits_ptr + at, mask=inside, other=0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        top = tl.max(tl.where(real, logits, LOW), 1)
        powers = tl.where(real, tl.exp(logits - top[:, None]), 0.0)
        scores = powers / tl.sum(powers, 1)[:, None]
    choice = scores
    if CORRECTED:
        choice += tl.load(correction_ptr + expert, mask=expert < E, other=0.0)[None, :]
    choice = tl.where(real, choice, 2 * LOW)
    if CHOSEN < GROUPS:
        choice = _within_groups(choice, expert, GROUPS, GP, E // GROUPS, CHOSEN, CORRECTED)
        choice = tl.where(real, choice, 2 * LOW)
    place = tl.arange(0, TOPP)
    chosen = tl.zeros([BT, TOPP], tl.int32)
    weights = tl.zeros([BT, TOPP], tl.float32)
    for i in tl.static_range(TOP):
        _, best = _take_best(choice, expert)
        best = tl.minimum(best, E - 1)  # rows of NaN have no greatest
        taken = expert[None, :] == best[:, None]
        weight = tl.sum(tl.where(taken, scores, 0.0), 1)
        choice = tl.where(taken, 2 * LOW, choice)
        chosen = tl.where((place == i)[None, :], best[:, None], chosen)
        weights = tl.where((place == i)[None, :], weight[:, None], weights)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    where = token.to(tl.int64)[:, None] * TOP + place[None, :]
    kept = (token < tokens)[:, None] & (place < TOP)[None, :]
    tl.store(experts_ptr + where, chosen, mask=kept)
    tl.store(weights_ptr + where, weights * scale, mask=kept)


def route(logits: Tensor, rules: RouteRules, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """f32[T, E], "correction" f32[E] -> (experts i32[T, k], weights f32[T, k]); see RouteRules."""
    tokens, count = logits.shape
    chosen = torch.empty(tokens, rules.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, rules.top_k, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return chosen, weights
    block = 1 if tokens <= 512 else 4
    route_kernel[(divide_up(tokens, block),)](
        logits,
        logits if correction is None else correction,
        chosen,
        weights,
        tokens,
        rules.scale,
        E=count,
        EP=power_of_2(count),
        TOP=rules.top_k,
        GROUPS=rules.groups,
        GP=power_of_2(rules.groups),
        CHOSEN=rules.top_groups,
        SIGMOID=rules.scoring == "sigmoid",
        CORRECTED=correction is not None,
        RENORMALISE=rules.renormalise,
        TOPP=power_of_2(rules.top_k),
        BT=block,
        num_warps=1,
        **pdl(logits.device),
    )
    return chosen, weights


@triton.jit
def _chosen(experts_ptr, pair, pairs, E: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr):
    """The expert of each pair; -1 beyond the last."""
    if SHARED == 0:
        return tl.load(experts_ptr + pair, mask=pair < pairs, other=-1)
    nth = pair % (TOP + SHARED)
    at = pair // (TOP + SHARED) * TOP + nth
    routed = tl.load(experts_ptr + at, mask=(pair < pairs) & (nth < TOP), other=0)
    return tl.where(pair < pairs, tl.where(nth < TOP, routed, E + nth - TOP), -1)


@triton.jit(do_not_specialize=["pairs", "room"])
def sort_kernel(
    experts_ptr,  # i32[T, TOP]
    weights_ptr,  # f32[T, TOP]
    x_ptr,  # [T, H], read if COPY
    order_ptr,
    place_ptr,
    sorted_weights_ptr,
    ends_ptr,
    tiles_ptr,
    rows_ptr,  # [T * TOP, H], written if COPY
    pairs,  # A
    room,  # W
    x_stride,
    E: tl.constexpr,
    EP: tl.constexpr,  # E + SHARED or more, a power of 2
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    BM: tl.constexpr,
    H: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    COPY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program an expert and, if rows are copied, COLUMNS of their columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    PAIRS: tl.constexpr = TOP + SHARED
    mine = tl.program_id(0)
    expert = tl.arange(0, EP)
    counts = tl.zeros([EP], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = _chosen(experts_ptr, pair, pairs, E, TOP, SHARED)
        counts += tl.histogram(tl.maximum(chosen, 0), EP, mask=chosen >= 0)
    first = tl.sum(tl.where(expert < mine, counts, 0), 0)
    count = tl.sum(tl.where(expert == mine, counts, 0), 0)
    if tl.program_id(1) == 0:
        tiles = (counts + BM - 1) // BM
        before = tl.sum(tl.where(expert < mine, tiles, 0), 0)
        own = (count + BM - 1) // BM
        tl.store(ends_ptr + mine, first + count)
        for i in range(own):
            tl.store(tiles_ptr + before + i, mine)
            tl.store(tiles_ptr + room + before + i, first + i * BM)
            tl.store(tiles_ptr + 2 * room + before + i, first + count)
        if mine == E + SHARED - 1:
            tl.store(tiles_ptr + 3 * room, before + own)
    found = 0
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        match = _chosen(experts_ptr, pair, pairs, E, TOP, SHARED) == mine
        here = tl.sum(match.to(tl.int32), 0)
        if here > 0:
            where = first + found + tl.cumsum(match.to(tl.int32), 0) - 1
            # Each program writes what it reads below, the same as its neighbours.
            tl.store(order_ptr + where, pair, mask=match)
            tl.store(place_ptr + pair, where, mask=match)
            routed = match & (pair % PAIRS < TOP)
            at = pair // PAIRS * TOP + pair % PAIRS
            weight = tl.load(weights_ptr + at, mask=routed, other=1.0)
            tl.store(sorted_weights_ptr + where, weight, mask=match)
            found += here
    if COPY:  # noqa: SIM102 - the one is known when compiled, the other is not
        if mine < E:
            tl.debug_barrier()
            column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            r = tl.arange(0, ROWS)
            for start in range(first, first + count, ROWS):
                inside = start + r < first + count
                pair = tl.load(order_ptr + start + r, mask=inside, other=0)
                kept = inside[:, None] & (column < H)[None, :]
                source = x_ptr + (pair // PAIRS).to(tl.int64)[:, None] * x_stride + column[None, :]
                target = rows_ptr + (start + r).to(tl.int64)[:, None] * H + column[None, :]
                tl.store(target, tl.load(source, mask=kept, other=0.0), mask=kept)


def sort(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    *,
    count: int,
    tile_rows: int,
    copy: bool,
    shared: int = 0,
) -> Sorted:
    """x [T, H], experts i32[T, top] of `count`, weights f32[T, top] -> the pairs sorted.

    Within an expert pairs stand in the order of tokens. `copy`: `rows` are wanted.
    """
    tokens, top = experts.shape
    size = x.shape[1]
    pairs = tokens * (top + shared)
    device = x.device
    room = tile_room(pairs, count + shared, tile_rows)

    def ints(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int32, device=device)

    found = Sorted(
        ints(pairs),
        ints(pairs),
        torch.empty(pairs, dtype=torch.float32, device=device),
        ints(count + shared),
        ints(3 * room + 1),
        x.new_empty(tokens * top, size) if copy else None,
        tokens,
        count,
        top,
        shared,
    )
    many = tokens > 64
    sort_kernel[(count + shared, divide_up(size, COPIED) if copy else 1)](
        experts,
        weights,
        x,
        found.order,
        found.place,
        found.weights,
        found.ends,
        found.tiles,
        x if found.rows is None else found.rows,
        pairs,
        room,
        x.stride(0),
        E=count,
        EP=power_of_2(count + shared),
        TOP=top,
        SHARED=shared,
        BM=tile_rows,
        H=size,
        CHUNK=min(2048, max(128, power_of_2(pairs))),
        ROWS=32 if many else 8,
        COLUMNS=COPIED,
        COPY=copy,
        num_warps=8 if many else 4,
        **pdl(device),
    )
    return found


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(
    experts_ptr,  # i32[A]
    counts_ptr,  # i32[chunks, EP]
    pairs,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a chunk of pairs: how many of them each expert has."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    chosen = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    counts = tl.histogram(chosen, EP, mask=pair < pairs)
    tl.store(counts_ptr + tl.program_id(0) * EP + tl.arange(0, EP), counts)


@triton.jit(do_not_specialize=["pairs", "chunks"])
def place_kernel(
    experts_ptr,  # i32[A]
    weights_ptr,  # f32[A]
    counts_ptr,  # i32[chunks, EP]
    order_ptr,
    place_ptr,
    sorted_weights_ptr,
    ends_ptr,  # i32[E]
    pairs,
    chunks,
    E: tl.constexpr,
    EP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,  # pairs that are ranked at once
    MANY: tl.constexpr,  # chunks that are added up at once
    PDL: tl.constexpr,
):
    """One program a chunk of pairs: puts them after those of earlier experts and chunks."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mine = tl.program_id(0)
    expert = tl.arange(0, EP)
    total = tl.zeros([EP], tl.int32)
    before = tl.zeros([EP], tl.int32)
    for start in range(0, chunks, MANY):
        chunk = start + tl.arange(0, MANY)
        at = counts_ptr + chunk[:, None] * EP + expert[None, :]
        counts = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((chunk < mine)[:, None], counts, 0), 0)
    ends = tl.cumsum(total, 0)
    if mine == 0:
        tl.store(ends_ptr + expert, ends, mask=expert < E)
    following = ends - total + before
    for start in range(mine * CHUNK, (mine + 1) * CHUNK, BLOCK):
        pair = start + tl.arange(0, BLOCK)
        there = pair < pairs
        chosen = tl.load(experts_ptr + pair, mask=there, other=-1)
        match = (chosen[:, None] == expert[None, :]).to(tl.int32)
        rank = tl.cumsum(match, 0) - 1 + following[None, :]
        where = tl.sum(match * rank, 1)
        tl.store(order_ptr + where, pair, mask=there)
        tl.store(place_ptr + pair, where, mask=there)
        weight = tl.load(weights_ptr + pair, mask=there, other=0.0)
        tl.store(sorted_weights_ptr + where, weight, mask=there)
        following += tl.sum(match, 0)


def sort_many(experts: Tensor, weights: Tensor, *, count: int) -> Sorted:
    """As `sort`, of so many pairs that all programs should not read all; lists no tiles."""
    tokens, top = experts.shape
    pairs = tokens * top
    device = experts.device
    chunks = divide_up(pairs, CHUNK)
    size = power_of_2(count)
    counts = torch.empty(chunks, size, dtype=torch.int32, device=device)
    count_kernel[(chunks,)](
        experts, counts, pairs, EP=size, CHUNK=CHUNK, num_warps=4, **pdl(device)
    )
    found = Sorted(
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(pairs, dtype=torch.int32, device=device),
        torch.empty(pairs, dtype=torch.float32, device=device),
        # Zeros, so that the library's products find no rows if no kernel has run: `cuda_ahead.py`.
        torch.zeros(count, dtype=torch.int32, device=device),
        counts[:0, 0],
        None,
        tokens,
        count,
        top,
    )
    place_kernel[(chunks,)](
        experts,
        weights,
        counts,
        found.order,
        found.place,
        found.weights,
        found.ends,
        pairs,
        chunks,
        E=count,
        EP=size,
        CHUNK=CHUNK,
        BLOCK=64 if size > 64 else 128,
        MANY=32,
        num_warps=8,
        **pdl(device),
    )
    return found


@triton.jit(do_not_specialize=["pairs"])
def gather_kernel(
    x_ptr,  # [T, H]
    order_ptr,  # i32[A]
    out_ptr,  # [A, H]
    pairs,  # A
    x_stride,
    PAIRS: tl.constexpr,  # of a token
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program ROWS places and COLUMNS columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    pair = tl.load(order_ptr + place, mask=place < pairs, other=0)
    inside = (place < pairs)[:, None] & (column < H)[None, :]
    source = x_ptr + (pair // PAIRS).to(tl.int64)[:, None] * x_stride + column[None, :]
    target = out_ptr + place.to(tl.int64)[:, None] * H + column[None, :]
    tl.store(target, tl.load(source, mask=inside, other=0.0), mask=inside)


def gather(x: Tensor, found: Sorted) -> Tensor:
    """x [T, H] -> the tokens' rows by place [A, H]."""
    pairs, size = found.order.shape[0], x.shape[1]
    out = x.new_empty(pairs, size)
    gather_kernel[(divide_up(pairs, 8), divide_up(size, COPIED))](
        x,
        found.order,
        out,
        pairs,
        x.stride(0),
        PAIRS=found.pairs_a_token,
        H=size,
        ROWS=8,
        COLUMNS=COPIED,
        num_warps=4,
        **pdl(x.device),
    )
    return out
