"""Which requests can be served at all, how far, and in which order.

A sequence's rank is fixed when it is added: smaller is admitted first and preempted last, so the
two can never work against each other. A waiting sequence never pushes a running one out; it is
preempted only when a running one of smaller rank needs its blocks. Under the policy "fair" the
queue takes turns between tenants (`FairQueue`), and a sequence's rank is the turn at which it first
ran. Not for: whether there is room (see `scheduler.py`). Next file: `trace.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

from octavo.config import Policy, SchedulerConfig
from octavo.engine.sequence import Sequence
from octavo.types import AddRequest

# What a tenant is charged. A token of output takes part in a step of its own and is waited for;
# a token of a prompt shares its step with hundreds. Tokens found in the prefix cache are free.
PROMPT_COST = 1.0
OUTPUT_COST = 4.0
FIRST_TURNS = float("-inf")  # in ranks: what has run goes before what has not
MAX_IDLE_TENANTS = 1024


def rank_of(policy: Policy, request: AddRequest, number: int) -> tuple[float, ...]:
    """Rank of the `number`-th request: by arrival, or by priority and then arrival."""
    if policy in ("priority", "fair"):
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


@dataclass(slots=True)
class _Tenant:
    """One tenant: what it has been charged, by weight, and what of its waits."""

    weight: float
    served: float = 0.0
    live: int = 0
    waiting: WaitingQueue = field(default_factory=WaitingQueue)


class FairQueue:
    """Waiting sequences of several tenants: next is the tenant that was served least.

    A virtual token counter for each tenant grows by the cost of its tokens over its weight, when
    they are computed and not as they were announced. One that comes back from idleness is lifted to
    the least of those that are busy: time in which nothing was asked for is not saved up. Within a
    tenant priority and then arrival decide, so no tenant's priorities reach beyond its own share.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, str]] = []  # of tenants with waiting ones; may be out of date
        self._floor = 0.0
        self._turns = 0

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[Sequence]:
        for tenant in self._tenants.values():
            yield from tenant.waiting

    @property
    def num_tokens(self) -> int:
        """Of all waiting sequences."""
        return sum(tenant.waiting.num_tokens for tenant in self._tenants.values())

    def join(self, name: str, weight: float) -> None:
        """A sequence of this tenant was added; `leave` follows when it ends."""
        tenant = self._tenants.get(name)
        if tenant is None:
            self._drop_idle()
            tenant = self._tenants[name] = _Tenant(weight)
        tenant.weight = weight
        if not tenant.live:
            busy = [one.served for one in self._tenants.values() if one.live]
            self._floor = max(self._floor, min(busy, default=0.0))
            tenant.served = max(tenant.served, self._floor)
        tenant.live += 1

    def leave(self, name: str) -> None:
        """A sequence of this tenant has ended."""
        tenant = self._tenants[name]
        tenant.live -= 1
        if not any(one.live for one in self._tenants.values()):
            self._floor = max(self._floor, tenant.served)

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence, whose tenant has joined."""
        tenant = self._tenants[sequence.tenant]
        if not len(tenant.waiting):
            heappush(self._heap, (tenant.served, sequence.tenant))
        tenant.waiting.push(sequence)

    def first(self) -> Sequence | None:
        """The next to be served; it stays in the queue."""
        heap = self._heap
        while heap:
            served, name = heap[0]
            tenant = self._tenants.get(name)
            if tenant is None or not len(tenant.waiting):
                heappop(heap)
            elif served != tenant.served:
                heapreplace(heap, (tenant.served, name))
            else:
                return tenant.waiting.first()
        return None

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence from anywhere."""
        self._tenants[sequence.tenant].waiting.remove(sequence)

    def enter(self, sequence: Sequence) -> None:
        """It is about to run: its rank from now on is the turn at which it first did."""
        if sequence.rank[0] != FIRST_TURNS:
            self._turns += 1
            sequence.rank = (FIRST_TURNS, self._turns)

    def charge(self, name: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """The tenant was served so many tokens."""
        tenant = self._tenants.get(name)
        if tenant is not None:
            cost = PROMPT_COST * prompt_tokens + OUTPUT_COST * output_tokens
            tenant.served += cost / tenant.weight

    def charge_outputs(self, sampled: list[Sequence]) -> None:
        """Each of these sequences was served a token of output."""
        counts: dict[str, int] = {}
        for sequence in sampled:
            counts[sequence.tenant] = counts.get(sequence.tenant, 0) + 1
        for name, count in counts.items():
            self.charge(name, output_tokens=count)

    def served(self, name: str) -> float:
        """The tenant's virtual token counter."""
        return self._tenants[name].served

    def _drop_idle(self) -> None:
        if len(self._tenants) >= MAX_IDLE_TENANTS:
            self._tenants = {name: one for name, one in self._tenants.items() if one.live}
