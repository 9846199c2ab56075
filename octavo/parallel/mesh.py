"""The rank grid: which part of the model this process holds. `Mesh.single()` is one device.

Ranks are counted stage by stage: those that share the layers of one stage stand together. Not for:
communication, which is in `collectives.py`, or how ranks find each other (`world.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class Calls:
    """How many collectives a rank has begun, and which the last one was; other threads read it."""

    __slots__ = ("count", "inside", "last")

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        self.inside = False  # the host waits in the last one

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Around a collective, as the host sees it."""
        self.count += 1
        self.last, self.inside = name, True
        yield
        self.inside = False


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of the grid. `group` is the ranks' process group, None for a rank alone."""

    rank: int = 0
    size: int = 1
    group: object = field(default=None, compare=False, repr=False)
    calls: Calls = field(default_factory=Calls, compare=False, repr=False)

    @property
    def first(self) -> bool:
        """True for rank 0 of the axis."""
        return self.rank == 0

    @property
    def last(self) -> bool:
        """True for the axis's last rank."""
        return self.rank == self.size - 1

    def share(self, count: int) -> tuple[int, int]:
        """(start, size) of this rank's equal share of `count` things."""
        if count % self.size:
            raise ValueError(f"{count} cannot be divided over {self.size} ranks")
        size = count // self.size
        return self.rank * size, size

    def stretch(self, count: int) -> range:
        """This rank's neighbours among `count` things in a row; the last ranks have one less."""
        size, more = divmod(count, self.size)
        start = self.rank * size + min(self.rank, more)
        return range(start, start + size + (self.rank < more))


@dataclass(frozen=True, slots=True)
class Mesh:
    """Tensor-parallel and pipeline-parallel coordinates of this rank."""

    tp: Axis = Axis()
    pp: Axis = Axis()

    @classmethod
    def single(cls) -> Mesh:
        """One device that holds everything."""
        return cls()

    @property
    def size(self) -> int:
        """All ranks."""
        return self.tp.size * self.pp.size

    @property
    def samples(self) -> bool:
        """True for the one rank that draws the tokens and answers: the last stage's first."""
        return self.tp.first and self.pp.last
