"""Sampling on the device, without a wait of the host: the rule of `octavo/kernels/sample.py`.

Logits are cut into chunks of CHUNK tokens, one program each:

    filter   one program a row with filters: the least z that top_k and top_p leave (`_Cut`)
    chunks   each chunk's greatest z, where it is first, and the sum of its kept weights, f64
    draw     one program a row: which chunk the draw falls into, then which token of it

Rows without filters skip the first, and the host may know that there are none with
(`SampleRows.filtered`). Weights and sums are f64, as in the rule; sums are taken in another order.
Next file: `attention_math.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.ops import SampleRows
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2

CHUNK = 4096
FILTER_BLOCK = 8192
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _mix(x):
    """SplitMix64's finalizer (Steele, Lea, Flood, OOPSLA 2014); x is u64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """In [0, 1), a multiple of 2^-53."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    bits = _mix(_mix(seed.to(tl.uint64) + golden) + golden * (position.to(tl.uint64) + 1))
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _load_z(logits_ptr, at, inside, temperature):
    """Logits over temperature, rounded as one division; 0 leaves them. Outside: -infinity."""
    z = tl.load(logits_ptr + at, mask=inside, other=-INFINITY).to(tl.float32)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.div_rn(z, tl.zeros_like(z) + divisor)


@triton.jit
def _weight(z, top):
    """exp(z - top) in f64."""
    return tl.exp(z.to(tl.float64) - top.to(tl.float64))


@triton.jit
def _order(z):
    """An i32 that is ordered as the f32 is; both zeros give the same."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _middle(low, high):
    """(low + high) / 2, rounded down, of any two i32."""
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def filter_kernel(
    logits_ptr,  # f32 [S, V]
    temperature_ptr,  # f32[S]
    top_k_ptr,  # i32[S]
    top_p_ptr,  # f32[S]
    min_p_ptr,  # f32[S]
    cut_ptr,  # i32[S], the least `_order` that is kept
    V,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row. Finds both limits by halving the range of orders that holds them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row).to(tl.float64)
    lowest = tl.full([], -2147483648, tl.int32)
    cut = lowest
    by_count = (top_k > 0) & (top_k < V)
    if (temperature != 0.0) & (by_count | (top_p < 1.0) | (min_p > 0.0)):
        logits_ptr += row.to(tl.int64) * V
        token = tl.arange(0, BLOCK)
        best = tl.full([BLOCK], -INFINITY, tl.float32)
        for start in range(0, V, BLOCK):
            at = start + token
            best = tl.maximum(best, _load_z(logits_ptr, at, at < V, temperature))
        top = tl.max(best, 0)
        high = _order(top)  # is kept in any case
        if min_p > 0.0:
            # The least order that weighs min_p or more: kept at `high`, not below `low`.
            below = lowest
            while below < high - 1:
                middle = _middle(below, high)
                bits = tl.where(middle < 0, middle ^ 0x7FFFFFFF, middle)
                z = bits.to(tl.float32, bitcast=True)
                if (z == z) & (_weight(z, top) >= min_p):
                    high = middle
                else:
                    below = middle
            cut = high
        if by_count:
            # The greatest order that k or more tokens reach, of those kept so far.
            low = cut
            above = _order(top) + 1
            while low < above - 1:
                middle = _middle(low, above)
                counts = tl.zeros([BLOCK], tl.int32)
                for start in range(0, V, BLOCK):
                    at = start + token
                    z = _load_z(logits_ptr, at, at < V, temperature)
                    counts += ((_order(z) >= middle) & (at < V)).to(tl.int32)
                if tl.sum(counts, 0) >= top_k:
                    low = middle
                else:
                    above = middle
            cut = low
        if top_p < 1.0:
            sums = tl.zeros([BLOCK], tl.float64)
            for start in range(0, V, BLOCK):
                at = start + token
                z = _load_z(logits_ptr, at, at < V, temperature)
                sums += tl.where(_order(z) >= cut, _weight(z, top), 0.0)
            allowed = tl.sum(sums, 0) * top_p.to(tl.float64)
            # The least order with less than `allowed` above it, of those kept so far. What lies
            # above `upper` is known, so only weights between are summed.
            lower = cut - 1
            upper = _order(top)
            known = tl.full([], 0.0, tl.float64)
            if cut == lowest:
                lower = lowest
            while lower < upper - 1:
                middle = _middle(lower, upper)
                sums = tl.zeros([BLOCK], tl.float64)
                for start in range(0, V, BLOCK):
                    at = start + token
                    z = _load_z(logits_ptr, at, at < V, temperature)
                    order = _order(z)
                    between = (order > middle) & (order <= upper)
                    if tl.max(between.to(tl.int32), 0) > 0:
                        sums += tl.where(between, _weight(z, top), 0.0)
                above_middle = known + tl.sum(sums, 0)
                if above_middle < allowed:
                    known = above_middle
                    upper = middle
                else:
                    lower = middle
            cut = upper
    tl.store(cut_ptr + row, cut)


@triton.jit
def chunk_kernel(
    logits_ptr,  # f32 [S, V]
    temperature_ptr,  # f32[S]
    cut_ptr,  # i32[S], read if CUT
    best_ptr,  # f32 [S, C]
    where_ptr,  # i32 [S, C]
    sum_ptr,  # f64 [S, C], of exp(z - best)
    V,
    chunks,  # C
    BLOCK: tl.constexpr,
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a chunk and row. A NaN makes the chunk's greatest NaN."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    z = _load_z(logits_ptr + row.to(tl.int64) * V, at, inside, temperature)
    broken = tl.max((z != z).to(tl.int32), 0) > 0
    best = tl.max(z, 0)
    first = tl.min(tl.where((z == best) & inside, at, V), 0)
    weight = _weight(z, best)
    kept = z > -INFINITY
    if CUT:
        kept = kept & (_order(z) >= tl.load(cut_ptr + row))
    total = tl.sum(tl.where(kept, weight, 0.0), 0)
    slot = row * chunks + chunk
    tl.store(best_ptr + slot, tl.where(broken, float("nan"), best))
    tl.store(where_ptr + slot, first)
    tl.store(sum_ptr + slot, total)


@triton.jit
def draw_kernel(
    logits_ptr,  # f32 [S, V]
    temperature_ptr,  # f32[S]
    seed_ptr,  # i64[S]
    position_ptr,  # i64[S]
    cut_ptr,
    best_ptr,  # f32 [S, C]
    where_ptr,  # i32 [S, C]
    sum_ptr,  # f64 [S, C]
    out_ptr,  # i32[S]
    V,
    chunks,
    BLOCK: tl.constexpr,
    CP: tl.constexpr,  # C rounded up to a power of 2
    CUT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a row: greedy rows take the first of the greatest, others draw."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + row)
    c = tl.arange(0, CP)
    best = tl.load(best_ptr + row * chunks + c, mask=c < chunks, other=-INFINITY)
    broken = tl.max((best != best).to(tl.int32), 0) > 0
    top = tl.max(best, 0)
    usable = (top > -INFINITY) & (top < INFINITY) & (not broken)
    token = 0
    if usable:
        if temperature == 0.0:
            first = tl.load(where_ptr + row * chunks + c, mask=c < chunks, other=0)
            token = tl.min(tl.where(best == top, first, V), 0)
        else:
            sums = tl.load(sum_ptr + row * chunks + c, mask=c < chunks, other=0.0)
            sums = tl.where(best > -INFINITY, sums * _weight(best, top), 0.0)
            ends = tl.cumsum(sums, 0)
            total = tl.sum(tl.where(c == CP - 1, ends, 0.0), 0)
            seed = tl.load(seed_ptr + row)
            aim = _uniform(seed, tl.load(position_ptr + row)) * total
            # A sum in another order may end a hair below: then the last chunk with weight.
            last = tl.max(tl.where(sums > 0.0, c, 0), 0)
            chunk = tl.min(tl.where((ends > aim) & (sums > 0.0), c, CP), 0)
            chunk = tl.minimum(chunk, last)
            before = tl.sum(tl.where(c == chunk, ends - sums, 0.0), 0)
            at = chunk * BLOCK + tl.arange(0, BLOCK)
            inside = at < V
            z = _load_z(logits_ptr + row.to(tl.int64) * V, at, inside, temperature)
            kept = z > -INFINITY
            if CUT:
                kept = kept & (_order(z) >= tl.load(cut_ptr + row))
            weight = tl.where(kept, _weight(z, top), 0.0)
            passed = (before + tl.cumsum(weight, 0) > aim) & (weight > 0.0)
            last_token = tl.max(tl.where(weight > 0.0, at, 0), 0)
            token = tl.minimum(tl.min(tl.where(passed, at, V), 0), last_token)
    tl.store(out_ptr + row, token)


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """Logits f32[S, V], settings -> i32[S], on the logits' device; the host does not wait."""
    count, vocab = logits.shape
    device = logits.device
    out = torch.empty(count, dtype=torch.int32, device=device)
    if count == 0:
        return out
    logits = logits.contiguous()
    chunks = divide_up(vocab, CHUNK)
    early = pdl(device)
    cut = out
    if rows.filtered:
        cut = torch.empty_like(out)
        filter_kernel[(count,)](
            logits,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            cut,
            vocab,
            BLOCK=min(FILTER_BLOCK, power_of_2(vocab)),
            num_warps=16,
            **early,
        )
    best = torch.empty(count, chunks, dtype=torch.float32, device=device)
    where = torch.empty(count, chunks, dtype=torch.int32, device=device)
    sums = torch.empty(count, chunks, dtype=torch.float64, device=device)
    chunk_kernel[(chunks, count)](
        logits,
        rows.temperature,
        cut,
        best,
        where,
        sums,
        vocab,
        chunks,
        BLOCK=CHUNK,
        CUT=rows.filtered,
        num_warps=8,
        **early,
    )
    draw_kernel[(count,)](
        logits,
        rows.temperature,
        rows.seed,
        rows.position,
        cut,
        best,
        where,
        sums,
        out,
        vocab,
        chunks,
        BLOCK=CHUNK,
        CP=power_of_2(chunks),
        CUT=rows.filtered,
        num_warps=8,
        **early,
    )
    return out
