"""Few rows times a weight matrix, at the speed of reading the matrix, on Hopper GPUs. In Gluon.

The weight is the left operand of the tensor cores (wgmma) and comes by the copy engine (TMA) into a
ring of tiles in shared memory; the rows come the same way. A program asks for its first weights
before it waits for the kernel before it (`launch.py`), so that memory is busy while that one ends.

With very few rows there is one program a processor, and all pairs of a tile and a block of columns
stand in a line of which each takes an equal run, as in Stream-K (Osama et al. 2023,
arXiv:2301.03598), so that none has more to read than another. With more rows a program has a tile,
or a part of its columns. Of programs that share a tile, the one that ends last adds up what they
found, in the order of columns, so that the sum does not depend on which one that is. What a row
gets depends on how many rows there are, not on what the others hold.
Not for: one row (`gemv.py`), or so many that arithmetic bounds them (the vendor's library).
Next file: `sample.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.launch import divide_up, gpu_of

OUTPUTS = 64  # weight rows of a tile: what a warpgroup multiplies at once
FEW = 16  # rows: what programs find is so small that it hardly matters how many share a tile
JOINED_COLUMNS = 64  # of a block: its rows lie one after another, so halves of it are blocks too
LEAST = 4  # column blocks of a program: fewer are not worth a sum over more programs
LONG = 4096  # columns of a program with more rows
MAX_ROWS = 64
MAX_ROWS_SMALL = 256  # of x, where the weight has up to SMALL elements
SMALL = 8 << 20
# Bytes of a ring: with ALONE a processor has room for one program, and so all have the same to do.
ALONE, SHARED = 160 << 10, 100 << 10
MOST_TILES = 4096  # that are shared
MOST_CELLS = 2 << 20  # of all that they find
GLUON = "3.6"  # versions of Triton whose Gluon this is written in
LINES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut."""

    rows: int  # of x in a tile
    columns: int  # of a block
    stages: int  # blocks of the ring
    span: int  # blocks of a program
    line: bool  # whether programs go on from one tile to the next
    joined: bool = False  # gated: half of a tile's rows are gates, half what they let through


@gluon.jit
def _place(
    unit, per_tile, row_tiles, first_n, first_m,
    BM: gl.constexpr, WIDE: gl.constexpr, BK: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """(weight row, row of x, column) where a unit begins."""
    if LINE:
        tile = unit // per_tile
        return tile // row_tiles * WIDE, tile % row_tiles * BM, unit % per_tile * BK
    else:
        return first_n, first_m, unit * BK


@gluon.jit
def _fetch_weights(
    weight_desc, ring, full, slot, n, k, outputs, there,
    HIGH: gl.constexpr, BK: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """Asks for the weights of a unit, and with SILU for their other half, if it is `there`.

    The ring's slots are of HIGH weight rows here, two for a unit with SILU.
    """
    HALVES: gl.constexpr = 2 if SILU else 1
    arrival = full.index(slot)
    mbarrier.expect(arrival, HALVES * HIGH * BK * 2, pred=there)
    for half in gl.static_range(HALVES):
        into = ring.index(HALVES * slot + half)
        at = [n + half * outputs, k]
        tma.async_copy_global_to_shared(weight_desc, at, arrival, into, pred=there)


@gluon.jit
def _fetch_rows(x_desc, ring, full, slot, m, k, there, BM: gl.constexpr, BK: gl.constexpr):
    arrival = full.index(slot)
    mbarrier.expect(arrival, BM * BK * 2, pred=there)
    tma.async_copy_global_to_shared(x_desc, [m, k], arrival, ring.index(slot), pred=there)


@gluon.jit
def _store(
    acc, up, bias_ptr, out_ptr, n, m, outputs, M,
    BIAS: gl.constexpr, SILU: gl.constexpr, JOINED: gl.constexpr, PAIRS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """Adds the bias, applies the gate, and writes [outputs of the tile, BM] to out [M, outputs].

    With JOINED the lower half of `acc` is `up`; n and m lie as PAIRS does without its last axis.
    """
    if JOINED:
        BN: gl.constexpr = acc.shape[0]
        BM: gl.constexpr = acc.shape[1]
        both = gl.permute(gl.reshape(acc, [2, BN // 2, BM]), (1, 2, 0))
        one, other = gl.split(gl.convert_layout(both, PAIRS))
    else:
        one, other = acc, up
    in_n = n < outputs
    if BIAS:
        one += gl.load(bias_ptr + n, mask=in_n, other=0.0).to(gl.float32)[:, None]
    if SILU:
        if BIAS:
            bias = gl.load(bias_ptr + outputs + n, mask=in_n, other=0.0)
            other += bias.to(gl.float32)[:, None]
        # Rounded as the product alone would be, so that both paths agree.
        gate = one.to(DTYPE).to(gl.float32)
        one = gate / (1.0 + gl.exp(-gate)) * other.to(DTYPE).to(gl.float32)
    at = m.to(gl.int64)[None, :] * outputs + n[:, None]
    inside = in_n[:, None] & (m < M)[None, :]
    gl.store(out_ptr + at, one.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _slot_of(piece, base, LINE: gl.constexpr):
    """Where a piece of a tile is kept. In a line a program may share two tiles: it begins one."""
    if LINE:
        return base + 2 * piece + (piece == 0).to(gl.int32)
    else:
        return base + piece


@gluon.jit
def _finish(
    acc, up, bias_ptr, out_ptr, partial_ptr, arrived_ptr, tile, first_n, first_m,
    piece, pieces, base, outputs, M,
    BM: gl.constexpr, BN: gl.constexpr, BIAS: gl.constexpr, SILU: gl.constexpr,
    LINE: gl.constexpr, JOINED: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Stores a tile, or a piece of it; the program that ends last adds up the pieces."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [BN // 8, 256 // BN], [1, 4], [0, 1])
    HALVES: gl.constexpr = 2 if SILU and not JOINED else 1
    CELLS: gl.constexpr = BN * BM
    PAIRS: gl.constexpr = gl.BlockedLayout([4, 1, 2], [8, 4, 1], [1, 4, 1], [2, 0, 1])
    PART: gl.constexpr = gl.SliceLayout(2, PAIRS)
    acc = gl.convert_layout(acc, OUT)
    up = gl.convert_layout(up, OUT)
    in_n = gl.arange(0, BN, gl.SliceLayout(1, OUT))
    in_m = gl.arange(0, BM, gl.SliceLayout(0, OUT))
    if JOINED:
        n = first_n + gl.arange(0, BN // 2, gl.SliceLayout(1, PART))
        m = first_m + gl.arange(0, BM, gl.SliceLayout(0, PART))
    else:
        n, m = first_n + in_n, first_m + in_m
    if pieces == 1:
        _store(acc, up, bias_ptr, out_ptr, n, m, outputs, M, BIAS, SILU, JOINED, PAIRS, DTYPE)
    else:
        cell = in_m[None, :] * BN + in_n[:, None]
        at = partial_ptr + _slot_of(piece, base, LINE) * (HALVES * CELLS)
        gl.store(at + cell, acc, cache_modifier=".cg")
        if HALVES == 2:
            gl.store(at + CELLS + cell, up, cache_modifier=".cg")
        gl.thread_barrier()  # all of this program's stores come before its arrival
        if gl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel") == pieces - 1:
            gl.store(arrived_ptr + tile, 0)
            acc = gl.zeros([BN, BM], gl.float32, OUT)
            up = gl.zeros([BN, BM], gl.float32, OUT)
            for other in range(pieces):
                part = partial_ptr + _slot_of(other, base, LINE) * (HALVES * CELLS)
                acc += gl.load(part + cell, cache_modifier=".cg")
                if HALVES == 2:
                    up += gl.load(part + CELLS + cell, cache_modifier=".cg")
            _store(acc, up, bias_ptr, out_ptr, n, m, outputs, M, BIAS, SILU, JOINED, PAIRS, DTYPE)


@gluon.jit(do_not_specialize=["M", "row_tiles", "span"])
def skinny_kernel(
    x_desc,  # [M, K] in blocks [BM, BK]
    weight_desc,  # [N, K] in blocks [BN, BK]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [M, N], or [M, N / 2] with SILU
    partial_ptr,  # f32 [slots, 2 if SILU, BM, BN]
    arrived_ptr,  # i32[tiles]; zero before and after
    M,
    N,
    K,
    row_tiles,  # M / BM, rounded up
    span,  # units of a program
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
    SILU: gl.constexpr,
    LINE: gl.constexpr,
    JOINED: gl.constexpr,  # SILU: a tile is of BN / 2 rows of each half, and BN rows together
):
    """out = x weight^T + bias; with SILU the halves are gate and up: out = silu(gate) * up.

    A unit is one block of columns of one tile. With LINE the units of all tiles stand in one line,
    and program p has those from p * span on; else program (t, s, r) has a run of the units of one
    tile, that of weight rows t and rows r.
    """
    gdc_launch_dependents()
    HALVES: gl.constexpr = 2 if SILU and not JOINED else 1  # of its sums
    WIDE: gl.constexpr = BN // 2 if JOINED else BN  # outputs of a tile
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DTYPE: gl.constexpr = x_desc.dtype
    weights = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES, BN, BK], weight_desc.layout)
    fetched = weights
    if JOINED:
        fetched = weights._reinterpret(DTYPE, [STAGES * 2, WIDE, BK], weight_desc.layout)
    rows = gl.allocate_shared_memory(DTYPE, [STAGES, BM, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(full.index(early), count=2)  # weights and rows each say what to expect
    gl.thread_barrier()
    outputs = N // 2 if SILU else N
    per_tile = gl.cdiv(K, BK)
    if LINE:
        start = gl.program_id(0) * span
        stop = gl.minimum(start + span, gl.cdiv(outputs, WIDE) * row_tiles * per_tile)
    else:
        start = gl.program_id(1) * span
        stop = gl.minimum(start + span, per_tile)
    own_n, own_m = gl.program_id(0) * WIDE, gl.program_id(2) * BM
    for early in gl.static_range(STAGES):
        n, m, k = _place(start + early, per_tile, row_tiles, own_n, own_m, BM, WIDE, BK, LINE)
        _fetch_weights(
            weight_desc, fetched, full, early, n, k, outputs, start + early < stop, WIDE, BK, SILU
        )  # fmt: skip
    gdc_wait()
    for early in gl.static_range(STAGES):
        n, m, k = _place(start + early, per_tile, row_tiles, own_n, own_m, BM, WIDE, BK, LINE)
        _fetch_rows(x_desc, rows, full, early, m, k, start + early < stop, BM, BK)
    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    up = gl.zeros([BN, BM], gl.float32, SUMS)
    for unit in range(start, stop):
        turn = unit - start
        slot = turn % STAGES
        goes_on = turn > 0
        if LINE:
            goes_on = goes_on & (unit % per_tile > 0)
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        x = rows.index(slot).permute((1, 0))
        left = weights.index(HALVES * slot)
        acc = warpgroup_mma(left, x, acc, use_acc=goes_on, is_async=True)
        if HALVES == 2:
            left = weights.index(HALVES * slot + 1)
            up = warpgroup_mma(left, x, up, use_acc=goes_on, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        gl.thread_barrier()  # now all warps have read the slot of the turn before: it is free
        later = unit + STAGES - 1
        there = (turn > 0) & (later < stop)
        freed = (turn + STAGES - 1) % STAGES
        later_n, later_m, later_k = _place(
            later, per_tile, row_tiles, own_n, own_m, BM, WIDE, BK, LINE
        )  # fmt: skip
        _fetch_weights(
            weight_desc, fetched, full, freed, later_n, later_k, outputs, there, WIDE, BK, SILU
        )  # fmt: skip
        _fetch_rows(x_desc, rows, full, freed, later_m, later_k, there, BM, BK)
        if LINE:  # noqa: SIM102 - the one is known when compiled, the other is not
            if (unit % per_tile == per_tile - 1) | (unit == stop - 1):
                if HALVES == 2:
                    acc, up = warpgroup_mma_wait(0, deps=[acc, up])
                else:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                tile = unit // per_tile
                first = tile * per_tile // span
                last = ((tile + 1) * per_tile - 1) // span
                at_n, at_m, _ = _place(unit, per_tile, row_tiles, 0, 0, BM, WIDE, BK, LINE)
                _finish(
                    acc, up, bias_ptr, out_ptr, partial_ptr, arrived_ptr, tile, at_n, at_m,
                    gl.program_id(0) - first, last - first + 1, 2 * first, outputs, M,
                    BM, BN, BIAS, SILU, LINE, JOINED, DTYPE,
                )  # fmt: skip
    if not LINE:
        if HALVES == 2:
            acc, up = warpgroup_mma_wait(0, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
        pieces = gl.num_programs(1)
        _finish(
            acc, up, bias_ptr, out_ptr, partial_ptr, arrived_ptr, tile, own_n, own_m,
            gl.program_id(1), pieces, tile * pieces, outputs, M,
            BM, BN, BIAS, SILU, LINE, JOINED, DTYPE,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Room:
    """Where programs meet; the products of a device follow one another and share it."""

    partial: Tensor  # f32
    arrived: Tensor  # i32, zero between launches


@lru_cache(maxsize=16)
def _room_of(device: torch.device) -> _Room:
    return _Room(
        torch.empty(MOST_CELLS, dtype=torch.float32, device=device),
        torch.zeros(MOST_TILES, dtype=torch.int32, device=device),
    )


def skinny(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    silu: bool = False,
    cut: Cut | None = None,
) -> Tensor:
    """x [M, K], weight [N, K], bias [N] -> [M, N] in `out_dtype` or x's; with `silu` [M, N / 2].

    See `suits` for what x and weight may be. `cut` None is a choice by shape.
    """
    outputs = weight.shape[0] // 2 if silu else weight.shape[0]
    count, columns = x.shape
    out = torch.empty(count, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if cut is None:
        cut = cut_of(count, outputs, columns, gpu_of(x.device).processors, gated=silu)
    assert not cut.joined or (silu and cut.columns == JOINED_COLUMNS), cut
    room = _room_of(x.device)
    row_tiles, per_tile = divide_up(count, cut.rows), divide_up(columns, cut.columns)
    wide = OUTPUTS // 2 if cut.joined else OUTPUTS
    tiles = divide_up(outputs, wide)
    if cut.line:
        grid = (divide_up(tiles * row_tiles * per_tile, cut.span),)
        slots = 2 * grid[0]
    else:
        grid = (tiles, divide_up(per_tile, cut.span), row_tiles)
        slots = tiles * row_tiles * grid[1]
    if cut.line or grid[1] > 1:
        assert tiles * row_tiles <= MOST_TILES, (outputs, count)
        cells = (2 if silu else 1) * wide * cut.rows
        assert slots * cells <= MOST_CELLS, (slots, cut)
    skinny_kernel[grid](
        TensorDescriptor.from_tensor(x.contiguous(), [cut.rows, cut.columns], LINES),
        TensorDescriptor.from_tensor(weight, [wide, cut.columns], LINES),
        weight if bias is None else bias,
        out,
        room.partial,
        room.arrived,
        count,
        weight.shape[0],
        columns,
        row_tiles,
        cut.span,
        BM=cut.rows,
        BN=OUTPUTS,
        BK=cut.columns,
        STAGES=cut.stages,
        BIAS=bias is not None,
        SILU=silu,
        LINE=cut.line,
        JOINED=cut.joined,
        num_warps=4,
        launch_pdl=True,
    )
    return out


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel multiplies x [M, K] by weight [N, K] faster than the library."""
    rows = x.shape[0]
    if x.dtype.itemsize != 2 or weight.dtype != x.dtype or weight.shape[1] % 8:
        return False
    if not gpu_of(x.device).hopper or not triton.__version__.startswith(GLUON):
        return False
    return 1 < rows <= (MAX_ROWS_SMALL if weight.numel() <= SMALL else MAX_ROWS)


def cut_of(count: int, outputs: int, columns: int, processors: int, *, gated: bool) -> Cut:
    """A good cut on an H200: equal shares of everything for few rows, else tiles and parts of them.

    What a program of more rows finds is large: they share tiles only where columns are many.
    """
    if count <= FEW:
        rows = FEW
    elif count <= MAX_ROWS:
        rows = 32 if count <= 32 else 64
    else:
        rows = 64 if count <= 2 * MAX_ROWS or columns > outputs else 128
    high = divide_up(outputs, OUTPUTS)
    if rows == 64 and high * divide_up(count, rows) <= processors // 4:
        rows = 32
    tiles = high * divide_up(count, rows)
    joined = gated and count > MAX_ROWS
    if joined:
        tiles = divide_up(outputs, OUTPUTS // 2) * divide_up(count, rows)
    block = JOINED_COLUMNS if gated or rows == 128 else 128
    per_tile = divide_up(columns, block)
    small = (2 if gated else 1) * outputs * columns <= SMALL
    line = count <= FEW and tiles < 4 * processors and not small
    if line:
        span = max(LEAST, divide_up(tiles * per_tile, processors))
        programs = divide_up(tiles * per_tile, span)
    else:
        few = count <= FEW and small
        splits = processors // 2 // tiles if few else min(processors // tiles, columns // LONG)
        span = max(divide_up(per_tile, max(1, splits)), min(LEAST, per_tile))
        programs = tiles * divide_up(per_tile, span)
    ring = ALONE if programs <= processors else SHARED
    stage = ((2 if gated and not joined else 1) * OUTPUTS + rows) * block * 2
    return Cut(rows, block, ring // stage, span, line, joined)
