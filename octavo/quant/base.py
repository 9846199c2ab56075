"""The seam for weight formats: which parameters a linear layer has, and how it multiplies by them.

Three methods. Sharding lives in `weights/spec.py`, so a new scheme writes no loader code.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.kernels.ops import PackedWeight
from octavo.weights.spec import ParamSpec, Part


class QuantMethod(Protocol):
    """How weights of linear layers are stored and used."""

    name: str

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """Parameters that the checkpoint fills, by name ("weight", "scale", ...)."""

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Once, after loading: repacks for the kernels; the raw tensors may be dropped."""

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
