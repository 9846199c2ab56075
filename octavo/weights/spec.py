"""How a parameter is cut over tensor-parallel ranks and how fused parts lie in it.

Layers declare ParamSpecs; the loader reads only this rank's slice of each checkpoint tensor.
Sharding is decided by layer type here, never by a parameter's name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor inside a fused parameter, along its output dimension."""

    name: str  # suffix in our naming, such as "q", "k", "v", "gate", "up"; "" if not fused
    size: int  # rows on this rank
    full: int  # rows in the checkpoint
    start: int  # first row on this rank, in the checkpoint

    def in_units(self, unit: int, what: str) -> Part:
        """The same, counted in `unit` rows; only the tensor's last unit may be broken.

        Raises ConfigError where the rank's rows begin or end within a unit of `what`.
        """
        end = self.start + self.size
        if self.start % unit or (end % unit and end != self.full):
            raise ConfigError(
                f"{what} hold {unit} rows, and this rank's rows {self.start} to {end} of "
                f"{self.full} begin or end within one; use another tensor_parallel_size",
                "tensor_parallel_size",
            )
        size = -(-end // unit) - self.start // unit
        return Part(self.name, size, -(-self.full // unit), self.start // unit)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of a layer.

    `shape` is this rank's shape. `out_dim` and `in_dim` are the dimensions that column and row
    parallelism cut (None: never cut). For a row-parallel parameter `in_start` and `in_full` say
    which columns of the checkpoint tensor are this rank's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]
    out_dim: int | None = None
    in_dim: int | None = None
    in_start: int = 0
    in_full: int = 0
    # A row of the checkpoint's tensor stands for so many of ours; 0: one number stands for all.
    repeat: int = 1
    dummy: float | None = None  # what made-up weights have here; None: noise
    kept_bytes: int | None = None  # that stay once the layer is finished; None: the parameter's own
