"""Collectives over one axis of the mesh; each is the identity when the rank is alone.

They run in the process group that the axis carries. Not for: plans and tokens, which go through
`executor/`. Next file: `world.py`.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor, distributed

from octavo.parallel.mesh import Axis


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum of x over the ranks, in place where there is more than one."""
    if axis.size == 1:
        return x
    with axis.calls.entered("all_reduce"):
        distributed.all_reduce(x, group=_group(axis))
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """x [S, n] of each rank -> [S, n * size], in the order of the ranks."""
    if axis.size == 1:
        return x
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    with axis.calls.entered("all_gather"):
        distributed.all_gather(parts, x.contiguous(), group=_group(axis))
    return torch.cat(parts, dim=-1)


def receive(x: Tensor, axis: Axis) -> Tensor:
    """Fills x [T, H] with what the rank before this one has sent."""
    with axis.calls.entered("receive"):
        _group(axis).recv([x], axis.rank - 1, 0).wait()
    return x


class Sender:
    """Sends hidden states to the next rank of an axis without waiting for it to take them.

    At most as many as the axis has ranks are on their way: so many steps are in flight.
    """

    __slots__ = ("_axis", "_sent")

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._sent: deque[tuple[distributed.Work, Tensor]] = deque()  # held until it has arrived

    def send(self, x: Tensor) -> None:
        """Sends x [T, H], which must not be changed afterwards."""
        axis = self._axis
        with axis.calls.entered("send"):
            while len(self._sent) >= axis.size:
                self._sent.popleft()[0].wait()
            work = _group(axis).send([x], axis.rank + 1, 0)
        self._sent.append((work, x))


def _group(axis: Axis) -> distributed.ProcessGroup:
    group = axis.group
    assert isinstance(group, distributed.ProcessGroup), "an axis of many ranks carries its group"
    return group
