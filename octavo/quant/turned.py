"""Quantized weights whose rows a layer wants in another order: made plain, turned, and packed so.

Only for schemes whose tensors do not all have the weight's rows (`QuantMethod.by_rows`); of the
others each tensor is turned as it is loaded. Next file: `select.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from octavo.kernels.ops import PackedWeight
from octavo.quant.base import QuantMethod
from octavo.weights.spec import ParamSpec, Part


class Turned:
    """A QuantMethod over the parameters of `unpacked`, whose weights come out plain."""

    __slots__ = ("_plain", "_turn", "_unpacked", "name")

    by_rows = True

    def __init__(
        self, unpacked: QuantMethod, turn: Callable[[Tensor], Tensor], plain: QuantMethod
    ) -> None:
        self.name = unpacked.name
        self._unpacked = unpacked
        self._turn = turn
        self._plain = plain

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """As the scheme's."""
        return self._unpacked.params(in_features, parts, in_start, in_full)

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """The weight that is meant, its rows turned, packed as a plain one."""
        weight = self._unpacked.finish(params).data
        return self._plain.finish({"weight": self._turn(weight)})

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._plain.apply(x, weight, bias)
