"""The rank grid: which part of the model this process holds. `Mesh.single()` is one device.

Not for: communication, which is in `collectives.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the grid. `group` is the ranks' process group, None for a rank alone."""

    rank: int = 0
    size: int = 1
    group: object = field(default=None, compare=False, repr=False)

    def share(self, count: int) -> tuple[int, int]:
        """(start, size) of this rank's equal share of `count` things."""
        if count % self.size:
            raise ValueError(f"{count} cannot be divided over {self.size} ranks")
        size = count // self.size
        return self.rank * size, size


@dataclass(frozen=True, slots=True)
class Mesh:
    """Tensor-parallel and pipeline-parallel coordinates of this rank."""

    tp: Axis = Axis()
    pp: Axis = Axis()

    @classmethod
    def single(cls) -> Mesh:
        """One device that holds everything."""
        return cls()
