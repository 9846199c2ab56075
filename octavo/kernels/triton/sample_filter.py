"""Which z the filters of sampling leave: the least kept `order_of` z of each row.

A first look at all tokens is already done (`chunk_kernel`). Here:

    floor    one program a row: an order that is surely not above the cut, by the rules below
    gather   tokens of at least that order, few as a rule, go into a list of up to ROOM
    cut      one program a row: halves the range of orders over the list, held in registers

Floors: with top_k, the k-th of the greatest of groups of GROUP tokens, as each of the k groups has
a token that is no less; with top_p alone, an order below which all tokens together are in the
part that is dropped, by the groups' greatest; with min_p, the weight itself. A row whose list
overflows is searched over all its tokens instead. Not for: the draw (`sample.py`).
Next file: `attention_math.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.ops import SampleRows
from octavo.kernels.triton.launch import pdl, power_of_2

CHUNK = 4096  # tokens of a program that looks at all
GROUP = 64
ROOM = 8192  # candidates of a row
LEAST = tl.constexpr(-2139095041)  # the order of -infinity
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_z(logits_ptr, at, inside, temperature):
    """Logits over temperature, rounded as one division; 0 leaves them. Outside: -infinity."""
    return z_at(tl.load(logits_ptr + at, mask=inside, other=-INFINITY), temperature)


@triton.jit
def z_at(logit, temperature):
    """A logit over the temperature; see `load_z`."""
    z = logit.to(tl.float32)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.div_rn(z, tl.zeros_like(z) + divisor)


@triton.jit
def weight_of(z, top):
    """exp(z - top) in f64."""
    return tl.exp(z.to(tl.float64) - top.to(tl.float64))


@triton.jit
def order_of(z):
    """An i32 that is ordered as the f32 is; both zeros give the same."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def middle_of(low, high):
    """(low + high) / 2, rounded down, of any two i32."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def z_of(order):
    """The f32 of an order; NaN for orders that no number has."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _is_filtered(temperature, top_k, top_p, min_p, V):
    by_count = (top_k > 0) & (top_k < V)
    return (temperature != 0.0) & (by_count | (top_p < 1.0) | (min_p > 0.0))


@triton.jit
def _least_of_weight(top, least):
    """The least order that weighs `least` (f64, above 0) or more, in relation to `top`."""
    below = tl.full([], -2147483648, tl.int32)
    high = order_of(top)
    while below < high - 1:
        middle = middle_of(below, high)
        z = z_of(middle)
        if (z == z) & (weight_of(z, top) >= least):
            high = middle
        else:
            below = middle
    return high


@triton.jit
def _whole_weight(best_ptr, sum_ptr, row, chunks, top, CP: tl.constexpr):
    """The weight of all of a row's tokens, f64, in relation to `top`."""
    c = tl.arange(0, CP)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=-INFINITY)
    sums = tl.load(sum_ptr + row * chunks + c, mask=c < chunks, other=0.0)
    return tl.sum(tl.where(best > -INFINITY, sums * weight_of(best, top), 0.0), 0)


@triton.jit
def _floor_by_weight(group_ptr, groups, top, allowed, GROUP: tl.constexpr, GP: tl.constexpr):
    """The greatest order below which lies, for sure, no more than `allowed` of the weight.

    A group whose greatest is below it has at most GROUP times that one's weight there, another at
    most GROUP - 1 times the weight of the order itself.
    """
    g = tl.arange(0, GP)
    greatest = tl.load(group_ptr + g, mask=g < groups, other=-INFINITY)
    order = tl.where(g < groups, order_of(greatest), -2147483648)
    weights = tl.where(greatest > -INFINITY, weight_of(greatest, top), 0.0)
    low = tl.full([], LEAST, tl.int32)
    above = order_of(top) + 1
    while low < above - 1:
        middle = middle_of(low, above)
        weight = weight_of(z_of(middle), top)
        below = tl.sum(tl.where(order < middle, weights, 0.0), 0) * GROUP
        reaching = tl.sum(((order >= middle) & (g < groups)).to(tl.float64), 0)
        if below + reaching * (GROUP - 1) * weight <= allowed:
            low = middle
        else:
            above = middle
    return low


@triton.jit
def floor_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,  # f32 [S, C]
    sum_ptr,  # f64 [S, C]
    group_ptr,  # f32 [S, groups]
    floor_ptr,  # i32[S]
    count_ptr,  # i32[S], set to 0
    V,
    chunks,
    groups,
    GROUP: tl.constexpr,
    CP: tl.constexpr,
    GP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    floor = tl.full([], -2147483648, tl.int32)
    c = tl.arange(0, CP)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=-INFINITY)
    top = tl.max(best, 0)
    usable = (top > -INFINITY) & (top < INFINITY)
    if usable & _is_filtered(temperature, top_k, top_p, min_p, V):
        if min_p > 0.0:
            floor = _least_of_weight(top, min_p.to(tl.float64))
        if (top_p < 1.0) & (min_p == 0.0) & ((top_k <= 0) | (top_k >= V)):
            total = _whole_weight(best_ptr, sum_ptr, row, chunks, top, CP)
            floor = _floor_by_weight(
                group_ptr + row.to(tl.int64) * groups,
                groups,
                top,
                0.999 * (1.0 - top_p.to(tl.float64)) * total,  # less than 1 for rounding's sake
                GROUP,
                GP,
            )
        if (top_k > 0) & (top_k < V) & (top_k <= groups):
            g = tl.arange(0, GP)
            at = group_ptr + row.to(tl.int64) * groups + g
            order = order_of(tl.load(at, mask=g < groups, other=-INFINITY))
            low = tl.full([], -2147483648, tl.int32)
            above = order_of(top) + 1
            while low < above - 1:
                middle = middle_of(low, above)
                if tl.sum(((order >= middle) & (g < groups)).to(tl.int32), 0) >= top_k:
                    low = middle
                else:
                    above = middle
            # With min_p too, fewer than k may be left, and then min_p alone decides.
            floor = tl.maximum(floor, low)
    tl.store(floor_ptr + row, floor)
    tl.store(count_ptr + row, 0)


@triton.jit
def gather_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    count_ptr,  # i32[S], counts all candidates, also those beyond ROOM
    list_ptr,  # f32 [S, ROOM], their z in any order
    V,
    BLOCK: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a chunk and row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if _is_filtered(temperature, top_k, top_p, min_p, V):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        z = load_z(logits_ptr + row.to(tl.int64) * V, at, at < V, temperature)
        taken = ((order_of(z) >= tl.load(floor_ptr + row)) & (at < V)).to(tl.int32)
        count = tl.sum(taken, 0)
        if count > 0:
            place = tl.atomic_add(count_ptr + row, count) + tl.cumsum(taken, 0) - 1
            inside = (taken > 0) & (place < ROOM)
            tl.store(list_ptr + row.to(tl.int64) * ROOM + place, z, mask=inside)


@triton.jit
def cut_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    best_ptr,
    sum_ptr,
    count_ptr,
    list_ptr,
    cut_ptr,  # i32[S]
    V,
    chunks,
    CP: tl.constexpr,
    ROOM: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    cut = tl.full([], -2147483648, tl.int32)
    if _is_filtered(temperature, top_k, top_p, min_p, V):
        c = tl.arange(0, CP)
        top = tl.max(tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=-INFINITY), 0)
        count = tl.load(count_ptr + row)
        if count <= ROOM:
            source = list_ptr + row.to(tl.int64) * ROOM
            blocks_end = count
            divisor = 1.0
        else:
            source = logits_ptr + row.to(tl.int64) * V
            blocks_end = V
            divisor = temperature
        if min_p > 0.0:
            cut = _least_of_weight(top, min_p.to(tl.float64))
        if (top_k > 0) & (top_k < V):
            cut = _cut_by_count(source, blocks_end, divisor, top, cut, top_k, ROOM)
        if top_p < 1.0:
            total = _whole_weight(best_ptr, sum_ptr, row, chunks, top, CP)
            alone = (min_p == 0.0) & ((top_k <= 0) | (top_k >= V))
            cut = _cut_by_weight(source, blocks_end, divisor, top, cut, top_p, alone, total, ROOM)
    tl.store(cut_ptr + row, cut)


@triton.jit
def _cut_by_count(source, end, divisor, top, cut, top_k, BLOCK: tl.constexpr):
    """The greatest order that top_k or more tokens reach, `cut` at least."""
    i = tl.arange(0, BLOCK)
    first = order_of(load_z(source, i, i < end, divisor))
    low = cut
    above = order_of(top) + 1
    while low < above - 1:
        middle = middle_of(low, above)
        reach = tl.sum(((first >= middle) & (i < end)).to(tl.int32), 0)
        for start in range(BLOCK, end, BLOCK):
            at = start + i
            order = order_of(load_z(source, at, at < end, divisor))
            reach += tl.sum(((order >= middle) & (at < end)).to(tl.int32), 0)
        if reach >= top_k:
            low = middle
        else:
            above = middle
    return low


@triton.jit
def _cut_by_weight(source, end, divisor, top, cut, top_p, alone, whole, BLOCK: tl.constexpr):
    """The least order with less than top_p of the kept weight above it, `cut` at least.

    With `alone` the kept weight is the `whole`, of which the source may not have the least part;
    else all that weighs stands in the source.
    """
    i = tl.arange(0, BLOCK)
    z = load_z(source, i, i < end, divisor)
    first = order_of(z)
    weights = tl.where((first >= cut) & (i < end), weight_of(z, top), 0.0)
    total = whole
    if not alone:
        total = tl.sum(weights, 0)
        for start in range(BLOCK, end, BLOCK):
            at = start + i
            z = load_z(source, at, at < end, divisor)
            total += tl.sum(tl.where(order_of(z) >= cut, weight_of(z, top), 0.0), 0)
    allowed = total * top_p.to(tl.float64)
    lowest = tl.full([], -2147483648, tl.int32)
    lower = tl.where(cut == lowest, lowest, cut - 1)
    upper = order_of(top)
    while lower < upper - 1:
        middle = middle_of(lower, upper)
        above = tl.sum(tl.where(first > middle, weights, 0.0), 0)
        for start in range(BLOCK, end, BLOCK):
            at = start + i
            z = load_z(source, at, at < end, divisor)
            above += tl.sum(tl.where(order_of(z) > middle, weight_of(z, top), 0.0), 0)
        if above < allowed:
            upper = middle
        else:
            lower = middle
    return upper


def find_cuts(
    logits: Tensor, rows: SampleRows, best: Tensor, sums: Tensor, groups: Tensor
) -> Tensor:
    """Logits f32[S, V] and what `chunk_kernel` found of them -> i32[S], the least kept order."""
    count, vocab = logits.shape
    chunks = best.shape[1]
    floors, counts, cuts = torch.empty(3, count, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(count, ROOM, dtype=torch.float32, device=logits.device)
    settings = (rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    early = pdl(logits.device)
    floor_kernel[(count,)](
        *settings,
        best,
        sums,
        groups,
        floors,
        counts,
        vocab,
        chunks,
        groups.shape[1],
        GROUP=GROUP,
        CP=power_of_2(chunks),
        GP=power_of_2(groups.shape[1]),
        num_warps=4,
        **early,
    )
    gather_kernel[(chunks, count)](
        logits,
        *settings,
        floors,
        counts,
        candidates,
        vocab,
        BLOCK=CHUNK,
        ROOM=ROOM,
        num_warps=8,
        **early,
    )
    cut_kernel[(count,)](
        logits,
        *settings,
        best,
        sums,
        counts,
        candidates,
        cuts,
        vocab,
        chunks,
        CP=power_of_2(chunks),
        ROOM=ROOM,
        num_warps=16,
        **early,
    )
    return cuts
