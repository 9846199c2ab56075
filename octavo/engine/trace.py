"""What befell a sequence in the engine: why it waited, its chunks, preemptions, prefix misses.

`Tracer` is told by the scheduler where something happens and leaves `TraceEvent`s with the
sequence, which travel with its first and last output and with the first one after a preemption.
It costs a few additions for each step and nothing for a decoded token. All that it remembers of
the past is bounded. Not for: deciding anything (`scheduler.py`), or how events are shown
(`obs/timeline.py`). Next file: `scheduler.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

from octavo.engine.block_pool import BlockPool, chain_digest
from octavo.engine.sequence import Chunk, Sequence
from octavo.types import TraceEvent

# What the first of the queue may lack; values of a "queue" event are in this order.
LACKS: Final = ("sequences", "pages", "budget")
MAX_EVENTS = 256  # of one sequence between two reports
MAX_FIRST_BLOCKS = 4096
MAX_ROOTS = 4  # of one first block
Cause: TypeAlias = tuple[float, str, str]  # when, which sequence or what, and whose
MAX_COMPARED = 64  # blocks that are hashed again to see what another salt would have found


@dataclass(slots=True)
class Wait:
    """One stay in the queue. `before` and `at_head` are the queue's totals at these moments."""

    since: float  # 0: not seen by a plan yet
    before: list[float]
    head_since: float = 0.0
    at_head: list[float] | None = None


class Tracer:
    """Writes the events of all sequences of one scheduler."""

    def __init__(self) -> None:
        self._pool = BlockPool(1, 1, keep=False)  # until there is a real one
        self._now = 0.0
        self._totals = [0.0] * len(LACKS)  # seconds for which the queue's first lacked it
        self._lack = -1
        self._new: list[Sequence] = []
        self._taker: Sequence | None = None
        # What was evicted, and by whom: two generations, so that the oldest go all at once.
        self._evicted: dict[bytes, Cause] = {}
        self._evicted_before: dict[bytes, Cause] = {}
        self._max_evicted = 0  # of one generation
        self._roots: OrderedDict[bytes, list[tuple[bytes, str, str, str]]] = OrderedDict()

    def attach(self, pool: BlockPool) -> None:
        """The pool whose blocks the sequences share."""
        self._pool = pool
        self._max_evicted = max(1024, pool.num_blocks)
        pool.watch = self._evict

    # -- the queue --

    def queued(self, sequence: Sequence) -> None:
        """It has entered the queue, as a new one or, within a plan, put back."""
        again = bool(sequence.scheduled_at)
        sequence.wait = Wait(self._now if again else 0.0, self._totals.copy())
        if not again:
            self._new.append(sequence)

    def plan(self, now: float) -> None:
        """A plan begins; until now the queue's first went on lacking what it lacked."""
        if self._lack >= 0:
            self._totals[self._lack] += now - self._now
        self._now = now
        if self._new:
            for sequence in self._new:
                if sequence.wait is not None:
                    sequence.wait.since = now
            self._new.clear()

    def lacks(self, first: Sequence | None, lack: str) -> None:
        """The queue's first stays there for want of `lack`, or the queue is empty."""
        if first is None:
            self._lack = -1
            return
        self._lack = LACKS.index(lack)
        wait = first.wait
        if wait is not None and wait.at_head is None:
            wait.head_since = self._now
            wait.at_head = self._totals.copy()

    def entered(self, sequence: Sequence, num_hit: int) -> None:
        """It has left the queue for a slot, with `num_hit` blocks of its prompt found."""
        self.left(sequence)
        if not sequence.preemptions:
            self._add(sequence, self._prefix(sequence, num_hit))

    def left(self, sequence: Sequence) -> None:
        """It has left the queue, for a slot or because it has ended."""
        wait, now = sequence.wait, self._now
        sequence.wait = None
        if wait is None:
            return
        if not wait.since:  # no plan has seen it: there is nothing to tell
            self._new.remove(sequence)
            return
        head, at_head = wait.head_since or now, wait.at_head or self._totals
        own = [total - then for total, then in zip(self._totals, at_head, strict=True)]
        ahead = [total - then for total, then in zip(at_head, wait.before, strict=True)]
        values = (wait.since, head - wait.since, *own, *ahead)
        self._add(sequence, TraceEvent("queue", now, values))

    # -- steps --

    def landed(self, planned_at: float, chunks: list[Chunk], now: float, number: int) -> None:
        """Step `number`, planned at `planned_at`, has landed with these chunks."""
        for chunk in chunks:
            values = (chunk.start, chunk.length, now, number)
            self._add(chunk.sequence, TraceEvent("chunk", planned_at, values))

    def preempted(self, sequence: Sequence, cause: str) -> None:
        """It goes back to the queue, for want of pages or because a step failed."""
        sequence.plain = False  # its next output tells
        by = self._taker if cause == "pages" else None
        who, tenant = (by.id, by.tenant) if by is not None else ("", "")
        self._add(sequence, TraceEvent("preempted", self._now, (), cause, who, tenant))

    def _add(self, sequence: Sequence, event: TraceEvent) -> None:
        if len(sequence.events) < MAX_EVENTS:
            sequence.events.append(event)

    # -- the prefix cache --

    def takes(self, sequence: Sequence) -> None:
        """What is evicted or preempted from now on is for this sequence."""
        self._taker = sequence

    def reset(self, cause: str) -> None:
        """All cached prefixes are about to be forgotten."""
        self._remember(list(islice(self._pool.block_of, self._max_evicted)), cause, "")

    def _evict(self, digests: list[bytes]) -> None:
        by = self._taker
        self._remember(digests, by.id if by else "", by.tenant if by else "")

    def _remember(self, digests: list[bytes], who: str, tenant: str) -> None:
        self._evicted.update(dict.fromkeys(digests, (self._now, who, tenant)))
        if len(self._evicted) > self._max_evicted:
            self._evicted_before, self._evicted = self._evicted, {}

    def _gone(self, digest: bytes) -> Cause | None:
        return self._evicted.get(digest) or self._evicted_before.get(digest)

    def _prefix(self, sequence: Sequence, num_hit: int) -> TraceEvent:
        """What was found of the prompt, and why no more."""
        size = self._pool.block_size
        # The last token is always computed, so a block that ends with it cannot be used.
        usable = (len(sequence.tokens) - 1) // size
        found = (num_hit * size, usable * size)
        if sequence.root is None:
            return TraceEvent("prefix", self._now, (0, usable * size), "off")
        if sequence.prompt_logprobs is not None:
            return TraceEvent("prefix", self._now, (0, usable * size), "prompt_logprobs")
        if usable == 0:
            return TraceEvent("prefix", self._now, found, "short")
        other = self._other_root(sequence, size)
        if num_hit == usable:
            return TraceEvent("prefix", self._now, found, "hit")
        chain = sequence.digests(usable, size)
        gone = self._gone(chain[num_hit])
        if gone is not None:
            lost = self._run(chain[num_hit:]) * size
            values = (*found, num_hit, lost, self._now - gone[0])
            return TraceEvent("prefix", self._now, values, "evicted", *gone[1:])
        if num_hit == 0 and other is not None:
            hits, reason, who, tenant = other
            return TraceEvent("prefix", self._now, (*found, 0, hits), reason, who, tenant)
        return TraceEvent("prefix", self._now, (*found, num_hit, 0), "new")

    def _run(self, chain: list[bytes]) -> int:
        """How many of these blocks, from the first one on, were here once or still are."""
        for count, digest in enumerate(chain):
            if digest not in self._pool.block_of and self._gone(digest) is None:
                return count
        return len(chain)

    def _other_root(self, sequence: Sequence, size: int) -> tuple[int, str, str, str] | None:
        """Tokens that were here under another salt or adapter, which of them, and whose."""
        root = sequence.root
        assert root is not None
        key = sequence.tokens[:size].tobytes()
        roots = self._roots.setdefault(key, [])
        self._roots.move_to_end(key)
        if len(self._roots) > MAX_FIRST_BLOCKS:
            self._roots.popitem(last=False)
        best = None
        if all(one[0] != root for one in roots):
            most = (0, False)
            for other, adapter, who, tenant in roots:
                hits, same = self._hits_under(other, sequence, size), adapter == sequence.adapter
                if hits and (hits, same) > most:
                    most = (hits, same)
                    best = (hits, "salt" if same else "adapter", who, tenant)
            roots.append((root, sequence.adapter, sequence.id, sequence.tenant))
            del roots[:-MAX_ROOTS]
        return best

    def _hits_under(self, root: bytes, sequence: Sequence, size: int) -> int:
        """Tokens of the prompt that are cached under another root; counted up to a limit."""
        count, parent = 0, root
        usable = (len(sequence.tokens) - 1) // size
        while count < min(usable, MAX_COMPARED):
            tokens = sequence.tokens[count * size : (count + 1) * size]
            parent = chain_digest(parent, tokens.tobytes())
            if parent not in self._pool.block_of:
                break
            count += 1
        return count * size
