"""Tiles of routed experts' products, at the speed of reading weights, on Hopper GPUs. In Gluon.

As in `skinny.py`, weights are the left operand of the tensor cores and come by the copy engine into
a ring of tiles in shared memory, rows of tokens beside them. A program takes one tile after another
and asks for the next ones' weights while it works, so that memory is never idle between tiles.
Not for: sorting (`routing.py`), one token (`experts.py`), or so many tokens that the library's
grouped product is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from octavo.kernels.triton.pairs import Shared, Sorted
from octavo.kernels.triton.skinny import GLUON, LINES

RING = 192 << 10  # bytes of weights and rows that are on their way to a program
MOST_STAGES = 8


@dataclass(frozen=True, slots=True)
class GroupedCut:
    """How a grouped product is cut."""

    outputs: int  # weight rows of a tile: 64 or 128
    columns: int  # of a block
    stages: int  # blocks of the ring


@gluon.jit
def _tile_at(tiles_ptr, room, tile, last, n_tiles, BN: gl.constexpr):
    """(expert, output, first row of x, last + 1) of a tile; of the last one for all after it."""
    tile = gl.minimum(tile, gl.maximum(last, 0))
    row_tile = tile // n_tiles
    expert = gl.load(tiles_ptr + row_tile)
    first = gl.load(tiles_ptr + room + row_tile)
    stop = gl.load(tiles_ptr + 2 * room + row_tile)
    return expert, tile % n_tiles * BN, first, stop


@gluon.jit
def _fetch(
    x_desc, own_desc, weight_desc, shared_desc, rows, weights, full, slot, expert, n, first, k,
    outputs, K, pairs, tokens, there, E: gl.constexpr, SHARED: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, SILU: gl.constexpr,
):  # fmt: skip
    """Asks for one block of a tile, if it is `there`.

    A shared expert is the part of one MLP that begins at gate row, up row, or column
    (expert - E) * its width.
    """
    HALVES: gl.constexpr = 2 if SILU else 1
    arrival = full.index(slot)
    mbarrier.expect(arrival, (HALVES * BN + BM) * BK * 2, pred=there)
    routed = there
    if SHARED > 0:
        routed = there & (expert < E)
        extra = there & (expert >= E)
        nth = expert - E
    for half in gl.static_range(HALVES):
        into = weights.index(HALVES * slot + half)
        at = [(expert * HALVES + half) * outputs + n, k]
        tma.async_copy_global_to_shared(weight_desc, at, arrival, into, pred=routed)
        if SHARED > 0:
            if SILU:
                at = [(half * SHARED + nth) * outputs + n, k]
            else:
                at = [n, nth * K + k]
            tma.async_copy_global_to_shared(shared_desc, at, arrival, into, pred=extra)
    into = rows.index(slot)
    if SILU and SHARED > 0:
        tma.async_copy_global_to_shared(x_desc, [first, k], arrival, into, pred=routed)
        own = first - pairs - nth * tokens
        tma.async_copy_global_to_shared(own_desc, [own, k], arrival, into, pred=extra)
    else:
        tma.async_copy_global_to_shared(x_desc, [first, k], arrival, into, pred=there)


@gluon.jit
def _store(
    acc, up, scale_ptr, out_ptr, n0, first, stop, outputs,
    BM: gl.constexpr, BN: gl.constexpr, SILU: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Writes a tile [BN, BM] to out [A, outputs]."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    acc = gl.convert_layout(acc, OUT)
    n = n0 + gl.arange(0, BN, gl.SliceLayout(1, OUT))
    m = first + gl.arange(0, BM, gl.SliceLayout(0, OUT))
    if SILU:
        up = gl.convert_layout(up, OUT)
        # Rounded as the product alone would be, so that all paths agree.
        gate = acc.to(DTYPE).to(gl.float32)
        acc = gate / (1.0 + gl.exp(-gate)) * up.to(DTYPE).to(gl.float32)
    else:
        acc = acc * gl.load(scale_ptr + m, mask=m < stop, other=0.0)[None, :]
    at = m.to(gl.int64)[None, :] * outputs + n[:, None]
    inside = (n < outputs)[:, None] & (m < stop)[None, :]
    gl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["room", "pairs", "tokens"])
def grouped_kernel(
    x_desc,  # [A, K] in blocks [BM, BK]; with SILU [T * TOP, K], of experts that were chosen
    own_desc,  # [T, K], the tokens' rows, for shared experts with SILU
    weight_desc,  # [E * N, K] in blocks [BN, BK]; with SILU N is 2 * outputs
    shared_desc,  # with SILU [2 * SHARED * outputs, K], else [N, SHARED * K]
    scale_ptr,  # f32[A], read if not SILU
    tiles_ptr,  # see `Sorted`
    out_ptr,  # [A, outputs]
    room,
    outputs,
    K,
    pairs,  # T * TOP
    tokens,
    E: gl.constexpr,
    SHARED: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    SILU: gl.constexpr,
):
    """Program p has tiles p, p + programs, ...; those of the same rows stand side by side."""
    HALVES: gl.constexpr = 2 if SILU else 1
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    DTYPE: gl.constexpr = x_desc.dtype
    weights = gl.allocate_shared_memory(DTYPE, [STAGES * HALVES, BN, BK], weight_desc.layout)
    rows = gl.allocate_shared_memory(DTYPE, [STAGES, BM, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(full.index(early), count=1)
    gl.thread_barrier()
    gdc_wait()
    gdc_launch_dependents()
    n_tiles = gl.cdiv(outputs, BN)
    per_tile = gl.cdiv(K, BK)
    programs = gl.num_programs(0)
    last = gl.load(tiles_ptr + 3 * room) * n_tiles - 1
    tile = gl.program_id(0)
    units = gl.cdiv(gl.maximum(last + 1 - tile, 0), programs) * per_tile
    expert, n, first, stop = _tile_at(tiles_ptr, room, tile, last, n_tiles, BN)
    # The tile and the block that are asked for next.
    later, block, later_expert, later_n, later_first = tile, 0, expert, n, first
    for early in gl.static_range(STAGES):
        _fetch(
            x_desc, own_desc, weight_desc, shared_desc, rows, weights, full, early, later_expert,
            later_n, later_first, block * BK, outputs, K, pairs, tokens, early < units,
            E, SHARED, BM, BN, BK, SILU,
        )  # fmt: skip
        block += 1
        if block == per_tile:
            block = 0
            later = later + programs  # not in place: it begins as the same number
            later_expert, later_n, later_first, _ = _tile_at(
                tiles_ptr, room, later, last, n_tiles, BN
            )
    acc = gl.zeros([BN, BM], gl.float32, SUMS)
    up = gl.zeros([BN, BM], gl.float32, SUMS)
    done = 0  # blocks of this tile
    for unit in range(units):
        slot = unit % STAGES
        mbarrier.wait(full.index(slot), (unit // STAGES) & 1)
        x = rows.index(slot).permute((1, 0))
        left = weights.index(HALVES * slot)
        acc = warpgroup_mma(left, x, acc, use_acc=done > 0, is_async=True)
        if SILU:
            left = weights.index(HALVES * slot + 1)
            up = warpgroup_mma(left, x, up, use_acc=done > 0, is_async=True)
            acc, up = warpgroup_mma_wait(2, deps=[acc, up])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        gl.thread_barrier()  # now all warps have read the slot of the turn before: it is free
        there = (unit > 0) & (unit + STAGES - 1 < units)
        freed = (unit + STAGES - 1) % STAGES
        _fetch(
            x_desc, own_desc, weight_desc, shared_desc, rows, weights, full, freed, later_expert,
            later_n, later_first, block * BK, outputs, K, pairs, tokens, there,
            E, SHARED, BM, BN, BK, SILU,
        )  # fmt: skip
        if unit > 0:
            block += 1
            if block == per_tile:
                block = 0
                later = later + programs
                later_expert, later_n, later_first, _ = _tile_at(
                    tiles_ptr, room, later, last, n_tiles, BN
                )
        done += 1
        if done == per_tile:
            if SILU:
                acc, up = warpgroup_mma_wait(0, deps=[acc, up])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            _store(
                acc, up, scale_ptr, out_ptr, n, first, stop, outputs, BM, BN, SILU, DTYPE
            )  # fmt: skip
            done = 0
            tile = tile + programs
            _, n, first, stop = _tile_at(tiles_ptr, room, tile, last, n_tiles, BN)


def grouped(
    x: Tensor,
    weight: Tensor,
    found: Sorted,
    *,
    tile_rows: int,
    silu: bool,
    own: Tensor | None = None,
    shared: Shared | None = None,
    cut: GroupedCut | None = None,
    programs: int | None = None,
) -> Tensor:
    """x [A, K] by place, weight [E, N, K] -> [A, N], or with `silu` [A, N / 2], by place.

    With `silu` x holds the rows of experts that were chosen, and `own` [T, K] those of tokens,
    which `shared` ones take. Without it results are multiplied by the pairs' weights. See
    `can_serve` for what weight may be; `cut` None is a choice by shape.
    """
    count, size, columns = weight.shape
    outputs = size // 2 if silu else size
    pairs = found.order.shape[0]
    out = x.new_empty(pairs, outputs)
    cut = cut or grouped_cut(tile_rows, silu=silu)
    room = found.tiles.shape[0] // 3
    tiles = room * divide_up(outputs, cut.outputs)

    def rows_of(tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [tile_rows, cut.columns], LINES)

    def weights_of(tensor: Tensor) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [cut.outputs, cut.columns], LINES)

    rows, weights = rows_of(x), weights_of(weight.view(count * size, columns))
    extra = weights
    if shared is not None:
        extra = weights_of(shared.gate_up if silu else shared.down)
    grouped_kernel[(min(tiles, programs or gpu_of(x.device).processors),)](
        rows,
        rows if own is None else rows_of(own),
        weights,
        extra,
        found.weights,
        found.tiles,
        out,
        room,
        outputs,
        columns,
        found.tokens * found.top,
        found.tokens,
        E=count,
        SHARED=found.shared,
        BM=tile_rows,
        BN=cut.outputs,
        BK=cut.columns,
        STAGES=cut.stages,
        SILU=silu,
        num_warps=4,
        launch_pdl=True,
    )
    return out


def can_serve(weight: Tensor) -> bool:
    """Whether this kernel multiplies by weight [E, N, K]."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or weight.shape[2] % 8:
        return False
    return gpu_of(weight.device).hopper and triton.__version__.startswith(GLUON)


def grouped_cut(tile_rows: int, *, silu: bool) -> GroupedCut:
    """A good cut on an H200."""
    outputs = 64 if silu else 128
    columns = 64 if tile_rows > 64 else 128
    stage = ((2 if silu else 1) * outputs + tile_rows) * columns * 2
    return GroupedCut(outputs, columns, max(2, min(MOST_STAGES, RING // stage)))
