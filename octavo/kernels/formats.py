"""Quantized weights as the kernels' `pack` functions take them, whatever the checkpoint's form.

    Grouped   small integers, with a scale and a zero for each group of columns of a row
    Fp8       8-bit floats, with a scale a row or a block

A method of `octavo/quant` makes one of them once at load; a table of kernels repacks it
(`Ops.pack_grouped`, `Ops.pack_fp8`) or, where it has no kernel, multiplies plain weights made by
`plain`. Not for: checkpoints' own layouts (`octavo/quant/words.py`). Next file: `ops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
BLOCK = 128  # columns, and rows in checkpoints, that share a scale


@dataclass(frozen=True, slots=True)
class Grouped:
    """w[n, k] = scale[n, g] * (codes[n, k] - zero[n, g]), where g = k // group.

    With `order` the columns are not the input's own: column k is multiplied by x[:, order[k]].
    """

    codes: Tensor  # u8[N, K], 0 to 15
    scale: Tensor  # f32[N, K / group]
    zero: Tensor  # f32[N, K / group]
    group: int
    order: Tensor | None = None  # i64[K]

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that is meant, columns in the input's order."""
        rows, columns = self.codes.shape
        values = self.codes.view(rows, -1, self.group).float()
        values = ((values - self.zero.unsqueeze(-1)) * self.scale.unsqueeze(-1)).to(dtype)
        flat = values.view(rows, columns)
        if self.order is None:
            return flat
        return torch.empty_like(flat).index_copy_(1, self.order, flat)


@dataclass(frozen=True, slots=True)
class Fp8:
    """w[n, k] = data[n, k] * scale[n], or scale[n, k // BLOCK].

    `input_scale`: activations are rounded to FP8 divided by this, whatever they are. None: by a
    scale that each token, or with blocks each BLOCK values of one, gets by its largest.
    """

    data: Tensor  # e4m3[N, K]
    scale: Tensor  # f32[N], or f32[N, K / BLOCK] rounded up
    input_scale: float | None = None

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] that is meant."""
        scale = self.scale
        if scale.dim() == 1:
            scale = scale.unsqueeze(1)
        else:
            scale = scale.repeat_interleave(BLOCK, 1)[:, : self.data.shape[1]]
        return (self.data.float() * scale).to(dtype)


def to_fp8(values: Tensor, scale: Tensor) -> Tensor:
    """values / scale, rounded to nearest; what is out of range becomes the largest number."""
    return (values.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def quantize_fp8(weight: Tensor) -> Fp8:
    """[N, K] -> 8-bit floats, a scale for each row by its largest value."""
    top = weight.abs().amax(dim=1).float()
    scale = torch.where(top > 0, top / FP8_MAX, torch.ones_like(top))
    return Fp8(to_fp8(weight, scale.unsqueeze(1)), scale)
