"""Sampling on the device, without a wait of the host: the rule of `octavo/kernels/sample.py`.

Logits are cut into chunks of CHUNK tokens, one program each:

    chunks   each chunk's greatest z, where it is first, and the sum of its kept weights, f64
    draw     one program a row: which chunk the draw falls into, then which token of it

Rows with filters take three kernels more (`sample_filter.py`), which give the least z that is kept;
the host may know that there are no such rows (`SampleRows.filtered`). Weights and sums are f64, as
in the rule; sums are taken in another order. Next file: `sample_filter.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.ops import SampleRows
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2
from octavo.kernels.triton.sample_filter import (
    CHUNK,
    GROUP,
    INFINITY,
    find_cuts,
    load_z,
    order_of,
    weight_of,
    z_at,
)


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
def chunk_kernel(
    logits_ptr,  # f32 [S, V]
    temperature_ptr,  # f32[S]
    cut_ptr,  # i32[S], read if CUT
    best_ptr,  # f32 [S, C]
    where_ptr,  # i32 [S, C]
    sum_ptr,  # f64 [S, C], of exp(z - best)
    group_ptr,  # f32 [S, C * BLOCK / GROUP], each group's greatest z, written if GROUPS
    flag_ptr,  # i32[S], set to 1 if FLAGS and a logit is not finite
    V,
    chunks,  # C
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    CUT: tl.constexpr,
    FLAGS: tl.constexpr,
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
    logit = tl.load(logits_ptr + row.to(tl.int64) * V + at, mask=inside, other=-INFINITY)
    if FLAGS:
        wrong = tl.where(tl.abs(logit) < INFINITY, 0, 1)
        if tl.max(tl.where(inside, wrong, 0), 0) > 0:
            tl.store(flag_ptr + row, 1)
    z = z_at(logit, temperature)
    broken = tl.max((z != z).to(tl.int32), 0) > 0
    best = tl.max(z, 0)
    first = tl.min(tl.where((z == best) & inside, at, V), 0)
    total = tl.full([], 0.0, tl.float64)
    if temperature != 0.0:
        kept = z > -INFINITY
        if CUT:
            kept = kept & (order_of(z) >= tl.load(cut_ptr + row))
        total = tl.sum(tl.where(kept, weight_of(z, best), 0.0), 0)
    slot = row * chunks + chunk
    tl.store(best_ptr + slot, tl.where(broken, float("nan"), best))
    tl.store(where_ptr + slot, first)
    tl.store(sum_ptr + slot, total)
    if GROUPS:
        g = tl.arange(0, BLOCK // GROUP)
        greatest = tl.max(tl.reshape(z, [BLOCK // GROUP, GROUP]), 1)
        tl.store(group_ptr + slot.to(tl.int64) * (BLOCK // GROUP) + g, greatest)


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
            sums = tl.where(best > -INFINITY, sums * weight_of(best, top), 0.0)
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
            z = load_z(logits_ptr + row.to(tl.int64) * V, at, inside, temperature)
            kept = z > -INFINITY
            if CUT:
                kept = kept & (order_of(z) >= tl.load(cut_ptr + row))
            weight = tl.where(kept, weight_of(z, top), 0.0)
            passed = (before + tl.cumsum(weight, 0) > aim) & (weight > 0.0)
            last_token = tl.max(tl.where(weight > 0.0, at, 0), 0)
            token = tl.minimum(tl.min(tl.where(passed, at, V), 0), last_token)
    tl.store(out_ptr + row, token)


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """Logits f32[S, V], settings -> i32[S], on the logits' device; the host does not wait."""
    return _sample(logits, rows, None)


def sample_checked(logits: Tensor, rows: SampleRows, flags: Tensor) -> Tensor:
    """As `sample`; sets `flags` i32[S] to 1 where a row has a logit that is not finite."""
    return _sample(logits, rows, flags)


def _sample(logits: Tensor, rows: SampleRows, flags: Tensor | None) -> Tensor:
    count, vocab = logits.shape
    device = logits.device
    out = torch.empty(count, dtype=torch.int32, device=device)
    if count == 0:
        return out
    logits = logits.contiguous()
    chunks = divide_up(vocab, CHUNK)
    early = pdl(device)
    cut = out
    best = torch.empty(count, chunks, dtype=torch.float32, device=device)
    where = torch.empty(count, chunks, dtype=torch.int32, device=device)
    sums = torch.empty(count, chunks, dtype=torch.float64, device=device)

    def sum_chunks(groups: Tensor | None, flags: Tensor | None, *, cut_off: bool) -> None:
        chunk_kernel[(chunks, count)](
            logits,
            rows.temperature,
            cut,
            best,
            where,
            sums,
            best if groups is None else groups,
            out if flags is None else flags,
            vocab,
            chunks,
            BLOCK=CHUNK,
            GROUP=GROUP,
            GROUPS=groups is not None,
            CUT=cut_off,
            FLAGS=flags is not None,
            num_warps=8,
            **early,
        )

    if rows.filtered:
        groups = torch.empty(count, chunks * CHUNK // GROUP, dtype=torch.float32, device=device)
        sum_chunks(groups, flags, cut_off=False)
        cut = find_cuts(logits, rows, best, sums, groups)
        flags = None
    sum_chunks(None, flags, cut_off=rows.filtered)
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
