"""Build: all that a layer needs when it is made, handed down constructors. Nothing is ambient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.attention.base import AttentionBackend, AttentionNeed
from octavo.kernels.ops import Ops
from octavo.parallel.mesh import Mesh
from octavo.quant.base import QuantMethod


@dataclass(frozen=True, slots=True)
class Build:
    """Frozen choices for one model on one device of one rank."""

    mesh: Mesh
    device: str
    dtype: torch.dtype
    ops: Ops
    quant: QuantMethod
    attention: AttentionBackend
    need: AttentionNeed  # per rank: heads are already divided
    first_layer: int = 0  # of this stage: layers of the cache are counted from it
