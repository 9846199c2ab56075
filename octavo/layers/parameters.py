"""Parameters: a layer's raw tensors between loading and `finish`.

Every layer with weights has three methods: `param_specs` (what the checkpoint must fill),
`set_param` (one filled tensor), and `finish` (repack for the kernels and drop the raw tensors).
This file is the little that they share. Not for: reading checkpoints (`weights/`).
Next file: `linear.py`.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.weights.spec import ParamSpec


class Layer(Protocol):
    """A layer that a loader can fill."""

    def param_specs(self) -> dict[str, ParamSpec]:
        """The parameters by name; empty if the layer has none of its own."""

    def set_param(self, name: str, tensor: Tensor) -> None:
        """Takes one parameter, already cut to this rank and fused: shape and dtype of its spec."""

    def finish(self) -> None:
        """Once, after all parameters are set: makes the layer ready and frees what it may."""


class Parameters:
    """Holds raw tensors by name and checks each against its ParamSpec."""

    __slots__ = ("_tensors", "specs")

    def __init__(self, specs: dict[str, ParamSpec]) -> None:
        self.specs = specs
        self._tensors: dict[str, Tensor] = {}

    def set(self, name: str, tensor: Tensor) -> None:
        """Keeps `tensor`; it must be one of the specs', with exactly its shape and dtype."""
        spec = self.specs[name]
        found = (tuple(tensor.shape), tensor.dtype)
        assert found == (spec.shape, spec.dtype), f"{name}: {found} for {spec}"
        self._tensors[name] = tensor

    def take(self) -> dict[str, Tensor]:
        """All tensors, given up by this holder; each spec must have been filled."""
        missing = self.specs.keys() - self._tensors.keys()
        assert not missing, f"parameters never set: {sorted(missing)}"
        tensors, self._tensors = self._tensors, {}
        return tensors
