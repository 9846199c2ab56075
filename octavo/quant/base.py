"""The seam for weight formats: which parameters a linear layer has, and how it multiplies by them.

Three methods. What is cut over ranks, and where, is said by the ParamSpecs of `params`, so a new
scheme writes no loader code. `finish` turns what was loaded into one of the two forms of
`kernels/formats.py`, or into plain weights, and hands it to the kernels; most methods then multiply
by `Ops.linear`. Next file: `none.py`, then `select.py`, which gives each layer its method.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.kernels.ops import PackedWeight
from octavo.weights.spec import ParamSpec, Part


class QuantMethod(Protocol):
    """How weights of linear layers are stored and used."""

    name: str
    by_rows: bool  # every parameter has the weight's rows along its first dimension

    def params(
        self, in_features: int, parts: tuple[Part, ...], in_start: int, in_full: int
    ) -> dict[str, ParamSpec]:
        """Parameters that the checkpoint fills, by their suffix there ("weight", "scales", ...).

        Raises ConfigError if the scheme cannot be cut as the parts say.
        """

    def finish(self, params: dict[str, Tensor]) -> PackedWeight:
        """Once, after loading: repacks for the kernels; the raw tensors may be dropped."""

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [T, in] -> [T, out]."""
