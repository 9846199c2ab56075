"""Paged attention of rows with one query each: one pass, split keys, or a list of pieces.

All heads that share a key head are rows of one product (grouped-query packing), so keys and values
are read once. Three forms, after PagedAttention (Kwon et al. 2023, arXiv:2309.06180) and
Flash-Decoding (Dao et al. 2023):

    single  one program a row and key head, no merge (v1)
    split   each row's keys in `splits` even pieces, merged by their log-sum-exp (v2): by the
            program that ends last, as a launch of its own would take longer
    list    pieces of equal length from a list made on the device each step, merged by a launch of
            its own: rows of very different lengths keep all processors busy

Lengths are read on the device alone, so a captured graph serves any lengths. A row of length 0 is
padding and gives zeros. Next file: `attention_pieces.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.attention_math import (
    LOG2_E,
    LOWEST,
    attend_block,
    load_block,
    page_offsets,
    weights_of,
    widen_pairs,
)
from octavo.kernels.triton.attention_newest import (
    Newest,
    newest_score,
    store_newest,
    turned,
    with_newest,
)
from octavo.kernels.triton.attention_pieces import Pieces, merge, merged_pieces, piece_of
from octavo.kernels.triton.launch import pdl, power_of_2
from octavo.kernels.triton.rotary import scaled

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SPLIT_CHUNK = 8  # pieces that are merged at once
MERGED_HEADS = 4  # by a program of the split form: their pieces are on their way together


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer asks of attention: sizes and rules."""

    num_heads: int
    scale: float  # of scores, that of an FP8 cache's keys included
    window: int = 0  # 0 is none
    soft_cap: float = 0.0
    sinks: Tensor | None = None  # f32[Q]
    value_scale: float = 1.0  # of an FP8 cache


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is cut: keys a block, warps a program, blocks in flight."""

    keys: int
    warps: int
    stages: int
    masked: bool = False  # what lies after a row's last key in its page is not read


@triton.jit
def _load_seen(
    first_ptr, offsets, visible, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr
):
    """As `load_block`; with MASKED, zeros for keys that are not visible, and memory is spared."""
    if MASKED:
        d = tl.arange(0, DP)
        inside = visible[:, None] & (d < D)[None, :]
        return tl.load(first_ptr + offsets[:, None] + d[None, :], mask=inside, other=0.0)
    return load_block(first_ptr, offsets, D, DP)


@triton.jit(
    do_not_specialize=["num_items", "splits", "table_stride"],
    do_not_specialize_on_alignment=["table_ptr", "lens_ptr", "positions_ptr", "slots_ptr"],
)
def decode_kernel(
    q_ptr,  # [R, Q, D], or with NEWEST [R, (Q + 2K) * D] as projected
    keys_ptr,  # [N, K, P, D]
    values_ptr,
    stored_ptr,  # the values in the cache's own dtype
    table_ptr,  # i32[R, B]
    lens_ptr,  # i32[R]
    items_ptr,  # i32[3, W], read if LIST
    sinks_ptr,  # f32[Q], read if SINKS
    out_ptr,  # [R, Q, D]
    partial_ptr,  # f32 [R * S or W, Q, D]
    lse_ptr,  # f32 [R * S or W, Q]
    arrived_ptr,  # i32[R, K]; zero before and after
    positions_ptr,  # i32[R]; this and the next four as of `rotary.py`, read if NEWEST
    slots_ptr,
    turns_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    key_factor,
    value_factor,
    q_stride,  # of a row
    scale,
    value_scale,
    page_stride,
    head_stride,
    table_stride,
    num_items,  # W
    splits,  # S; 1 is the single form
    Q: tl.constexpr,
    G: tl.constexpr,  # query heads a key head
    GP: tl.constexpr,  # G rounded up to a power of 2, 16 at least
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    LIST: tl.constexpr,
    SINKS: tl.constexpr,
    MASKED: tl.constexpr,
    WIDE: tl.constexpr,  # FP8 pages: arithmetic in f16
    PAIRS: tl.constexpr,  # values_ptr is of int16, two FP8 numbers each
    E4M3: tl.constexpr,
    CHUNK: tl.constexpr,  # splits that are merged at once
    HEADS: tl.constexpr,  # and of so many heads
    NEWEST: tl.constexpr,  # the newest tokens are neither turned nor stored
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a piece and key head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(1)
    if LIST:
        piece = tl.program_id(0)
        row = tl.load(items_ptr + piece)
        if row < 0:
            return
        low = tl.load(items_ptr + num_items + piece) * BN
        high = tl.load(items_ptr + 2 * num_items + piece)
        length = tl.load(lens_ptr + row)
        begin = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    else:
        row = tl.program_id(0)
        piece = row * splits + tl.program_id(2)
        length = tl.load(lens_ptr + row)
        begin, low, high = piece_of(length, tl.program_id(2), splits, BN, WINDOW)
    row_table = table_ptr + row.to(tl.int64) * table_stride
    key_ptr = keys_ptr + head.to(tl.int64) * head_stride
    if PAIRS:
        value_ptr = values_ptr + head.to(tl.int64) * (head_stride // 2)
    else:
        value_ptr = values_ptr + head.to(tl.int64) * head_stride
    owns = False
    if NEWEST:
        owns = (high == length) & (low < high)
        high = tl.minimum(high, length - 1)
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    inside = (g < G)[:, None] & (d < D)[None, :]
    at = (head * G + g)[:, None] * D + d[None, :]
    q_ptr += row.to(tl.int64) * q_stride
    if NEWEST:
        now = tl.load(positions_ptr + row)
        own_heads = head * G + tl.minimum(g, G - 1)
        q = turned(q_ptr, own_heads, now, q_norm_ptr, turns_ptr, eps, D, DP, NORM, ROPE)
        q = tl.where((g < G)[:, None], q, tl.zeros_like(q))
    else:
        q = tl.load(q_ptr + at, mask=inside, other=0.0)
    if WIDE:
        q = q.to(tl.float16)
    best = tl.full([GP], LOWEST, tl.float32)
    total = tl.zeros([GP], tl.float32)
    if SINKS and not LIST:  # noqa: SIM102 - the one is known when compiled, the other is not
        if splits == 1:
            sink = tl.load(sinks_ptr + head * G + g, mask=g < G, other=0.0)
            best = tl.where(g < G, sink * LOG2_E, best)
            total = tl.where(g < G, 1.0, total)
    if PAIRS:
        acc = tl.zeros([GP, DP // 2], tl.float32)  # even d
    else:
        acc = tl.zeros([GP, DP], tl.float32)
    odd = acc  # odd d, if PAIRS
    for start in range(low, high, BN):
        position = start + tl.arange(0, BN)
        offsets = page_offsets(row_table, start, high, page_stride, P, BN, D)
        visible = position < high
        seen = visible
        if WINDOW > 0:
            visible = visible & (position >= begin)
        k = _load_seen(key_ptr, offsets, seen, D, DP, MASKED)
        if PAIRS:
            v = _load_seen(value_ptr, offsets // 2, seen, D // 2, DP // 2, MASKED)
            weight, shrink, total, best = weights_of(
                total, best, q, k, visible[None, :], scale, CAP, True
            )
            v_even, v_odd = widen_pairs(v, E4M3)
            weight = weight.to(tl.float16)
            acc = tl.dot(weight, v_even, acc * shrink[:, None])
            odd = tl.dot(weight, v_odd, odd * shrink[:, None])
        else:
            v = _load_seen(value_ptr, offsets, seen, D, DP, MASKED)
            acc, total, best = attend_block(
                acc, total, best, q, k, v, visible[None, :], scale, CAP, True
            )
    if PAIRS:
        acc = tl.interleave(acc, odd)
    if NEWEST:
        k_first = q_ptr + Q * D
        own = head + tl.arange(0, 1)
        k = turned(k_first, own, now, k_norm_ptr, turns_ptr, eps, D, DP, NORM, ROPE)
        k = scaled(k, key_factor, SCALED).to(keys_ptr.dtype.element_ty)
        v_first = k_first + (Q // G + head) * D
        v = tl.load(v_first + d, mask=d < D, other=0.0)
        v = scaled(v, value_factor, SCALED).to(keys_ptr.dtype.element_ty).to(tl.float32)
        score = newest_score(q, k.to(q.dtype), scale, CAP)
        new_best, total, weight = with_newest(best, total, score, owns, g < G)
        acc = acc * tl.exp2(best - new_best)[:, None] + weight[:, None] * v[None, :]
        best = new_best
        if owns:
            store_newest(
                k, v_first, keys_ptr, stored_ptr, slots_ptr, row, head,
                value_factor, page_stride, head_stride, P, D, DP, SCALED,
            )  # fmt: skip
    out = acc * (value_scale / tl.maximum(total, 1e-30))[:, None]
    out_ptr += row.to(tl.int64) * Q * D
    if LIST:
        alone = False
    else:
        alone = splits == 1
    if alone:
        tl.store(out_ptr + at, out, mask=inside)
    else:
        at_piece = piece.to(tl.int64) * Q
        tl.store(partial_ptr + at_piece * D + at, out, mask=inside, cache_modifier=".cg")
        lse = tl.where(total > 0, best + tl.log2(tl.maximum(total, 1e-30)), LOWEST)
        where = lse_ptr + at_piece + head * G + g
        tl.store(where, lse, mask=g < G, cache_modifier=".cg")
        if not LIST:
            tl.debug_barrier()  # all of this program's stores come before its arrival
            mine = arrived_ptr + row * (Q // G) + head
            if tl.atomic_add(mine, 1, sem="acq_rel") == splits - 1:
                tl.store(mine, 0)
                for start in range(0, G, HEADS):
                    h = start + tl.arange(0, HEADS)
                    # Beyond the group a head is read again, and not stored.
                    query = head * G + tl.minimum(h, G - 1)
                    merged = merged_pieces(
                        partial_ptr, lse_ptr, sinks_ptr, row * splits, splits, query,
                        Q, D, DP, CHUNK, SINKS,
                    )  # fmt: skip
                    kept = (h < G)[:, None] & (d < D)[None, :]
                    tl.store(out_ptr + query[:, None] * D + d[None, :], merged, mask=kept)


def decode(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lens: Tensor,
    heads: Heads,
    pieces: Pieces,
    tile: Tile,
    out: Tensor,
    *,
    newest: Newest | None = None,
) -> None:
    """Attention of q [R, Q, D] over pages [N, K, P, D] by table i32[R, B] into out [R, Q, D].

    `lens` i32[R] counts the keys of each row, the newest included; they are stored already.
    With `newest` that is done here, queries come from it, and `q` is not read; no row may read what
    another one stores.
    """
    rows, num_heads, size = out.shape
    _, kv_heads, page, _ = keys.shape
    listed = pieces.splits == 0
    num_items = pieces.items.shape[1]
    grid = (num_items, kv_heads) if listed else (rows, kv_heads, pieces.splits)
    group = num_heads // kv_heads
    early = pdl(q.device)
    pairs = keys.dtype in FP8 and early["PDL"]
    sinks = pieces.lse if heads.sinks is None else heads.sinks
    new = newest or _stored(q, lens)
    decode_kernel[grid](
        new.qkv,
        keys,
        values.view(torch.int16) if pairs else values,
        values,
        table,
        lens,
        pieces.items,
        sinks,
        out,
        pieces.partial,
        pieces.lse,
        pieces.arrived,
        new.positions,
        new.slots,
        lens if new.cos_sin is None else new.cos_sin,
        q if new.query_norm is None else new.query_norm,
        q if new.key_norm is None else new.key_norm,
        new.eps,
        1.0 / new.key_scale,
        1.0 / new.value_scale,
        new.qkv.stride(0),
        heads.scale,
        heads.value_scale,
        keys.stride(0),
        keys.stride(1),
        table.stride(0),
        num_items,
        max(1, pieces.splits),
        Q=num_heads,
        G=group,
        GP=max(16, power_of_2(group)),
        D=size,
        DP=power_of_2(size),
        P=page,
        BN=tile.keys,
        WINDOW=heads.window,
        CAP=heads.soft_cap,
        LIST=listed,
        SINKS=heads.sinks is not None,
        MASKED=tile.masked,
        WIDE=keys.dtype in FP8,
        PAIRS=pairs,
        E4M3=keys.dtype == torch.float8_e4m3fn,
        CHUNK=SPLIT_CHUNK,
        HEADS=min(MERGED_HEADS, power_of_2(group)),
        NEWEST=newest is not None,
        NORM=new.query_norm is not None,
        ROPE=new.cos_sin is not None,
        SCALED=(new.key_scale, new.value_scale) != (1.0, 1.0),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **early,
    )
    if listed:
        merge(pieces, heads.sinks, out)


def _stored(q: Tensor, ints: Tensor) -> Newest:
    """Newest tokens that are turned and stored already: nothing of it is read but q."""
    return Newest(q, ints, ints, None, None, None, 0.0, 1.0, 1.0)
