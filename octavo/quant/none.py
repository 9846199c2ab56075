"""Unquantized: weights in the dtype of the activations, multiplied as they are.

The model for other methods of this folder: read it first when adding one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.ops import Ops, PackedWeight
from octavo.weights.spec import ParamSpec, Part


class Unquantized:
    """A QuantMethod with one parameter, "weight" [rows, columns]."""

    __slots__ = ("_dtype", "_ops")

    name = "none"
    by_rows = True

    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self._ops = ops
        self._dtype = dtype

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """One matrix, cut in either dimension."""
        return {"weight": matrix(self._dtype, in_features, parts, in_start, in_full)}

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Hands the matrix to the kernels' own packing."""
        return self._ops.pack(params["weight"])

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight, bias, None)


def matrix(
    dtype: torch.dtype,
    in_features: int,
    parts: tuple[Part, ...],
    in_start: int,
    in_full: int,
    *,
    kept_bytes: int | None = None,
) -> ParamSpec:
    """A whole weight [rows, columns], cut in either dimension."""
    rows = sum(part.size for part in parts)
    return ParamSpec(
        (rows, in_features),
        dtype,
        parts,
        out_dim=0,
        in_dim=1,
        in_start=in_start,
        in_full=in_full,
        kept_bytes=kept_bytes,
    )
