"""Products of routed experts: gated MLPs of many experts over the tokens that chose them.

One token is multiplied by its experts' weights alone, at the speed of reading them. More tokens
are sorted by expert (`routing.py`) and multiplied in tiles of rows of one expert; each token's
results are then weighed and summed in the order in which its experts were chosen, so that what a
token gets does not depend on the others. Weights are read by the functions `_weight_*` alone.
Not for: Hopper's faster product of tiles (`grouped.py`). Next file: `grouped.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.triton.activation import silu
from octavo.kernels.triton.launch import divide_up, pdl, power_of_2
from octavo.kernels.triton.pairs import Shared, Sorted


@triton.jit
def one_gate_up_kernel(
    x_ptr,  # [H]
    weight_ptr,  # [E, 2 * I, H]
    shared_ptr,  # [2 * SHARED * I, H], read if SHARED
    experts_ptr,  # i32[TOP]
    out_ptr,  # [TOP + SHARED, I]
    size,  # I
    H: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program an expert of the token and BN of its outputs: silu(gate x) * up x."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    first = weight_ptr
    apart = size.to(tl.int64) * H  # from a gate's row to its up
    if pair < TOP:
        first += tl.load(experts_ptr + pair).to(tl.int64) * 2 * apart
    else:
        first = shared_ptr + (pair - TOP) * apart
        apart *= SHARED
    gate_ptr = first + row[:, None].to(tl.int64) * H + k[None, :]
    up_ptr = gate_ptr + apart
    gate = tl.zeros([BN, BK], tl.float32)
    up = tl.zeros([BN, BK], tl.float32)
    for start in range(0, H, BK):
        inside = (start + k < H)[None, :] & (row < size)[:, None]
        x = tl.load(x_ptr + start + k, mask=start + k < H, other=0.0).to(tl.float32)[None, :]
        gate += tl.load(gate_ptr + start, mask=inside, other=0.0).to(tl.float32) * x
        up += tl.load(up_ptr + start, mask=inside, other=0.0).to(tl.float32) * x
    dtype = x_ptr.dtype.element_ty
    # Rounded as the products alone would be.
    one = tl.sum(gate, 1).to(dtype).to(tl.float32)
    other = tl.sum(up, 1).to(dtype).to(tl.float32)
    tl.store(out_ptr + pair * size + row, silu(one) * other, mask=row < size)


@triton.jit
def one_down_kernel(
    x_ptr,  # [TOP + SHARED, I]
    weight_ptr,  # [E, H, I]
    shared_ptr,  # [H, SHARED * I], read if SHARED
    experts_ptr,  # i32[TOP]
    weights_ptr,  # f32[TOP]
    out_ptr,  # [H]
    size,  # H
    K: tl.constexpr,  # I
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program BN outputs: the weighted sum over the token's experts, and the shared ones."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], tl.float32)
    for pair in range(TOP):
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        scale = tl.load(weights_ptr + pair)
        at = weight_ptr + (expert * size + row[:, None]) * K + k[None, :]
        for start in range(0, K, BK):
            inside = (start + k < K)[None, :] & (row < size)[:, None]
            x = tl.load(x_ptr + pair * K + start + k, mask=start + k < K, other=0.0)
            weight = tl.load(at + start, mask=inside, other=0.0)
            acc += weight.to(tl.float32) * (x.to(tl.float32) * scale)[None, :]
    if SHARED > 0:
        at = shared_ptr + row[:, None].to(tl.int64) * (SHARED * K) + k[None, :]
        for start in range(0, SHARED * K, BK):
            left = start + k < SHARED * K
            x = tl.load(x_ptr + TOP * K + start + k, mask=left, other=0.0)
            weight = tl.load(at + start, mask=left[None, :] & (row < size)[:, None], other=0.0)
            acc += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out_ptr + row, tl.sum(acc, 1), mask=row < size)


def one_token(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Tensor,
    weights: Tensor,
    shared: Shared | None = None,
    *,
    tiles: tuple[tuple[int, int, int], tuple[int, int, int]] | None = None,
) -> Tensor:
    """x [1, H], gate_up [E, 2 * I, H], down [E, H, I], experts i32[1, k], weights f32[1, k].

    -> [1, H]. `tiles` are (outputs, columns, warps) of either product.
    """
    size = down.shape[2]
    hidden = x.shape[1]
    top = experts.shape[1]
    number = 0 if shared is None else shared.number
    inner = x.new_empty(top + number, size)
    out = torch.empty_like(x)
    first, second = tiles or one_tiles(hidden, size)
    one_gate_up_kernel[(divide_up(size, first[0]), top + number)](
        x,
        gate_up,
        gate_up if shared is None else shared.gate_up,
        experts,
        inner,
        size,
        H=hidden,
        TOP=top,
        SHARED=number,
        BN=first[0],
        BK=first[1],
        num_warps=first[2],
        **pdl(x.device),
    )
    one_down_kernel[(divide_up(hidden, second[0]),)](
        inner,
        down,
        down if shared is None else shared.down,
        experts,
        weights,
        out,
        hidden,
        K=size,
        TOP=top,
        SHARED=number,
        BN=second[0],
        BK=second[1],
        num_warps=second[2],
        **pdl(x.device),
    )
    return out


def one_tiles(hidden: int, size: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """(outputs, columns, warps) of the products of one token: the best of a dozen on an H200."""
    columns = min(2048, power_of_2(hidden))
    while columns > 256 and hidden % columns:
        columns //= 2
    inner = 256 if size % 512 and size % 256 == 0 else min(512, power_of_2(size))
    return (max(1, 2048 // columns), columns, 4), (2, inner, 4)


@triton.jit
def _weight_tile(at, k, stop, rows_inside):
    """A tile of weights [BN, BK] at pointers `at` to column 0; zeros beyond column `stop`."""
    return tl.load(at + k[None, :], mask=rows_inside[:, None] & (k < stop)[None, :], other=0.0)


@triton.jit(do_not_specialize=["room"])
def tiles_kernel(
    x_ptr,  # [T, K] if GATHER, else [A, K]
    weight_ptr,  # [E, N, K]; with SILU N is 2 * outputs
    order_ptr,  # i32[A], read if GATHER
    scale_ptr,  # f32[A], by place, read if not SILU
    tiles_ptr,  # see `Sorted`
    bias_ptr,  # [E, N], read if BIAS
    out_ptr,  # [A, outputs]
    room,
    outputs,
    alpha,  # of the clamped gate
    limit,
    K: tl.constexpr,
    TOP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SILU: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,  # experts of `ClampedForm`
    PDL: tl.constexpr,
):
    """One program a tile of rows of one expert and BN outputs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    if tile >= tl.load(tiles_ptr + 3 * room):
        return
    expert = tl.load(tiles_ptr + tile).to(tl.int64)
    place = tl.load(tiles_ptr + room + tile) + tl.arange(0, BM)
    inside = place < tl.load(tiles_ptr + 2 * room + tile)
    if GATHER:
        row = tl.load(order_ptr + place, mask=inside, other=0) // TOP
    else:
        row = place
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    in_n = n < outputs
    halves = 2 if SILU else 1
    at = weight_ptr + (expert * halves * outputs + n)[:, None] * K
    k = tl.arange(0, BK)
    source = x_ptr + row.to(tl.int64)[:, None] * K
    acc = tl.zeros([BM, BN], tl.float32)
    up = acc
    for start in range(0, K, BK):
        x = tl.load(
            source + (start + k)[None, :],
            mask=inside[:, None] & (start + k < K)[None, :],
            other=0.0,
        )
        weight = _weight_tile(at, start + k, K, in_n)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if SILU:
            weight = _weight_tile(at + outputs.to(tl.int64) * K, start + k, K, in_n)
            up = tl.dot(x, tl.trans(weight), up, input_precision="ieee")
    if BIAS:
        shift = bias_ptr + expert * halves * outputs + n
        acc += tl.load(shift, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if SILU:
            up += tl.load(shift + outputs, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if SILU:
        dtype = x_ptr.dtype.element_ty
        gate, up = acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        if BIAS:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
            acc = gate / (1.0 + tl.exp(-alpha * gate)) * up
        else:
            acc = silu(gate) * up
    else:
        acc *= tl.load(scale_ptr + place, mask=inside, other=0.0)[:, None]
    target = out_ptr + place.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(target, acc, mask=inside[:, None] & in_n[None, :])


def in_tiles(
    x: Tensor,
    weight: Tensor,
    found: Sorted,
    *,
    tile_rows: int,
    silu: bool,
    bias: Tensor | None = None,
    clamp: tuple[float, float] = (1.0, 0.0),
    tile: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """x [T, K] with `silu`, else [A, K] by place; weight [E, N, K] -> [A, N or N / 2] by place.

    Without `silu` results are multiplied by the pairs' weights. With `bias` [E, N] the gate is that
    of `ClampedForm`, `clamp` its alpha and limit. `tile` is (outputs, columns, warps, stages) of a
    program.
    """
    outputs = weight.shape[1] // (2 if silu else 1)
    pairs = found.order.shape[0]
    out = x.new_empty(pairs, outputs)
    wide = x.dtype.itemsize == 4
    columns, block, warps, stages = tile or ((32, 32, 4, 1) if wide else (64, 64, 4, 3))
    room = found.tiles.shape[0] // 3
    tiles_kernel[(divide_up(outputs, columns), room)](
        x,
        weight,
        found.order,
        found.weights,
        found.tiles,
        weight if bias is None else bias,
        out,
        room,
        outputs,
        *clamp,
        K=x.shape[1],
        TOP=found.pairs_a_token,
        BM=tile_rows,
        BN=columns,
        BK=block,
        SILU=silu,
        GATHER=silu,
        BIAS=bias is not None,
        num_warps=warps,
        num_stages=stages,
        **pdl(x.device),
    )
    return out


@triton.jit
def sum_kernel(
    parts_ptr,  # [A, H] by place
    place_ptr,  # i32[A]
    weights_ptr,  # f32[A] by place, read if WEIGHED
    base_ptr,  # [T, H], read if BASE
    out_ptr,  # [T, H]
    H: tl.constexpr,
    PAIRS: tl.constexpr,  # of a token
    BLOCK: tl.constexpr,
    BASE: tl.constexpr,
    WEIGHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token and BLOCK columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(PAIRS):
        place = tl.load(place_ptr + token * PAIRS + i).to(tl.int64)
        part = tl.load(parts_ptr + place * H + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHED:
            part *= tl.load(weights_ptr + place)
        total += part
    if BASE:
        total += tl.load(base_ptr + token * H + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + column, total, mask=inside)


def sum_of(
    parts: Tensor, found: Sorted, base: Tensor | None = None, *, weighed: bool = False
) -> Tensor:
    """Parts [A, H] by place -> [T, H], each token's summed, plus `base` [T, H].

    `weighed`: they are still to be multiplied by the pairs' weights.
    """
    size = parts.shape[1]
    out = parts.new_empty(found.tokens, size)
    block = min(1024, power_of_2(size))
    sum_kernel[(found.tokens, divide_up(size, block))](
        parts,
        found.place,
        found.weights,
        parts if base is None else base,
        out,
        H=size,
        PAIRS=found.pairs_a_token,
        BLOCK=block,
        BASE=base is not None,
        WEIGHED=weighed,
        num_warps=4,
        **pdl(parts.device),
    )
    return out
