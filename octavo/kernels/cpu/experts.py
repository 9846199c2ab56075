"""Routed experts in native code: a layer's weights in one piece of memory, one call a layer.

Not for: routing (`octavo/layers/experts.py`). The arithmetic is in `experts.h`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional

from octavo.kernels.cpu.arena import huge_region
from octavo.kernels.cpu.binding import ExpertShape, Library
from octavo.kernels.ops import ClampedForm

PANEL = 32  # columns of a packed panel


class NativeExperts:
    """An ExpertProduct: a token's result is the same bits alone and in any batch."""

    __slots__ = ("_code", "_dtype", "_library", "_shape", "_weights")

    def __init__(
        self,
        library: Library,
        code: int,
        gate_up: Tensor,
        down: Tensor,
        *,
        dtype: torch.dtype,
        form: ClampedForm | None = None,
    ) -> None:
        """gate_up [E, 2 * I, H], down [E, H, I]; `code` is that of the weights' type."""
        count, hidden, width = down.shape
        self._library = library
        self._code = code
        self._dtype = dtype
        rows = 2 * -(-width // PANEL) * PANEL
        first = self._bytes(rows, hidden)
        second = self._bytes(hidden, width)
        upper, lower = huge_region(count * first), huge_region(count * second)
        for expert in range(count):
            self._pack(in_turns(gate_up[expert].to(dtype)), upper[expert * first :])
            self._pack(down[expert].to(dtype).contiguous(), lower[expert * second :])
        self._shape = ExpertShape(
            count, hidden, width, 0, upper.data_ptr(), lower.data_ptr(), first, second
        )
        biases: tuple[Tensor, ...] = ()
        if form is not None:
            sides = form.gate_up_bias.to(dtype).view(2 * count, width)
            biases = (
                functional.pad(sides, (0, -width % PANEL)).contiguous(),
                form.down_bias.to(dtype).contiguous(),
            )
            self._shape.gate_up_bias, self._shape.down_bias = (one.data_ptr() for one in biases)
            self._shape.alpha, self._shape.limit = form.alpha, form.limit
        self._weights = (upper, lower, *biases)  # keeps the memory

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts i64[T, k], weights f32[T, k] -> [T, H]."""
        assert x.dtype == self._dtype, f"{x.dtype} given to kernels of {self._dtype}"
        assert x.shape[1] == self._shape.hidden
        assert experts.shape == weights.shape
        assert len(experts) == len(x)
        x = x.contiguous()
        chosen = experts.to(torch.int32).contiguous()
        weights = weights.to(torch.float32).contiguous()
        out = torch.empty_like(x)
        shape = self._shape
        shape.top = experts.shape[1]
        code = self._library.call.oct_experts(
            self._library.pool,
            self._code,
            ctypes.byref(shape),
            x.data_ptr(),
            len(x),
            chosen.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
        )
        if code:
            raise IndexError(f"an expert lies outside 0..{shape.experts - 1}")
        return out

    def _bytes(self, rows: int, columns: int) -> int:
        size: int = self._library.call.oct_packed_bytes(self._code, rows, columns)
        return -(-size // 64) * 64

    def _pack(self, weight: Tensor, to: Tensor) -> None:
        rows, columns = weight.shape
        self._library.call.oct_pack(
            self._code, weight.data_ptr(), columns, rows, columns, to.data_ptr()
        )


def in_turns(gate_up: Tensor) -> Tensor:
    """Rows [2 * I, H] of gate, then up -> 32 rows of gate, 32 of up, and so on, filled with 0."""
    sides = gate_up.view(2, -1, gate_up.shape[1])
    missing = -sides.shape[1] % PANEL
    if missing:
        sides = functional.pad(sides, (0, 0, 0, missing))
    panels = sides.view(2, -1, PANEL, gate_up.shape[1])
    return panels.transpose(0, 1).reshape(-1, gate_up.shape[1])
