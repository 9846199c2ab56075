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
from octavo.kernels.triton.pairs import Sorted
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
def _tile_at(tiles_ptr, room, tile, n_tiles, outputs, BN: gl.constexpr, HALVES: gl.constexpr):
    """(weight row, output, first row of x, last + 1) of a tile."""
    row_tile = tile // n_tiles
    n = tile % n_tiles * BN
    expert = gl.load(tiles_ptr + row_tile)
    first = gl.load(tiles_ptr + room + row_tile)
    stop = gl.load(tiles_ptr + 2 * room + row_tile)
    return expert * HALVES * outputs + n, n, first, stop


@gluon.jit
def _fetch(
    x_desc, weight_desc, rows, weights, full, slot, weight_row, first, k, outputs, there,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Asks for one block of a tile, if it is `there`."""
    arrival = full.index(slot)
    mbarrier.expect(arrival, (HALVES * BN + BM) * BK * 2, pred=there)
    for half in gl.static_range(HALVES):
        into = weights.index(HALVES * slot + half)
        at = [weight_row + half * outputs, k]
        tma.async_copy_global_to_shared(weight_desc, at, arrival, into, pred=there)
    tma.async_copy_global_to_shared(x_desc, [first, k], arrival, rows.index(slot), pred=there)


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


@gluon.jit(do_not_specialize=["room"])
def grouped_kernel(
    x_desc,  # [A, K] in blocks [BM, BK]
    weight_desc,  # [E * N, K] in blocks [BN, BK]; with SILU N is 2 * outputs
    scale_ptr,  # f32[A], read if not SILU
    tiles_ptr,  # see `Sorted`
    out_ptr,  # [A, outputs]
    room,
    outputs,
    K,
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
    total = gl.load(tiles_ptr + 3 * room) * n_tiles
    tile = gl.program_id(0)
    units = gl.cdiv(gl.maximum(total - tile, 0), programs) * per_tile
    later = tile  # the tile and the block that are asked for next
    block = 0
    weight_row, n, first, stop = _tile_at(
        tiles_ptr, room, gl.minimum(tile, gl.maximum(total - 1, 0)), n_tiles, outputs, BN, HALVES
    )
    later_row, later_first = weight_row, first
    for early in gl.static_range(STAGES):
        _fetch(
            x_desc, weight_desc, rows, weights, full, early, later_row, later_first, block * BK,
            outputs, early < units, BM, BN, BK, HALVES,
        )  # fmt: skip
        block += 1
        if block == per_tile:
            block = 0
            later = later + programs  # not in place: it begins as the same number
            later_row, _, later_first, _ = _tile_at(
                tiles_ptr, room, gl.minimum(later, gl.maximum(total - 1, 0)), n_tiles, outputs,
                BN, HALVES,
            )  # fmt: skip
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
            x_desc, weight_desc, rows, weights, full, freed, later_row, later_first, block * BK,
            outputs, there, BM, BN, BK, HALVES,
        )  # fmt: skip
        if unit > 0:
            block += 1
            if block == per_tile:
                block = 0
                later = later + programs  # not in place: it begins as the same number
                later_row, _, later_first, _ = _tile_at(
                    tiles_ptr, room, gl.minimum(later, total - 1), n_tiles, outputs, BN, HALVES
                )  # fmt: skip
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
            weight_row, n, first, stop = _tile_at(
                tiles_ptr, room, gl.minimum(tile, total - 1), n_tiles, outputs, BN, HALVES
            )  # fmt: skip


def grouped(
    x: Tensor,
    weight: Tensor,
    found: Sorted,
    *,
    tile_rows: int,
    silu: bool,
    cut: GroupedCut | None = None,
    programs: int | None = None,
) -> Tensor:
    """x [A, K] by place, weight [E, N, K] -> [A, N], or with `silu` [A, N / 2], by place.

    Without `silu` results are multiplied by the pairs' weights. See `can_serve` for what x and
    weight may be; `cut` None is a choice by shape.
    """
    count, size, columns = weight.shape
    outputs = size // 2 if silu else size
    pairs = x.shape[0]
    out = x.new_empty(pairs, outputs)
    cut = cut or grouped_cut(tile_rows, silu=silu)
    room = found.tiles.shape[0] // 3
    tiles = room * divide_up(outputs, cut.outputs)
    grouped_kernel[(min(tiles, programs or gpu_of(x.device).processors),)](
        TensorDescriptor.from_tensor(x, [tile_rows, cut.columns], LINES),
        TensorDescriptor.from_tensor(
            weight.view(count * size, columns), [cut.outputs, cut.columns], LINES
        ),
        found.weights,
        found.tiles,
        out,
        room,
        outputs,
        columns,
        BM=tile_rows,
        BN=cut.outputs,
        BK=cut.columns,
        STAGES=cut.stages,
        SILU=silu,
        num_warps=4,
        launch_pdl=True,
    )
    return out


def can_serve(x: Tensor, weight: Tensor) -> bool:
    """Whether this kernel multiplies rows of x [.., K] by weight [E, N, K]."""
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return False
    return (
        weight.shape[2] % 8 == 0
        and gpu_of(x.device).hopper
        and triton.__version__.startswith(GLUON)
    )


def grouped_cut(tile_rows: int, *, silu: bool) -> GroupedCut:
    """A good cut on an H200."""
    outputs, columns = 64, 64 if tile_rows > 64 else 128
    stage = ((2 if silu else 1) * outputs + tile_rows) * columns * 2
    return GroupedCut(outputs, columns, max(2, min(MOST_STAGES, RING // stage)))
