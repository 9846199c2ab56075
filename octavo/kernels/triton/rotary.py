"""Rotary positions, alone or with head norms and the write of keys and values into pages.

`rope_store` is what a step uses: one launch takes the output of the QKV projection, normalizes
heads where the model does, rotates queries and keys, and stores keys and values in the cache's
own dtype. Rotation pairs dimension i with i + D/2 (`octavo/layers/rope.py`).

Attention reads whole blocks of cells, also those after a row's last key, and gives them no weight;
but 0 times NaN is NaN, and a page may hold what its last owner left. So whoever is first to write
into a page, or writes several of its cells in a step, also clears the values of the cells after.
Next file: `activation.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.launch import divide_up, pdl, power_of_2


@triton.jit
def rope_kernel(
    q_ptr,  # [T, Q, D]
    k_ptr,  # [T, K, D]
    positions_ptr,  # i32[T]
    table_ptr,  # f32[max_len, D], cos half then sin half
    q_out_ptr,
    k_out_ptr,
    Q: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2 rounded up to a power of 2
    PDL: tl.constexpr,
):
    """One program a token and head; query heads first, then key heads."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF)
    inside = pair < D // 2
    row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * D
    cos = tl.load(row + pair, mask=inside, other=0.0)
    sin = tl.load(row + D // 2 + pair, mask=inside, other=0.0)
    if head < Q:
        source = q_ptr + (token * Q + head) * D
        target = q_out_ptr + (token * Q + head) * D
    else:
        source = k_ptr + (token * K + head - Q) * D
        target = k_out_ptr + (token * K + head - Q) * D
    first = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + D // 2 + pair, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + pair, first * cos - second * sin, mask=inside)
    tl.store(target + D // 2 + pair, second * cos + first * sin, mask=inside)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Q, D], k [T, K, D], positions i32[T], table f32[max_len, D] -> both rotated."""
    q, k = q.contiguous(), k.contiguous()
    tokens, heads, size = q.shape
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    if tokens:
        rope_kernel[(tokens, heads + k.shape[1])](
            q,
            k,
            positions,
            cos_sin,
            q_out,
            k_out,
            Q=heads,
            K=k.shape[1],
            D=size,
            HALF=power_of_2(size // 2),
            num_warps=1,
            **pdl(q.device),
        )
    return q_out, k_out


@triton.jit
def scaled(x, factor, SCALED: tl.constexpr):
    if SCALED:
        return x.to(tl.float32) * factor
    else:
        return x


@triton.jit
def clear_after(
    values_ptr,
    slots_ptr,
    token,
    slot,
    tokens,
    at,
    P: tl.constexpr,
    D: tl.constexpr,
    CELLS: tl.constexpr,
    DP: tl.constexpr,
):
    """Zeros after cell `at` to the page's end, if `token` is the page's last one of this step.

    Tokens that add a cell to a page whose rest is clear already have nothing to do.
    """
    offset = slot % P
    following = tl.load(slots_ptr + token + 1, mask=token + 1 < tokens, other=-1)
    before = tl.load(slots_ptr + token - 1, mask=token > 0, other=-2)
    is_last = (following != slot + 1) | (offset + 1 == P)
    if is_last & ((offset == 0) | (before == slot - 1)):
        d = tl.arange(0, DP)
        for start in range(1, P - offset, CELLS):
            cell = start + tl.arange(0, CELLS)
            where = at + cell[:, None] * D + d[None, :]
            inside = (offset + cell < P)[:, None] & (d < D)[None, :]
            zeros = tl.zeros([CELLS, DP], tl.float32).to(values_ptr.dtype.element_ty)
            tl.store(values_ptr + where, zeros, mask=inside)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def rope_store_kernel(
    qkv_ptr,  # [T, (Q + 2K) * D]
    q_norm_ptr,  # [D], read if NORM
    k_norm_ptr,
    positions_ptr,  # i32[T]
    slots_ptr,  # i32[T], below 0: the token is padding and is not stored
    table_ptr,  # f32[max_len, D]
    q_out_ptr,  # [T, Q, D]
    keys_ptr,  # [N, K, P, D]
    values_ptr,
    tokens,
    eps,
    key_factor,  # 1 / scale of an FP8 cache, read if SCALED
    value_factor,
    qkv_stride,
    page_stride,
    head_stride,
    Q: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    HALF: tl.constexpr,  # D / 2 rounded up to a power of 2
    HEADS: tl.constexpr,  # of a program
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and HEADS heads of one kind: queries, then keys, then values."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    Q_BLOCKS: tl.constexpr = (Q + HEADS - 1) // HEADS
    K_BLOCKS: tl.constexpr = (K + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    of_query = block < Q_BLOCKS
    of_value = block >= Q_BLOCKS + K_BLOCKS
    if of_query:
        first_head = block * HEADS
        column = first_head * D
        count = Q
    elif of_value:
        first_head = (block - Q_BLOCKS - K_BLOCKS) * HEADS
        column = (Q + K + first_head) * D
        count = K
    else:
        first_head = (block - Q_BLOCKS) * HEADS
        column = (Q + first_head) * D
        count = K
    h = tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    in_head = pair < D // 2
    inside = (first_head + h < count)[:, None] & in_head[None, :]
    at = h[:, None] * D + pair[None, :]
    source = qkv_ptr + token * qkv_stride + column + at
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + D // 2, mask=inside, other=0.0)
    if not of_value and (NORM or ROPE):
        dtype = first.dtype
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1)
            scale = tl.rsqrt(squares / D + eps)[:, None]
            weight_ptr = q_norm_ptr if of_query else k_norm_ptr
            weight_first = tl.load(weight_ptr + pair, mask=in_head, other=0.0).to(tl.float32)
            weight_second = tl.load(weight_ptr + D // 2 + pair, mask=in_head, other=0.0)
            # Rounded as the separate norm rounds it, so that both paths agree.
            wide_first = (wide_first * scale * weight_first[None, :]).to(dtype).to(tl.float32)
            wide_second = wide_second * scale * weight_second.to(tl.float32)[None, :]
            wide_second = wide_second.to(dtype).to(tl.float32)
        if ROPE:
            row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * D
            cos = tl.load(row + pair, mask=in_head, other=0.0)[None, :]
            sin = tl.load(row + D // 2 + pair, mask=in_head, other=0.0)[None, :]
            turned = wide_first * cos - wide_second * sin
            wide_second = wide_second * cos + wide_first * sin
            wide_first = turned
        first, second = wide_first.to(dtype), wide_second.to(dtype)
    if of_query:
        target = q_out_ptr + (token * Q + first_head) * D + at
        tl.store(target, first, mask=inside)
        tl.store(target + D // 2, second, mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            cell = (slot // P).to(tl.int64) * page_stride + (slot % P) * D
            target = values_ptr if of_value else keys_ptr
            target += cell + (first_head + h[:, None]) * head_stride + pair[None, :]
            element = keys_ptr.dtype.element_ty
            factor = value_factor if of_value else key_factor
            tl.store(target, scaled(first, factor, SCALED).to(element), mask=inside)
            tl.store(target + D // 2, scaled(second, factor, SCALED).to(element), mask=inside)
            if of_value:
                for head in range(first_head, tl.minimum(first_head + HEADS, K)):
                    cell_of_head = cell + head * head_stride
                    clear_after(
                        values_ptr, slots_ptr, token, slot, tokens, cell_of_head, P, D, 16, 2 * HALF
                    )


def rope_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    positions: Tensor,
    slot_map: Tensor,
    num_heads: int,
    cos_sin: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """QKV [T, (Q + 2K) * D], pages [N, K, P, D] -> queries [T, Q, D]; fills the pages.

    Head norms are used if given, rotation if `cos_sin` f32[max_len, D] is. A slot below 0 is
    padding: nothing is stored for it. Keys and values are stored divided by their scales.
    """
    _, kv_heads, page, size = keys.shape
    tokens = qkv.shape[0]
    q_out = qkv.new_empty(tokens, num_heads, size)
    if tokens == 0:
        return q_out
    heads = min(8, power_of_2(kv_heads))
    blocks = divide_up(num_heads, heads) + 2 * divide_up(kv_heads, heads)
    rope_store_kernel[(tokens, blocks)](
        qkv,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        positions,
        slot_map,
        positions if cos_sin is None else cos_sin,
        q_out,
        keys,
        values,
        tokens,
        eps,
        1.0 / key_scale,
        1.0 / value_scale,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        Q=num_heads,
        K=kv_heads,
        D=size,
        P=page,
        HALF=power_of_2(size // 2),
        HEADS=heads,
        NORM=query_norm is not None,
        ROPE=cos_sin is not None,
        SCALED=(key_scale, value_scale) != (1.0, 1.0),
        num_warps=2 if heads > 4 else 1,
        **pdl(qkv.device),
    )
    return q_out


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def store_kernel(
    k_ptr,  # [T, K, D]
    v_ptr,
    slots_ptr,  # i32[T]
    keys_ptr,  # [N, K, P, D]
    values_ptr,
    tokens,
    key_factor,  # 1 / scale of an FP8 cache, read if SCALED
    value_factor,
    page_stride,
    head_stride,
    K: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and key head."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < D
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        source = (token * K + head) * D + column
        at = (slot // P).to(tl.int64) * page_stride + head * head_stride + (slot % P) * D
        element = keys_ptr.dtype.element_ty
        k = scaled(tl.load(k_ptr + source, mask=inside), key_factor, SCALED)
        v = scaled(tl.load(v_ptr + source, mask=inside), value_factor, SCALED)
        tl.store(keys_ptr + at + column, k.to(element), mask=inside)
        tl.store(values_ptr + at + column, v.to(element), mask=inside)
        clear_after(values_ptr, slots_ptr, token, slot, tokens, at, P, D, 16, BLOCK)


def store(
    k: Tensor,
    v: Tensor,
    slot_map: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """k and v [T, K, D] into pages [N, K, P, D] at slots i32[T]; slots below 0 are skipped.

    Stored divided by the scales.
    """
    k, v = k.contiguous(), v.contiguous()
    tokens, heads, size = k.shape
    if tokens == 0:
        return
    store_kernel[(tokens, heads)](
        k,
        v,
        slot_map,
        keys,
        values,
        tokens,
        1.0 / key_scale,
        1.0 / value_scale,
        keys.stride(0),
        keys.stride(1),
        K=heads,
        D=size,
        P=keys.shape[2],
        SCALED=(key_scale, value_scale) != (1.0, 1.0),
        BLOCK=power_of_2(size),
        num_warps=1,
        **pdl(k.device),
    )
