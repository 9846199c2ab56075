"""How a parameter is cut over tensor-parallel ranks and how fused parts lie in it.

Layers declare ParamSpecs; the loader reads only this rank's slice of each checkpoint tensor.
Sharding is decided by layer type here, never by a parameter's name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Part:
    """One checkpoint tensor inside a fused parameter, along its output dimension."""

    name: str  # suffix in our naming, such as "q", "k", "v", "gate", "up"; "" if not fused
    size: int  # rows on this rank
    full: int  # rows in the checkpoint
    start: int  # first row on this rank, in the checkpoint


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
