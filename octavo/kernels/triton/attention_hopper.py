"""Paged causal attention on Hopper GPUs, for long rows: warpgroups with roles, in Gluon.

Gluon is Triton's language with layouts and synchronization left to the author. A program is a
persistent worker of three groups of warps, after FlashAttention-3 (Shah et al. 2024,
arXiv:2407.08608): one warp copies queries, keys and values to shared memory with the bulk tensor
copy engine (TMA), and two warpgroups own 64 product rows each. A warpgroup starts the scores of the
next block of keys before it makes weights of the last, so that tensor cores work under the
exponentials. Rows of a step are found by the tiles of `attention_varlen.py`, which serves whatever
this kernel does not: `can_serve` says so. Next file: `hopper_copy.py`.
"""

from __future__ import annotations

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents

from octavo.kernels.triton.attention_decode import Heads
from octavo.kernels.triton.attention_varlen import Queries
from octavo.kernels.triton.hopper_copy import CELLS, HALF, LANE, QUERIES, produce, told
from octavo.kernels.triton.launch import gpu_of, pdl

LOG2_E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)


@gluon.jit
def _pack(p, BN: gl.constexpr, DTYPE: gl.constexpr):
    """f32 [64, BN] -> i32 [64, BN / 2]: neighbours as one number, which loops carry for nothing."""
    even, odd = gl.split(gl.reshape(p, [HALF, BN // 2, 2]))
    KIND: gl.constexpr = "bf16x2" if DTYPE.is_bf16() else "f16x2"
    return gl.inline_asm_elementwise(
        "cvt.rn." + KIND + ".f32 $0, $2, $1;",
        "=r,f,f",
        [even, odd],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _unpack(p, BN: gl.constexpr, DTYPE: gl.constexpr, O_LAYOUT: gl.constexpr):
    """What `_pack` made -> [64, BN] as the left operand of a product."""
    ASM: gl.constexpr = "mov.b32 {$0, $1}, $2;"
    if DTYPE.is_bf16():
        even, odd = gl.inline_asm_elementwise(
            ASM, "=h,=h,r", [p], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
    else:
        even, odd = gl.inline_asm_elementwise(
            ASM, "=h,=h,r", [p], dtype=(gl.float16, gl.float16), is_pure=True, pack=1
        )
    p = gl.reshape(gl.join(even, odd), [HALF, BN])
    return gl.convert_layout(p, gl.DotOperandLayout(0, O_LAYOUT, 2))


@gluon.jit
def _weights(
    s, best, total, key, position, factor,
    BN: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, MASKED: gl.constexpr,
    O_LAYOUT: gl.constexpr, S_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """(weights, shrink, best, total) after scores `s` f32 [64, BN] of the keys from `key` on."""
    if CAP > 0:
        # CAP * tanh(score / CAP), with the factor of base 2 already in it.
        s = (CAP * LOG2_E) * (1.0 - 2.0 / (gl.exp2(s * (factor * 2.0 / CAP)) + 1.0))
    if MASKED:
        if CAP == 0:
            s = s * factor
        keys = key + gl.arange(0, BN, gl.SliceLayout(0, S_LAYOUT))
        visible = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > position[:, None] - WINDOW)
        # After the factor: LOWEST must come out of the difference below as it went in.
        s = gl.where(visible, s, LOWEST)
    if MASKED or CAP > 0:
        new_best = gl.maximum(best, gl.max(s, 1))
        p = gl.exp2(s - new_best[:, None])
    else:
        # The factor is above 0, so it may come after the maximum, and into one instruction.
        new_best = gl.maximum(best, gl.max(s, 1) * factor)
        p = gl.exp2(s * factor - new_best[:, None])
    shrink = gl.exp2(best - new_best)
    total = total * shrink + gl.sum(p, 1)
    p = _pack(p, BN, DTYPE)
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, O_LAYOUT))
    return p, shrink, new_best, total


@gluon.jit
def _release(barrier):
    """Says that all four warps of this warpgroup have read a buffer."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _steps(
    low, high, p, o, best, total, q, k_buf, v_buf, full, empty, done, top, position, factor,
    BN: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, STAGES: gl.constexpr,
    MASKED: gl.constexpr, O_LAYOUT: gl.constexpr, S_LAYOUT: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Steps low..high of a tile: the scores of a block under the sum of the one before it."""
    for n in range(low, high):
        stage = (done + n) % STAGES
        s = warpgroup_mma(
            q,
            k_buf.index(stage).permute((1, 0)),
            gl.zeros([HALF, BN], gl.float32, S_LAYOUT),
            use_acc=False,
            is_async=True,
        )
        weights = _unpack(p, BN, DTYPE, O_LAYOUT)
        o = warpgroup_mma(weights, v_buf.index(stage), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p_next, shrink, best, total = _weights(
            s, best, total, (top - n) * BN, position, factor, BN, WINDOW, CAP, MASKED,
            O_LAYOUT, S_LAYOUT, DTYPE,
        )  # fmt: skip
        # This wait is a loop, which keeps the assembler from moving the weights behind the sum.
        following = done + n + 1
        mbarrier.wait(full.index(following % STAGES), (following // STAGES) & 1)
        o, weights = warpgroup_mma_wait(0, deps=[o, weights])
        _release(empty.index(stage))
        o = o * shrink[:, None]
        p = p_next
    return p, o, best, total


@gluon.jit
def _tile(
    half: gl.constexpr, blocks, slots, done, out_ptr, sinks_ptr, q_buf, k_buf, v_buf,
    q_empty, full, empty, scale,
    Q: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 product rows of a tile whose queries have arrived; the number of steps done after it."""
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    DTYPE: gl.constexpr = q_buf.dtype
    head, token, token_end = told(slots, 1), told(slots, 2), told(slots, 3)
    first_position, stop, top = told(slots, 4), told(slots, 5), told(slots, 6)
    factor = scale * LOG2_E
    m = half * HALF + gl.arange(0, HALF, ROWS)
    position = first_position + m // G
    q = q_buf.index(half)
    if SINKS:
        best = gl.load(sinks_ptr + head * G + m % G) * LOG2_E
        total = gl.full([HALF], 1.0, gl.float32, ROWS)
    else:
        best = gl.full([HALF], LOWEST, gl.float32, ROWS)
        total = gl.zeros([HALF], gl.float32, ROWS)
    mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
    s = warpgroup_mma(
        q,
        k_buf.index(done % STAGES).permute((1, 0)),
        gl.zeros([HALF, BN], gl.float32, S_LAYOUT),
        use_acc=False,
        is_async=True,
    )
    s = warpgroup_mma_wait(0, deps=[s])
    _release(empty.index(done % STAGES))
    p, _shrink, best, total = _weights(
        s, best, total, top * BN, position, factor, BN, WINDOW, CAP, True,
        O_LAYOUT, S_LAYOUT, DTYPE,
    )  # fmt: skip
    o = gl.zeros([HALF, D], gl.float32, O_LAYOUT)
    mbarrier.wait(full.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1)
    # Blocks on the diagonal, then those that all rows see whole, then the window's edge.
    edge = gl.minimum(gl.maximum(top - (first_position + 1) // BN + 1, 1), blocks)
    p, o, best, total = _steps(
        1, edge, p, o, best, total, q, k_buf, v_buf, full, empty, done, top, position, factor,
        BN, WINDOW, CAP, STAGES, True, O_LAYOUT, S_LAYOUT, DTYPE,
    )  # fmt: skip
    if WINDOW > 0:
        far = top - gl.maximum(stop - 1 - WINDOW + BN, 0) // BN + 1
        far = gl.minimum(gl.maximum(far, edge), blocks)
    else:
        far = blocks
    p, o, best, total = _steps(
        edge, far, p, o, best, total, q, k_buf, v_buf, full, empty, done, top, position, factor,
        BN, WINDOW, CAP, STAGES, False, O_LAYOUT, S_LAYOUT, DTYPE,
    )  # fmt: skip
    if WINDOW > 0:
        p, o, best, total = _steps(
            far, blocks, p, o, best, total, q, k_buf, v_buf, full, empty,
            done, top, position, factor, BN, WINDOW, CAP, STAGES, True,
            O_LAYOUT, S_LAYOUT, DTYPE,
        )  # fmt: skip
    _release(q_empty.index(half))
    stage = (done + blocks) % STAGES
    weights = _unpack(p, BN, DTYPE, O_LAYOUT)
    o = warpgroup_mma(weights, v_buf.index(stage), o, is_async=True)
    o, weights = warpgroup_mma_wait(0, deps=[o, weights])
    _release(empty.index(stage))
    share = gl.convert_layout(1.0 / total, gl.SliceLayout(1, O_LAYOUT))
    out = gl.convert_layout((o * share[:, None]).to(DTYPE), OUT)
    r = half * HALF + gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    d = gl.arange(0, D, gl.SliceLayout(0, OUT))
    at = ((token + r // G).to(gl.int64) * Q + head * G + r % G) * D
    inside = token + r // G < token_end
    gl.store(out_ptr + at[:, None] + d[None, :], out, mask=inside[:, None])
    return done + blocks + 1


@gluon.jit
def _consume(
    half: gl.constexpr, out_ptr, sinks_ptr, q_buf, k_buf, v_buf, slots,
    q_full, q_empty, full, empty, scale,
    Q: gl.constexpr, G: gl.constexpr, D: gl.constexpr, BN: gl.constexpr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its half of every tile that the producer takes."""
    done = 0
    served = 0
    mbarrier.wait(q_full.index(half), 0)
    blocks = told(slots, 0)
    while blocks > 0:
        done = _tile(
            half, blocks, slots, done, out_ptr, sinks_ptr, q_buf, k_buf, v_buf,
            q_empty, full, empty, scale, Q, G, D, BN, WINDOW, CAP, SINKS, STAGES,
        )  # fmt: skip
        served += 1
        mbarrier.wait(q_full.index(half), served & 1)
        blocks = told(slots, 0)


@gluon.jit(
    do_not_specialize=["table_stride", "num_tiles"],
    do_not_specialize_on_alignment=["table_ptr", "indptr_ptr", "lens_ptr"],
)
def hopper_kernel(
    q_desc,  # [T, Q, D] in blocks [64 / G, G, 64]
    k_desc,  # [N * K * P, D] in blocks [BOX, 64]
    v_desc,
    table_ptr,  # i32[R, B]
    indptr_ptr,  # i32[R+1]
    lens_ptr,  # i32[R]
    tiles_ptr,  # i32[2, tiles]
    out_ptr,  # [T, Q, D]
    sinks_ptr,  # f32[Q], read if SINKS
    counter_ptr,  # i32[2]: units taken, workers done; 0 before and after
    scale,
    table_stride,
    num_tiles,
    Q: gl.constexpr,
    G: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    BN: gl.constexpr,
    WINDOW: gl.constexpr,
    CAP: gl.constexpr,
    SINKS: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """A persistent worker, see the module."""
    if PDL:
        gdc_launch_dependents()
    BOX: gl.constexpr = P if P < BN else BN
    q_buf = gl.allocate_shared_memory(q_desc.dtype, [2, HALF, D], CELLS)
    k_buf = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BN, D], CELLS)
    v_buf = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BN, D], CELLS)
    slots = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(q_empty.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_consume, (
                0, out_ptr, sinks_ptr, q_buf, k_buf, v_buf, slots, q_full, q_empty, full, empty,
                scale, Q, G, D, BN, WINDOW, CAP, SINKS, STAGES,
            )),
            (_consume, (
                1, out_ptr, sinks_ptr, q_buf, k_buf, v_buf, slots, q_full, q_empty, full, empty,
                scale, Q, G, D, BN, WINDOW, CAP, SINKS, STAGES,
            )),
            (produce, (
                q_desc, k_desc, v_desc, q_buf, k_buf, v_buf, slots, q_full, q_empty, full, empty,
                table_ptr, indptr_ptr, lens_ptr, tiles_ptr, counter_ptr, table_stride, num_tiles,
                G, K, D, P, BN, WINDOW, STAGES, BOX, PDL,
            )),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip


def can_serve(
    device: torch.device, dtype: torch.dtype, cache: torch.dtype, head_dim: int, group: int
) -> bool:
    """Whether this kernel serves such attention; `group` is query heads a key head."""
    return (
        gpu_of(device).hopper
        and dtype in (torch.bfloat16, torch.float16)
        and cache == dtype
        and head_dim in (64, 128)
        and group in (1, 2, 4, 8, 16, 32)
    )


def hopper(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Queries,
    heads: Heads,
    counter: Tensor,
    out: Tensor,
    *,
    block: int = 128,
    stages: int | None = None,
    workers: int | None = None,
) -> None:
    """Attention of q [T, Q, D] over pages [N, K, P, D] into out [T, Q, D], causal.

    A row's queries are the last of its `lens` keys, which are stored already. Tiles are of
    HOPPER_ROWS product rows (`attention_tiles.py`). `counter` i32[2] is 0 before and after; two
    launches that may overlap need one each.
    """
    _, num_heads, size = q.shape
    _, kv_heads, page, _ = keys.shape
    group = num_heads // kv_heads
    units = kv_heads * queries.tiles.shape[1]
    cells = [min(page, block), LANE.value]
    hopper_kernel[(min(units, workers or gpu_of(q.device).processors),)](
        TensorDescriptor.from_tensor(q, [HALF.value // group, group, LANE.value], QUERIES.value),
        TensorDescriptor.from_tensor(keys.view(-1, size), cells, CELLS.value),
        TensorDescriptor.from_tensor(values.view(-1, size), cells, CELLS.value),
        queries.table,
        queries.indptr,
        queries.lens,
        queries.tiles,
        out,
        out if heads.sinks is None else heads.sinks,
        counter,
        heads.scale,
        queries.table.stride(0),
        queries.tiles.shape[1],
        Q=num_heads,
        G=group,
        K=kv_heads,
        D=size,
        P=page,
        BN=block,
        WINDOW=heads.window,
        CAP=heads.soft_cap,
        SINKS=heads.sinks is not None,
        STAGES=stages or (2 if size == 128 else 4),
        num_warps=4,
        **pdl(q.device),
    )
