"""Plain checkpoints that are quantized while they load, a layer at a time.

So the plain weights of a large model never have to fit whole. `int8` is not here: native kernels
pack all matrices in 8 bits by themselves (`kernels/cpu/native.py`). Next file: `select.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.kernels.formats import Grouped, quantize_fp8
from octavo.kernels.ops import Ops, PackedWeight
from octavo.quant.none import matrix
from octavo.weights.spec import ParamSpec, Part

LEVELS = 15  # of 4 bits, without the first


class OnlineFp8:
    """A QuantMethod: 8-bit floats with a scale a row, activations with one a token."""

    __slots__ = ("_dtype", "_ops")

    name = "fp8"
    by_rows = True

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self._ops = ops
        self._dtype = dtype

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """One plain matrix, half of whose bytes stay."""
        rows = sum(part.size for part in parts)
        kept = rows * in_features if self._ops.pack_fp8 else None
        return {
            "weight": matrix(self._dtype, in_features, parts, in_start, in_full, kept_bytes=kept)
        }

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Rounds each row by its largest value."""
        weight = quantize_fp8(params.pop("weight"))
        if self._ops.pack_fp8 is None:
            return self._ops.pack(weight.plain(self._dtype))
        return self._ops.pack_fp8(weight)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight, bias, None)


class OnlineInt4:
    """A QuantMethod: 4 bits with a scale and a zero for each group of columns of a row."""

    __slots__ = ("_dtype", "_group", "_ops")

    name = "int4"
    by_rows = True

    def __init__(self, ops: Ops, dtype: torch.dtype, group: int) -> None:
        self._ops = ops
        self._dtype = dtype
        self._group = group

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """One plain matrix. Raises ConfigError if groups do not divide its columns."""
        if in_features % self._group:
            raise ConfigError(
                f"int4 weights have groups of {self._group} columns, which do not divide the "
                f"{in_features} of a matrix of this model; use --quantization int8",
                "quantization",
            )
        rows = sum(part.size for part in parts)
        size = rows * in_features
        kept = size * 5 // 8 if self._ops.pack_grouped else size * self._dtype.itemsize
        return {
            # In f32, in which blocks of 4 bits of a file are found again as they are.
            "weight": matrix(torch.float32, in_features, parts, in_start, in_full, kept_bytes=kept)
        }

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Rounds each group to 16 steps from its least to its largest value."""
        weight = quantize_groups(params.pop("weight"), self._group)
        if self._ops.pack_grouped is None:
            return self._ops.pack(weight.plain(self._dtype))
        return self._ops.pack_grouped(weight)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight, bias, None)


def quantize_groups(weight: Tensor, group: int, *, whole_zero: bool = False) -> Grouped:
    """[N, K] -> 4 bits. 0 is among the steps' range; with `whole_zero` it is one of the steps."""
    rows = weight.shape[0]
    values = weight.float().view(rows, -1, group)
    least = values.amin(dim=-1)
    largest = values.amax(dim=-1)
    if whole_zero:
        least, largest = least.clamp(max=0), largest.clamp(min=0)
    span = (largest - least) / LEVELS
    # A group of equal values is its zero point alone, one step of their size away.
    flat = torch.where(least != 0, least.abs(), torch.ones_like(least))
    scale = torch.where(span > 0, span, flat)
    zero = -least / scale
    if whole_zero:
        zero = zero.round().clamp(0, LEVELS)
    codes = (values / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, LEVELS)
    return Grouped(codes.to(torch.uint8).view(rows, -1), scale, zero, group)
