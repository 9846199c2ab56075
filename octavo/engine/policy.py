"""In which order sequences are served.

A sequence's rank is fixed when it is added: smaller is admitted first and preempted last, so the
two can never work against each other. A waiting sequence never pushes a running one out; it is
preempted only when a running one of smaller rank needs its blocks. Not for: whether there is room
(see `scheduler.py`). Next file: `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from octavo.config import Policy
from octavo.engine.sequence import Sequence
from octavo.types import AddRequest


def rank_of(policy: Policy, request: AddRequest, number: int) -> tuple[float, ...]:
    """Rank of the `number`-th request: by arrival, or by priority and then arrival."""
    if policy == "priority":
        return (request.priority, request.arrival, number)
    return (request.arrival, number)


class WaitingQueue:
    """Waiting sequences by rank. A removed one leaves its heap entry until that comes up."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of all waiting sequences
        self._members: dict[tuple[float, ...], Sequence] = {}  # by rank, which is unique
        self._heap: list[tuple[float, ...]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence."""
        assert sequence.rank not in self._members
        self._members[sequence.rank] = sequence
        self.num_tokens += len(sequence.tokens)
        heappush(self._heap, sequence.rank)

    def first(self) -> Sequence | None:
        """The next to be served; it stays in the queue."""
        while self._heap and self._heap[0] not in self._members:
            heappop(self._heap)
        return self._members[self._heap[0]] if self._heap else None

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence from anywhere."""
        del self._members[sequence.rank]
        self.num_tokens -= len(sequence.tokens)
