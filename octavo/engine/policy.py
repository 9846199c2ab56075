"""Which requests can be served at all, how far, and in which order.

A sequence's rank is fixed when it is added: smaller is admitted first and preempted last, so the
two can never work against each other. A waiting sequence never pushes a running one out; it is
preempted only when a running one of smaller rank needs its blocks. Not for: whether there is room
(see `scheduler.py`). Next file: `scheduler.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from octavo.config import Policy, SchedulerConfig
from octavo.engine.sequence import Sequence
from octavo.types import AddRequest


def rank_of(policy: Policy, request: AddRequest, number: int) -> tuple[float, ...]:
    """Rank of the `number`-th request: by arrival, or by priority and then arrival."""
    if policy == "priority":
        return (request.priority, request.arrival, number)
    return (request.arrival, number)


def limit_of(request: AddRequest, config: SchedulerConfig) -> int:
    """Tokens, prompt included, at which the request ends with reason "length"."""
    return min(
        len(request.prompt_ids) + request.params.max_tokens,
        config.max_model_len,
        # A cache smaller than the context bounds it too; the last token's KV is never computed.
        config.num_blocks * config.block_size + 1,
    )


def refusal(request: AddRequest, config: SchedulerConfig) -> str:
    """Why the request can never be served; empty if it can."""
    num_prompt = len(request.prompt_ids)
    known = request.prompt_ids + request.emitted_ids
    needed = -(-len(known) // config.block_size)
    if not num_prompt:
        return "prompt_ids is empty; a prompt needs at least one token"
    if num_prompt >= config.max_model_len:
        return (
            f"the prompt has {num_prompt} tokens, which leaves no room for output in a context of"
            f" {config.max_model_len}; shorten it or raise max_model_len"
        )
    if needed > config.num_blocks:
        return (
            f"the request's {len(known)} tokens need {needed} blocks of KV cache, but there are"
            f" only {config.num_blocks}; shorten the prompt or enlarge the cache"
        )
    if min(known) < 0 or max(known) > 2**31 - 1:
        return f"token ids go from {min(known)} to {max(known)}; they must fit 0 to 2^31 - 1"
    return ""


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
