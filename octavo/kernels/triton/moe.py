"""Routed experts on a GPU: which of the products serves how many tokens.

Weights stay as they are, [E, N, K]. Nothing is asked of the device, so all can be captured.
Next file: `routing.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.gpu_products import plain, plain_silu
from octavo.kernels.ops import ClampedForm, PackedWeight
from octavo.kernels.triton import experts as products
from octavo.kernels.triton.activation import silu_mul
from octavo.kernels.triton.grouped import can_serve, grouped
from octavo.kernels.triton.launch import power_of_2
from octavo.kernels.triton.pairs import Shared, Sorted
from octavo.kernels.triton.routing import gather, sort, sort_many

MANY = 1536  # tokens: from here on the library's grouped products are faster
FEW = 64  # tokens: up to here shared experts are tiles among the others
MOST_ROWS = 128  # of a tile


class TritonExperts:
    """An ExpertProduct, and a JoiningExperts, over stacked weights."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [E, 2 * I, H], down [E, H, I]."""
        self._gate_up = gate_up.contiguous()
        self._down = down.contiguous()

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, /) -> Tensor:
        """x [T, H], experts [T, k], weights f32[T, k] -> [T, H]."""
        return self._product(x, experts, weights, None)

    def joins(self, tokens: int, gate_up: PackedWeight, down: PackedWeight) -> bool:
        """See `JoiningExperts`: shared experts as wide as whole routed ones, on Hopper."""
        if gate_up.layout != "plain" or down.layout != "plain":
            return False
        if gate_up.data.dtype != self._down.dtype or down.columns % self._down.shape[2]:
            return False
        return _is_fast(self._gate_up, self._down)

    def joined(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
    ) -> Tensor:
        """See `JoiningExperts`."""
        if len(x) > FEW:
            base: Tensor = plain(plain_silu(x, gate_up.data, None), down.data, None, None)
            return self._product(x, experts, weights, None, base)
        shared = Shared(gate_up.data, down.data, down.columns // self._down.shape[2])
        return self._product(x, experts, weights, shared)

    def _product(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Shared | None,
        base: Tensor | None = None,
    ) -> Tensor:
        gate_up, down = self._gate_up, self._down
        tokens, top = experts.shape
        if tokens == 0:
            return torch.zeros_like(x)
        x, chosen = x.contiguous(), experts.to(torch.int32).contiguous()
        weights = weights.contiguous()
        fast = _is_fast(gate_up, down)
        if tokens == 1 and x.dtype.itemsize == 2:
            found: Tensor = products.one_token(x, gate_up, down, chosen, weights, shared)
        elif fast and tokens > MANY:
            found = self._by_library(x, chosen, weights, base)
        else:
            count = down.shape[0]
            rows = 16 if x.dtype.itemsize == 4 else tile_rows(tokens * top, count)
            if shared is not None:  # of which one tile should do for all tokens
                rows = max(16, power_of_2(tokens))
            number = 0 if shared is None else shared.number
            order = sort(x, chosen, weights, count=count, tile_rows=rows, copy=fast, shared=number)
            found = products.sum_of(self._in_tiles(x, order, rows, shared), order, base)
        return found

    def _in_tiles(self, x: Tensor, order: Sorted, rows: int, shared: Shared | None) -> Tensor:
        """Weighed results [A, H] by place."""
        gate_up, down = self._gate_up, self._down
        if order.rows is not None:
            inner = grouped(
                order.rows, gate_up, order, tile_rows=rows, silu=True, own=x, shared=shared
            )
            return grouped(inner, down, order, tile_rows=rows, silu=False, shared=shared)
        inner = products.in_tiles(x, gate_up, order, tile_rows=rows, silu=True)
        found: Tensor = products.in_tiles(inner, down, order, tile_rows=rows, silu=False)
        return found

    def _by_library(
        self, x: Tensor, experts: Tensor, weights: Tensor, base: Tensor | None
    ) -> Tensor:
        order = sort_many(experts, weights, count=self._down.shape[0])
        rows = gather(x, order)
        inner = functional.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=order.ends)
        inner = silu_mul(inner)
        parts = functional.grouped_mm(inner, self._down.transpose(1, 2), offs=order.ends)
        found: Tensor = products.sum_of(parts, order, base, weighed=True)
        return found


class TritonClampedExperts:
    """An ExpertProduct for experts of `ClampedForm`, by the general kernel for tiles."""

    __slots__ = ("_down", "_form", "_gate_up")

    def __init__(self, gate_up: Tensor, down: Tensor, form: ClampedForm) -> None:
        """gate_up [E, 2 * I, H], down [E, H, I]."""
        self._gate_up = gate_up.contiguous()
        self._down = down.contiguous()
        self._form = form

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, /) -> Tensor:
        """x [T, H], experts [T, k], weights f32[T, k] -> [T, H]."""
        form, count = self._form, self._down.shape[0]
        tokens, top = experts.shape
        if tokens == 0:
            return torch.zeros_like(x)
        x, chosen = x.contiguous(), experts.to(torch.int32).contiguous()
        rows = 16 if x.dtype.itemsize == 4 else min(64, tile_rows(tokens * top, count))
        order = sort(x, chosen, weights.contiguous(), count=count, tile_rows=rows, copy=False)
        inner = products.in_tiles(
            x,
            self._gate_up,
            order,
            tile_rows=rows,
            silu=True,
            bias=form.gate_up_bias,
            clamp=(form.alpha, form.limit),
        )
        parts = products.in_tiles(
            inner, self._down, order, tile_rows=rows, silu=False, bias=form.down_bias
        )
        found: Tensor = products.sum_of(parts, order)
        return found


def _is_fast(gate_up: Tensor, down: Tensor) -> bool:
    return can_serve(gate_up) and can_serve(down)


def tile_rows(pairs: int, count: int) -> int:
    """Rows of a tile, for so many pairs of `count` experts: few experts should need two tiles."""
    mean = pairs / count
    return next((rows for rows in (16, 32, 64) if 1.25 * mean + 4 <= rows), MOST_ROWS)
