"""Collectives over one axis of the mesh; each is the identity when the rank is alone.

They run in the process group that the axis carries. Not for: plans and tokens, which go through
`executor/`. Next file: `layers/linear.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from octavo.parallel.mesh import Axis


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the ranks, in place where there is more than one."""
    if axis.size == 1:
        return x
    distributed.all_reduce(x, group=_group(axis))
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """x [S, n] of each rank -> [S, n * size], in the order of the ranks."""
    if axis.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    distributed.all_gather(parts, x.contiguous(), group=_group(axis))
    return torch.cat(parts, dim=-1)


def _group(axis: Axis) -> distributed.ProcessGroup:
    group = axis.group
    assert isinstance(group, distributed.ProcessGroup), "an axis of many ranks carries its group"
    return group
