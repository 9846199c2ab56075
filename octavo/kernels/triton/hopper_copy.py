"""The copying warp of `attention_hopper.py`: it takes tiles and fetches what they need.

Units of work are a tile and a key head; a worker takes the next one that nobody has taken, as
tiles differ in length. What a tile is, the warpgroups are told through shared memory. Queries, keys
and values come by the bulk tensor copy engine (TMA), as soon as a buffer is free. Not for:
arithmetic. Next file: `launch.py`.
"""

from __future__ import annotations

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

HALF = gl.constexpr(64)  # product rows of a warpgroup
LANE = gl.constexpr(64)  # 16-bit numbers in a line of swizzled shared memory
CELLS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
QUERIES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))


@gluon.jit
def _tile_of(
    index, indptr_ptr, lens_ptr, tiles_ptr, num_tiles,
    G: gl.constexpr, K: gl.constexpr, BN: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """What unit `index` of the grid's work is; 0 blocks if there is none."""
    head = index % K
    tile = gl.minimum(index // K, num_tiles - 1)
    row = gl.load(tiles_ptr + tile)
    first = gl.load(tiles_ptr + num_tiles + tile)
    exists = (row >= 0) & (index < num_tiles * K)
    row = gl.maximum(row, 0)
    TOKENS: gl.constexpr = 2 * HALF // G
    q_start = gl.load(indptr_ptr + row)
    q_len = gl.load(indptr_ptr + row + 1) - q_start
    length = gl.load(lens_ptr + row)
    position = length - q_len + first  # of the tile's first token
    stop = gl.minimum(length, position + TOKENS)
    top = (stop - 1) // BN
    if WINDOW > 0:
        bottom = gl.maximum(position - WINDOW + 1, 0) // BN
    else:
        bottom = 0
    blocks = gl.where(exists, top - bottom + 1, 0)
    return head, row, q_start + first, q_start + q_len, position, stop, top, blocks


@gluon.jit
def _take(counter_ptr):
    """The next unit of the grid's work that nobody has taken; the first ones go by program."""
    return gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)


@gluon.jit
def _tell(slots, head, token, token_end, position, stop, top, blocks):
    """Leaves a tile for the warpgroups; 0 blocks is the end of the work."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots.index(0).store(gl.full([1], blocks, gl.int32, LAYOUT))
    slots.index(1).store(gl.full([1], head, gl.int32, LAYOUT))
    slots.index(2).store(gl.full([1], token, gl.int32, LAYOUT))
    slots.index(3).store(gl.full([1], token_end, gl.int32, LAYOUT))
    slots.index(4).store(gl.full([1], position, gl.int32, LAYOUT))
    slots.index(5).store(gl.full([1], stop, gl.int32, LAYOUT))
    slots.index(6).store(gl.full([1], top, gl.int32, LAYOUT))
    gl.thread_barrier()


@gluon.jit
def told(slots, index: gl.constexpr):
    """One number of what `_tell` left."""
    return gl.max(slots.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _copy_queries(
    desc, buf, full, half: gl.constexpr, token, head,
    G: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Queries of the 64 / G tokens from `token` on, for one warpgroup."""
    LINES: gl.constexpr = D // LANE
    mbarrier.expect(full.index(half), HALF * D * 2)
    into = buf.index(half)._reinterpret(desc.dtype, [LINES, HALF // G, G, LANE], QUERIES)
    for line in gl.static_range(LINES):
        at = [token, head * G, line * LANE]
        tma.async_copy_global_to_shared(desc, at, full.index(half), into.index(line))


@gluon.jit
def _copy_cells(
    desc, buf, full, key, row_table, last_page, head,
    K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, BN: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Keys or values key..key+BN of a row into `buf` [BN, D]."""
    LINES: gl.constexpr = D // LANE
    PAGES: gl.constexpr = BN // BOX
    into = buf._reinterpret(desc.dtype, [LINES * PAGES, BOX, LANE], CELLS)
    for part in gl.static_range(PAGES):
        at = key + part * BOX
        page = gl.load(row_table + gl.minimum(at // P, last_page))
        cell = (page * K + head) * P + at % P
        for line in gl.static_range(LINES):
            tma.async_copy_global_to_shared(
                desc, [cell, line * LANE], full, into.index(line * PAGES + part)
            )


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_buf, k_buf, v_buf, slots, q_full, q_empty, full, empty,
    table_ptr, indptr_ptr, lens_ptr, tiles_ptr, counter_ptr, table_stride, num_tiles,
    G: gl.constexpr, K: gl.constexpr, D: gl.constexpr, P: gl.constexpr, BN: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr, BOX: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warp: takes units and copies what they need, as soon as there is room for it."""
    if PDL:
        gdc_wait()
    head, row, token, token_end, position, stop, top, blocks = _tile_of(
        gl.program_id(0), indptr_ptr, lens_ptr, tiles_ptr, num_tiles, G, K, BN, WINDOW
    )
    done = 0
    served = 0
    while blocks > 0:
        for half in gl.static_range(2):
            mbarrier.wait(q_empty.index(half), (served & 1) ^ 1)
        _tell(slots, head, token, token_end, position, stop, top, blocks)
        for half in gl.static_range(2):
            _copy_queries(q_desc, q_buf, q_full, half, token + half * (HALF // G), head, G, D)
        served += 1
        row_table = table_ptr + row.to(gl.int64) * table_stride
        last_page = (stop - 1) // P
        next_head, next_row, next_token, next_end = head, row, token, token_end
        next_position, next_stop, next_top, next_blocks = position, stop, top, blocks
        # Step n of a tile needs the keys of its block n and the values of block n - 1.
        for n in range(blocks + 1):
            stage = (done + n) % STAGES
            arrived = full.index(stage)
            mbarrier.wait(empty.index(stage), (((done + n) // STAGES) & 1) ^ 1)
            both = (n > 0) & (n < blocks)
            mbarrier.expect(arrived, BN * D * 4, pred=both)
            mbarrier.expect(arrived, BN * D * 2, pred=both == 0)
            if n < blocks:
                _copy_cells(
                    k_desc, k_buf.index(stage), arrived, (top - n) * BN,
                    row_table, last_page, head, K, D, P, BN, BOX,
                )  # fmt: skip
            if n > 0:
                _copy_cells(
                    v_desc, v_buf.index(stage), arrived, (top - n + 1) * BN,
                    row_table, last_page, head, K, D, P, BN, BOX,
                )  # fmt: skip
            if n == 1:  # while the warpgroups are busy, as the answer takes its time
                (
                    next_head, next_row, next_token, next_end,
                    next_position, next_stop, next_top, next_blocks,
                ) = _tile_of(
                    _take(counter_ptr), indptr_ptr, lens_ptr, tiles_ptr, num_tiles,
                    G, K, BN, WINDOW,
                )  # fmt: skip
        done += blocks + 1
        head, row, token, token_end = next_head, next_row, next_token, next_end
        position, stop, top, blocks = next_position, next_stop, next_top, next_blocks
    for half in gl.static_range(2):
        mbarrier.wait(q_empty.index(half), (served & 1) ^ 1)
    _tell(slots, 0, 0, 0, 0, 0, 0, 0)
    for half in gl.static_range(2):
        mbarrier.arrive(q_full.index(half), count=1)
    # The last worker to end leaves the counters as the next launch wants them.
    if gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
