"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, after Zhang and Sennrich 2019, arXiv:1910.07467.

Next file: `rope.py`.
"""

from __future__ import annotations

from torch import Tensor

from octavo.layers.build import Build
from octavo.layers.parameters import Parameters
from octavo.weights.spec import ParamSpec, Part


class RMSNorm:
    """One weight over the last dimension. `weight` exists after `finish`."""

    __slots__ = ("_offset", "_ops", "_parameters", "eps", "weight")

    weight: Tensor

    def __init__(self, build: Build, size: int, eps: float, *, offset: float = 0.0) -> None:
        """`offset` is added to the weight: some models store the distance from one."""
        self.eps = eps
        self._offset = offset
        self._ops = build.ops
        spec = ParamSpec((size,), build.dtype, (Part("", size, size, 0),))
        self._parameters = Parameters({"weight": spec})

    def param_specs(self) -> dict[str, ParamSpec]:
        """One vector, "weight"."""
        return self._parameters.specs

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes the vector; see `Layer`."""
        self._parameters.set(name, tensor)

    def finish(self) -> None:
        """Takes the weight into use; with its offset in f32, since bf16 has few digits near one."""
        weight = self._parameters.take()["weight"]
        self.weight = weight.float() + self._offset if self._offset else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def heads(self, x: Tensor) -> Tensor:
        """Each head by itself: x [T, Q, D] -> [T, Q, D]."""
        flat = x.view(-1, x.shape[-1])
        return self._ops.rms_norm(flat, self.weight, self.eps).view(x.shape)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x and residual [T, H] -> (norm of their sum, their sum)."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)
