"""Routed experts on a GPU: which of the products serves how many tokens.

Weights stay as they are, [E, N, K]. Nothing is asked of the device, so all can be captured.
Next file: `routing.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.triton import experts as products
from octavo.kernels.triton.activation import silu_mul
from octavo.kernels.triton.grouped import can_serve, grouped
from octavo.kernels.triton.routing import sort

MANY = 1536  # tokens: from here on the library's grouped products are faster
MOST_ROWS = 128  # of a tile


class TritonExperts:
    """An ExpertProduct, and an AddingExperts, over stacked weights."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [E, 2 * I, H], down [E, H, I]."""
        self._gate_up = gate_up.contiguous()
        self._down = down.contiguous()

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts [T, k], weights f32[T, k] -> [T, H]."""
        return self.add(x, experts, weights, None)

    def add(self, x: Tensor, experts: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
        """The same plus `base` [T, H]."""
        gate_up, down = self._gate_up, self._down
        tokens, top = experts.shape
        if tokens == 0:
            return torch.zeros_like(x)
        x, chosen = x.contiguous(), experts.to(torch.int32).contiguous()
        weights = weights.contiguous()
        if tokens == 1 and x.dtype.itemsize == 2:
            return products.one_token(x, gate_up, down, chosen, weights, base)
        count = down.shape[0]
        fast = can_serve(x, gate_up) and can_serve(x, down)
        if fast and tokens > MANY:
            return self._by_library(x, chosen, weights, base)
        rows = tile_rows(tokens * top, count) if fast or x.dtype.itemsize == 2 else 16
        found = sort(x, chosen, weights, count=count, tile_rows=rows, copy=fast)
        if fast:
            assert found.rows is not None
            inner = grouped(found.rows, gate_up, found, tile_rows=rows, silu=True)
            parts = grouped(inner, down, found, tile_rows=rows, silu=False)
        else:
            inner = products.in_tiles(x, gate_up, found, tile_rows=rows, silu=True, top=top)
            parts = products.in_tiles(inner, down, found, tile_rows=rows, silu=False, top=top)
        return products.sum_of(parts, found, top, base)

    def _by_library(
        self, x: Tensor, experts: Tensor, weights: Tensor, base: Tensor | None
    ) -> Tensor:
        top = experts.shape[1]
        count = self._down.shape[0]
        found = sort(x, experts, weights, count=count, tile_rows=MOST_ROWS, copy=False)
        rows = x.index_select(0, found.order // top)
        inner = functional.grouped_mm(rows, self._gate_up.transpose(1, 2), offs=found.ends)
        parts = functional.grouped_mm(silu_mul(inner), self._down.transpose(1, 2), offs=found.ends)
        return products.sum_of(parts, found, top, base, weights)


def tile_rows(pairs: int, count: int) -> int:
    """Rows of a tile, for so many pairs of `count` experts: few experts should need two tiles."""
    mean = pairs / count
    return next((rows for rows in (16, 32, 64) if 1.5 * mean + 4 <= rows), MOST_ROWS)
