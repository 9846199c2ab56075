"""What must hold between any two calls of a scheduler, whatever the requests were.

`check` looks at everything and is slow; the fuzz harness calls it after every step, and it can be
switched on to find out where a live engine first went wrong. It reads and never writes. Not for:
input errors; whether tokens are right. Next file: `../forward.py`.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from octavo.engine.block_pool import BlockPool
from octavo.engine.scheduler import Scheduler
from octavo.engine.sequence import NEVER, Sequence
from octavo.types import FROM_DEVICE, SAMPLE, StepPlan, unpack


def check(scheduler: Scheduler) -> None:
    """Raises AssertionError with what is wrong."""
    placed = scheduler.running + scheduler.leaving
    _check_pool(scheduler.pool, Counter(b for s in placed for b in s.blocks))
    caching = scheduler.config.prefix_caching
    assert caching or not scheduler.pool.num_cached, "caching is off, but contents were kept"
    _check_queues(scheduler)
    _check_slots(scheduler, placed)
    for sequence in placed:
        _check_sequence(scheduler, sequence)
    _check_flights(scheduler, placed)
    for step in scheduler.steps:
        _check_plan(scheduler, step.plan)


def _check_pool(pool: BlockPool, owners: Counter[int]) -> None:
    refs = {block: count for block, count in enumerate(pool.refs) if count}
    assert refs == owners, f"owners counted {refs}, tables say {dict(owners)}"
    free = {block for block, count in enumerate(pool.refs) if not count}
    assert set(pool.free) == free, "free list and owner counts differ"
    assert pool.num_free + pool.num_used == pool.num_blocks
    inverse = {block: digest for digest, block in pool.block_of.items()}
    assert inverse == pool.digest_of, "the two maps of hashes differ"
    cached = len(free & pool.digest_of.keys())
    assert pool.num_cached == cached, f"{pool.num_cached} cached counted, {cached} are"


def _check_queues(scheduler: Scheduler) -> None:
    running, waiting = scheduler.running, list(scheduler.waiting)
    live = {id(sequence) for sequence in scheduler.by_id.values()}
    assert len(running) + len(waiting) == len(live), "a sequence is in no queue, or in two"
    assert {id(sequence) for sequence in running + waiting} == live
    assert all(s.reason is None for s in running + waiting), "an ended sequence is in a queue"
    assert all(s.reason is not None for s in scheduler.leaving)
    ranks = [sequence.rank for sequence in running]
    assert ranks == sorted(ranks), "running sequences are not in order of rank"
    _check_first(scheduler, waiting)
    assert scheduler.waiting.num_tokens == sum(len(s.tokens) for s in waiting)
    for sequence in waiting:
        assert sequence.slot < 0, f"{sequence.id} waits in a slot"
        assert not sequence.blocks, f"{sequence.id} waits with blocks"
    suspects = {id(sequence) for sequence in scheduler.suspects}
    assert suspects == {id(s) for s in running + waiting if s.suspect}, "suspects differ"


def _check_first(scheduler: Scheduler, waiting: list[Sequence]) -> None:
    first, fair = scheduler.waiting.first(), scheduler.fair
    if fair is not None and first is not None:
        least = min(fair.served(sequence.tenant) for sequence in waiting)
        assert fair.served(first.tenant) == least, "the queue's first is not of the least served"
        waiting = [sequence for sequence in waiting if sequence.tenant == first.tenant]
    smallest = min(waiting, key=lambda s: s.rank, default=None)
    assert first is smallest, "the queue's first is not the smallest rank"


def _check_slots(scheduler: Scheduler, placed: list[Sequence]) -> None:
    slots = [sequence.slot for sequence in placed]
    everything = sorted(slots + scheduler.free_slots)
    assert everything == list(range(scheduler.config.max_num_seqs)), f"slots are {everything}"
    for slot, sequence in enumerate(scheduler.by_slot):
        assert (sequence is not None) == (slot in slots), f"slot {slot} is wrongly marked"
        assert sequence is None or sequence.slot == slot
    columns = scheduler.columns
    for column in (columns.computed, columns.pending, columns.in_flight, columns.capacity):
        assert not column[scheduler.free_slots].any(), "a free slot has numbers"


def _check_sequence(scheduler: Scheduler, sequence: Sequence) -> None:
    columns, slot, size = scheduler.columns, sequence.slot, scheduler.pool.block_size
    name, known = sequence.id, len(sequence.tokens)
    computed, pending = int(columns.computed[slot]), int(columns.pending[slot])
    assert columns.capacity[slot] == len(sequence.blocks) * size
    assert computed <= columns.capacity[slot], f"{name} computed beyond its blocks"
    assert len(sequence.blocks) == -(-computed // size), f"{name} has blocks without tokens"
    assert 0 <= pending <= scheduler.config.lookahead + 1, f"{name} has {pending} pending"
    assert pending <= columns.in_flight[slot], f"{name} waits for tokens that no step samples"
    assert columns.limit[slot] == sequence.limit
    hashed = int(columns.hashed[slot])
    assert hashed == NEVER or hashed * size <= computed, f"{name} registered too much"
    if sequence.reason is not None:
        assert columns.in_flight[slot], f"{name} ended and landed, but keeps its slot"
        return
    assert known + pending <= sequence.limit, f"{name} runs over its limit"
    if sequence in scheduler.filling:
        assert not pending, f"{name} samples before its prompt is done"
        assert computed < known
    else:
        assert computed == known + pending - 1, f"{name} lost its place"
    assert columns.last[slot] == sequence.tokens[-1]


def _check_flights(scheduler: Scheduler, placed: list[Sequence]) -> None:
    in_flight = Counter(slot for step in scheduler.steps for slot in step.slots.tolist())
    pending = Counter(slot for step in scheduler.steps for slot in step.sampled_slots.tolist())
    assert len(scheduler.steps) <= scheduler.config.depth
    for sequence in placed:
        slot = sequence.slot
        assert scheduler.columns.in_flight[slot] == in_flight[slot], f"{sequence.id} in flight"
        assert scheduler.columns.pending[slot] == pending[slot], f"{sequence.id} pending"
    occupied = {sequence.slot for sequence in placed}
    assert in_flight.keys() <= occupied, "a slot was given away while in flight"
    for step in scheduler.steps:
        assert all(scheduler.by_slot[s.slot] is s for s in step.rows), "a row lost its slot"


def _check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    config = scheduler.config
    lengths = np.frombuffer(plan.lengths, np.int32)
    flags = np.frombuffer(plan.flags, np.uint8)
    slots = list(unpack(plan.slots))
    assert plan.num_rows == len(slots) == len(lengths) > 0
    assert len(set(slots)) == len(slots), "a slot has two rows"
    assert len(slots) <= config.max_num_seqs
    # Only a prompt that may not be cut can exceed the budget, and then it is alone.
    over = int(lengths.sum()) > config.max_num_batched_tokens
    assert not over or len(slots) == 1, "the step is over its budget"
    assert config.chunked_prefill or (flags & SAMPLE).all(), "a prompt was cut"
    decodes = (lengths == 1) & (flags & SAMPLE > 0)
    assert decodes[: decodes.sum()].all(), "decode rows are not first"
    known = lengths[flags & FROM_DEVICE == 0].sum()
    assert len(plan.tokens) == 4 * known, "tokens do not match the rows"
    assert plan.epoch == scheduler.epoch, "a void plan is in flight"
