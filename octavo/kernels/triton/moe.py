"""Routed experts on a GPU: which of the products serves how many tokens.

Weights stay as they are, [E, N, K]. Nothing is asked of the device, so all can be captured.
Next file: `routing.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.ops import PackedWeight
from octavo.kernels.triton import experts as products
from octavo.kernels.triton.activation import silu_mul
from octavo.kernels.triton.grouped import can_serve, grouped
from octavo.kernels.triton.pairs import Shared, Sorted
from octavo.kernels.triton.routing import gather, sort

MANY = 1536  # tokens: from here on the library's grouped products are faster
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
        if tokens > MANY or gate_up.layout != "plain" or down.layout != "plain":
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
        shared = Shared(gate_up.data, down.data, down.columns // self._down.shape[2])
        return self._product(x, experts, weights, shared)

    def _product(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Shared | None
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
            found = self._by_library(x, chosen, weights)
        else:
            count = down.shape[0]
            rows = tile_rows(tokens * top, count) if x.dtype.itemsize == 2 else 16
            number = 0 if shared is None else shared.number
            order = sort(x, chosen, weights, count=count, tile_rows=rows, copy=fast, shared=number)
            found = products.sum_of(self._in_tiles(x, order, rows, shared), order)
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

    def _by_library(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        count = self._down.shape[0]
        order = sort(x, experts, weights, count=count, tile_rows=MOST_ROWS, copy=False)
        rows = gather(x, order)
        inner = functional.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=order.ends)
        inner = silu_mul(inner)
        parts = functional.grouped_mm(inner, self._down.transpose(1, 2), offs=order.ends)
        found: Tensor = products.sum_of(parts, order, weighed=True)
        return found


def _is_fast(gate_up: Tensor, down: Tensor) -> bool:
    return can_serve(gate_up) and can_serve(down)


def tile_rows(pairs: int, count: int) -> int:
    """Rows of a tile, for so many pairs of `count` experts: few experts should need two tiles."""
    mean = pairs / count
    return next((rows for rows in (16, 32, 64) if 1.5 * mean + 4 <= rows), MOST_ROWS)
