"""Decides what each step computes, and takes in what it gave.

There are no phases. A sequence has its tokens, known or pending, as its goal and the computed
ones as its state; a step moves each closer within a budget of tokens. That one rule covers chunked
prefill, prefix hits, resumption after preemption, and decode. `plan` only writes what will be true
once its step has run; steps run in the order of their plans, so the next plan may build on it.

Rules that keep several steps in flight simple:
1. a sequence that needs no other token, pending ones counted, is not planned;
2. an ended sequence keeps its blocks and slot until its last step has landed;
3. what is in flight is never preempted: it is held back, lands, and is preempted then;
4. prompt blocks are offered to others when planned, output blocks when their tokens are known.

Not for: the loop and failing steps (see `core.py`, the next file); devices.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from octavo.config import SchedulerConfig
from octavo.engine.block_pool import BlockPool, root_digest
from octavo.engine.policy import FairQueue, WaitingQueue, limit_of, rank_of, refusal
from octavo.engine.sequence import NEVER, Chunk, Columns, Draft, Sequence, Slots, Step
from octavo.types import (
    LAST_CHUNK,
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    AddRequest,
    Admit,
    FinishReason,
    SequenceOutput,
    StepOutputs,
    StepPlan,
    StepResult,
    StepStats,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from octavo.engine.trace import Tracer

MIN_DEADLINES = 64  # so many are not worth tidying


@dataclass(slots=True)
class Counts:
    """Events since the last report."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    recoveries: int = 0


class Scheduler:
    """Queues, slots and blocks of all sequences. One thread; time is told by the caller."""

    def __init__(self, config: SchedulerConfig, tracer: Tracer | None = None) -> None:
        """`tracer` is told what befalls each sequence."""
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size, keep=config.prefix_caching)
        self.columns = Columns(config.max_num_seqs)
        self.fair = FairQueue() if config.policy == "fair" else None
        self.waiting: WaitingQueue | FairQueue = WaitingQueue() if self.fair is None else self.fair
        self.tracer = tracer
        if tracer is not None:
            tracer.attach(self.pool)
        self.running: list[Sequence] = []  # by rank
        self.filling: list[Sequence] = []  # running ones with known tokens not yet planned
        self.leaving: list[Sequence] = []  # ended, but in flight
        self.suspects: list[Sequence] = []  # each to be run alone before all others
        self.by_id: dict[str, Sequence] = {}  # waiting and running
        self.by_slot: list[Sequence | None] = [None] * config.max_num_seqs
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.steps: deque[Step] = deque()  # unlanded
        self.epoch = 0
        self._num_added = 0
        self._num_planned = 0
        self._deadlines: list[tuple[float, str]] = []
        self._held: tuple[Sequence, int] | None = None  # next victim, and blocks wanted
        self._decode_order: Slots | None = None
        self._prepared: Draft | None = None
        self._decoding: tuple[bytes, list[Sequence]] = (b"", [])  # slots of decode rows, and whose
        self._news: list[SequenceOutput] = []
        self._counts = Counts()

    # -- requests --

    def add(self, request: AddRequest) -> None:
        """Queues a request, or reports at once why it cannot be served."""
        problem = self._problem(request)
        if problem:
            self._news.append(SequenceOutput(request.id, [], "error", error=problem))
            return
        self._num_added += 1
        sequence = Sequence.of(
            request,
            limit=limit_of(request, self.config),
            rank=rank_of(self.config.policy, request, self._num_added),
            root=self._root(request),
        )
        self.by_id[sequence.id] = sequence
        if self.fair is not None:
            self.fair.join(request.tenant, request.weight)
        self._push(sequence)
        if sequence.suspect:
            self.suspects.append(sequence)
        if sequence.deadline:
            self._watch(sequence)
        if len(sequence.tokens) >= sequence.limit:
            self._finish(sequence, "length")

    def abort(self, ids: list[str]) -> None:
        """Ends sequences now; what is in flight of them is dropped when it lands."""
        for id in ids:
            sequence = self.by_id.get(id)
            if sequence is not None:
                self._finish(sequence, "abort")

    def reset_prefix_cache(self) -> None:
        """Later requests find nothing of what was computed so far."""
        self._forget_all("reset")

    def _forget_all(self, cause: str) -> None:
        if self.tracer is not None:
            self.tracer.reset(cause)
        self.pool.forget_all()

    def _push(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)
        if self.tracer is not None:
            self.tracer.queued(sequence)

    def _watch(self, sequence: Sequence) -> None:
        """Notes a deadline. Those of ended sequences stay noted until they are too many."""
        heappush(self._deadlines, (sequence.deadline, sequence.id))
        if len(self._deadlines) > 2 * len(self.by_id) + MIN_DEADLINES:
            self._deadlines = [(s.deadline, s.id) for s in self.by_id.values() if s.deadline]
            heapify(self._deadlines)

    @property
    def num_live(self) -> int:
        """Sequences that have not ended."""
        return len(self.by_id)

    def _problem(self, request: AddRequest) -> str:
        if request.id in self.by_id:
            return f"request id {request.id!r} is in use; ids must be unique"
        return refusal(request, self.config)

    def _root(self, request: AddRequest) -> bytes | None:
        if self.config.prefix_caching:
            return root_digest(request.cache_salt, request.adapter, "")
        if request.group:
            return root_digest(request.cache_salt, request.adapter, request.group)
        return None

    # -- planning --

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before another step lands."""
        if self.tracer is not None:
            self.tracer.plan(now)
        self._expire(now)
        self._settle_hold()
        draft = Draft(self.config.max_num_batched_tokens, now)
        if self.suspects:
            self._plan_suspect(draft)
        elif not self._plan_oversized(draft):
            self._plan_decodes(draft)
            self._plan_filling(draft)
            self._plan_waiting(draft)
        if not draft.decodes.size and not draft.chunks:
            return None
        return self._seal(draft)

    def prepare(self, now: float) -> StepPlan | None:
        """A step of decode rows that counts as planned and may still be extended; None if not now.

        Until it is used, or extended once, nothing may be planned or committed.
        """
        if self.waiting or self.filling or self.suspects:
            return None
        if self.tracer is not None:
            self.tracer.plan(now)
        self._expire(now)
        self._settle_hold()
        if self.waiting:  # one was preempted
            return None
        draft = Draft(self.config.max_num_batched_tokens, now)
        self._plan_decodes(draft)
        if not draft.decodes.size:
            return None
        self._prepared = draft
        return self._seal(draft)

    def extend(self, now: float) -> StepPlan:
        """The prepared step, with prompts that came meanwhile; the same if there are none."""
        draft, self._prepared = self._prepared, None
        assert draft is not None, "prepare comes first"
        self._expire(now)
        if self.suspects or not self.waiting:
            return self.steps[-1].plan
        self.steps.pop()
        self._num_planned -= 1
        draft.now = now
        if self.tracer is not None:
            self.tracer.plan(now)
        self._plan_waiting(draft)
        return self._seal(draft)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, id = heappop(self._deadlines)
            sequence = self.by_id.get(id)
            # An id may have been used again, with another deadline.
            if sequence is not None and sequence.deadline == deadline:
                self._finish(sequence, "timeout")

    def _settle_hold(self) -> None:
        """Preempts the sequence that was held back for it, once it has landed."""
        if self._held is None:
            return
        victim, wanted = self._held
        gone = victim.reason is not None or victim.slot < 0
        if not gone and self.columns.in_flight[victim.slot]:
            return
        self._held = None
        if not gone and self.pool.num_free < wanted:
            self._preempt(victim)

    def _plan_suspect(self, draft: Draft) -> None:
        """The first suspect, with nothing else in the step or in flight."""
        if self.steps:
            return
        sequence = self.suspects[0]
        if sequence.slot >= 0:
            planned = self._plan_chunk(sequence, draft)
            assert planned, "its whole prompt had room, and nobody else has run since"
            return
        while (hit := self._room_for(sequence)) is None:
            self._preempt(self.running[-1])
        if not self.config.chunked_prefill:
            draft.budget = len(sequence.tokens)
        self._enter(sequence, hit, draft)

    def _plan_oversized(self, draft: Draft) -> bool:
        """A prompt over the budget that may not be cut gets a step of its own."""
        first = self.waiting.first()
        if self.config.chunked_prefill or first is None or len(first.tokens) <= draft.budget:
            return False
        hit = self._room_for(first)
        if hit is None:
            return False
        draft.budget = len(first.tokens)
        self._enter(first, hit, draft)
        return True

    def _plan_decodes(self, draft: Draft) -> None:
        """All running sequences whose known tokens are planned: one more token each."""
        columns = self.columns
        if self._decode_order is None:
            slots = [s.slot for s in self.running if s not in self.filling]
            self._decode_order = np.array(slots, np.int32)
        order = self._decode_order
        pending = columns.pending[order]
        ready = order[
            (pending <= self.config.lookahead)
            & (columns.computed[order] + 1 < columns.limit[order])
        ]
        if self._held is not None:
            ready = ready[ready != self._held[0].slot]
        ready = ready[: min(draft.budget, self._share_of_a_step(order.size))]
        short = ready[columns.computed[ready] >= columns.capacity[ready]]
        for slot in short.tolist():
            sequence = self.by_slot[slot]
            if sequence is not None:  # not preempted meanwhile
                self._reach(sequence, len(sequence.blocks) * self.config.block_size + 1, draft)
        if draft.tight:
            ready = ready[columns.computed[ready] < columns.capacity[ready]]
        draft.add_decodes(ready, columns)

    def _share_of_a_step(self, num_decoding: int) -> int:
        """Rows a step takes so that `depth` steps find work: each may be in lookahead + 1."""
        depth = self.config.depth
        return -(-num_decoding * min(self.config.lookahead + 1, depth) // depth)

    def _plan_filling(self, draft: Draft) -> None:
        for sequence in sorted(self.filling, key=_rank):
            held = self._held is not None and self._held[0] is sequence
            if sequence.slot < 0 or draft.budget == 0 or held:
                continue
            if not self._plan_chunk(sequence, draft):
                return  # those behind it must not take what it lacks

    def _plan_waiting(self, draft: Draft) -> None:
        """Admits in the order of the queue; one that does not fit holds up those behind it."""
        lack = ""
        while (first := self.waiting.first()) and not lack:
            if draft.budget <= 0 or self._has_enough(draft):
                lack = "budget"
            elif draft.tight:
                lack = "pages"
            else:
                lack = self._admit(first, draft)
        if self.tracer is not None:
            self.tracer.lacks(first, lack)

    def _has_enough(self, draft: Draft) -> bool:
        """True if one more prompt would only make those in the step wait for it."""
        enough = self.config.enough_prompt
        return bool(enough) and sum(chunk.length for chunk in draft.chunks) >= enough

    def _admit(self, first: Sequence, draft: Draft) -> str:
        """Lets the first of the queue in, or names what it lacks."""
        if not self.free_slots:
            return "sequences"
        hit = self._room_for(first)
        if hit is None:
            return "pages"
        todo = len(first.tokens) - len(hit) * self.config.block_size
        if not self.config.chunked_prefill and todo > draft.budget:
            return "budget"
        self._enter(first, hit, draft)
        return ""

    def _room_for(self, sequence: Sequence) -> list[int] | None:
        """Cached blocks to begin with, or None if a slot or blocks are lacking.

        All known tokens must fit beside what running prompts have yet to take, with a little to
        spare so that those running do not soon run out.
        """
        if not self.free_slots:
            return None
        pool = self.pool
        hit = self._match(sequence)
        need = pool.blocks_for(len(sequence.tokens)) - len(hit)
        owed = sum(pool.blocks_for(len(s.tokens)) - len(s.blocks) for s in self.filling)
        reserve = 1 + len(self.running) // 4 if self.running else 0
        return hit if need + owed + reserve <= pool.num_free - pool.free_among(hit) else None

    def _match(self, sequence: Sequence) -> list[int]:
        if sequence.root is None or sequence.whole_prompt:
            return []
        # The last token is always computed: its logits are wanted.
        count = (len(sequence.tokens) - 1) // self.config.block_size
        return self.pool.match(sequence.digests(count, self.config.block_size))

    def _enter(self, sequence: Sequence, hit: list[int], draft: Draft) -> None:
        """From the queue into a slot, and its first tokens into the step."""
        self.waiting.remove(sequence)
        if self.fair is not None:
            self.fair.enter(sequence)
        if self.tracer is not None:
            self.tracer.entered(sequence, len(hit))
        slot = sequence.slot = self.free_slots.pop()
        self.by_slot[slot] = sequence
        insort(self.running, sequence, key=_rank)
        self.filling.append(sequence)
        num_hit = len(hit) * self.config.block_size
        columns = self.columns
        columns.computed[slot] = num_hit
        columns.limit[slot] = sequence.limit
        columns.hashed[slot] = NEVER if sequence.root is None else len(hit)
        columns.last[slot] = sequence.tokens[-1]
        self.pool.share(hit)
        self._attach(sequence, hit, draft)
        if not sequence.scheduled_at:
            sequence.scheduled_at = draft.now
            if self.config.prefix_caching and not sequence.whole_prompt:
                sequence.num_cached = min(num_hit, sequence.num_prompt)
                self._counts.prefix_queries += sequence.num_prompt
                self._counts.prefix_hits += sequence.num_cached
        params = sequence.params
        history = sequence.tokens.tobytes() if params.needs_history else b""
        draft.admits.append(Admit(slot, sequence.num_prompt, params, history, sequence.adapter))
        planned = self._plan_chunk(sequence, draft)
        assert planned, "there was room for all of it"

    def _plan_chunk(self, sequence: Sequence, draft: Draft) -> bool:
        """As many known tokens as the budget allows; False if blocks are lacking."""
        slot, columns = sequence.slot, self.columns
        start, known = int(columns.computed[slot]), len(sequence.tokens)
        length = min(known - start, draft.budget)
        end = start + length
        if not self._reach(sequence, end, draft):
            return False
        flags = LAST_CHUNK if start < sequence.num_prompt <= end else 0
        if sequence.prompt_logprobs is not None and start < sequence.num_prompt:
            flags |= PROMPT_LOGPROBS
        if sequence.params.pooling == "mean" and start < sequence.num_prompt:
            flags |= POOL
        if end == known:
            flags |= SAMPLE | (POOL if sequence.params.pooling == "last" else 0)
            columns.pending[slot] += 1
            self.filling.remove(sequence)
            self._decode_order = None
        columns.computed[slot] = end
        columns.in_flight[slot] += 1
        if length > 1:  # a step of one token a row reads nothing that it writes itself
            self._register(sequence)
        draft.budget -= length
        if self.fair is not None and not sequence.preemptions:
            self.fair.charge(sequence.tenant, prompt_tokens=length)
        draft.chunks.append(Chunk(sequence, start, length, flags))
        return True

    def _seal(self, draft: Draft) -> StepPlan:
        self._num_planned += 1
        slots = draft.decodes.tobytes()
        # Mostly they are those of the last step. A slot that changed hands since is not among
        # them: its new sequence had a step in which it was no decode row.
        if slots != self._decoding[0]:
            self._decoding = slots, [self._in_slot(slot) for slot in draft.decodes.tolist()]
        step = draft.seal(
            self._num_planned,
            epoch=self.epoch,
            columns=self.columns,
            decoding=self._decoding[1],
        )
        self.steps.append(step)
        return step.plan

    def _in_slot(self, slot: int) -> Sequence:
        sequence = self.by_slot[slot]
        assert sequence is not None
        return sequence

    # -- blocks --

    def _reach(self, sequence: Sequence, end: int, draft: Draft) -> bool:
        """Makes the sequence's blocks hold `end` tokens; False, and none taken, if too few."""
        missing = self.pool.blocks_for(end) - len(sequence.blocks)
        if missing > 0:
            if self.tracer is not None:
                self.tracer.takes(sequence)
            if not self._make_room(missing, sequence, draft):
                return False
            self._attach(sequence, self.pool.take(missing), draft)
        return True

    def _make_room(self, count: int, sequence: Sequence, draft: Draft) -> bool:
        """Preempts from the end of the ranks until `count` blocks are free."""
        while self.pool.num_free < count:
            draft.tight = True
            victim = self.running[-1]
            if victim is sequence:
                return False  # it keeps what it has, and waits for those before it
            if self.columns.in_flight[victim.slot]:
                self._held = (victim, count)
                return False
            self._preempt(victim)
        return True

    def _attach(self, sequence: Sequence, blocks: list[int], draft: Draft) -> None:
        slot, at = sequence.slot, len(sequence.blocks)
        draft.attached += [(slot, at + index, block) for index, block in enumerate(blocks)]
        sequence.blocks += blocks
        self.columns.capacity[slot] = len(sequence.blocks) * self.config.block_size

    def _register(self, sequence: Sequence) -> None:
        """Offers the blocks to others whose tokens are all known and written or planned."""
        columns, slot = self.columns, sequence.slot
        done = int(columns.hashed[slot])
        full = self._num_known_computed(sequence) // self.config.block_size
        if full <= done:
            return
        for block, digest in zip(
            sequence.blocks[done:full],
            sequence.digests(full, self.config.block_size)[done:],
            strict=True,
        ):
            self.pool.register(block, digest)
        columns.hashed[slot] = full

    def _num_known_computed(self, sequence: Sequence) -> int:
        return min(int(self.columns.computed[sequence.slot]), len(sequence.tokens))

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, blocks and all; its tokens are safe on the host."""
        sequence.preemptions += 1
        self._counts.preemptions += 1
        self._put_back(sequence, "pages")

    def _put_back(self, sequence: Sequence, cause: str) -> None:
        self._stop_running(sequence)
        self._release(sequence)
        sequence.forget_progress()
        if self.tracer is not None:
            self.tracer.preempted(sequence, cause)
        self._push(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence in self.filling:
            self.filling.remove(sequence)
        self._decode_order = None

    def _release(self, sequence: Sequence) -> None:
        """Blocks and slot come home; nothing of it may be in flight."""
        slot = sequence.slot
        self.pool.give(sequence.blocks)
        self.columns.clear(slot)
        self.by_slot[slot] = None
        self.free_slots.append(slot)

    # -- results --

    def commit(
        self, plan: StepPlan, result: StepResult, step_ms: float = 0.0, now: float = 0.0
    ) -> StepOutputs:
        """Takes in the oldest unlanded step, landed `now`; returns all news since the last."""
        step = self.steps.popleft()
        assert step.plan is plan, "steps land in the order of their plans"
        columns = self.columns
        columns.in_flight[step.slots] -= 1
        columns.pending[step.sampled_slots] -= 1
        tokens = np.frombuffer(result.tokens, np.int32)
        columns.last[step.sampled_slots] = tokens
        for row, values in result.prompt_logprobs.items():
            sequence = step.rows[row]
            if sequence.reason is None and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += values
        for row, data in result.pooled.items():
            if step.rows[row].reason is None:
                step.rows[row].pool(data)
        if self.tracer is not None:
            self.tracer.landed(step.planned_at, step.chunks, now, plan.step)
        if self.fair is not None:
            self.fair.charge_outputs(step.sampled)
        num_news = self._accept(step, tokens.tolist(), result)
        for sequence in [s for s in self.leaving if not columns.in_flight[s.slot]]:
            self.leaving.remove(sequence)
            self._release(sequence)
        return self.report(
            prompt_tokens=step.prompt_tokens, sampled_tokens=num_news, step_ms=step_ms
        )

    def _accept(self, step: Step, tokens: list[int], result: StepResult) -> int:
        """Appends the new tokens and ends what they end; returns how many were wanted."""
        news, bad = self._news, result.bad
        before = len(news)
        special: list[tuple[Sequence, int]] = []
        broken: list[tuple[Sequence, str]] = []
        num_wanted = 0
        for index in range(len(tokens)):
            sequence, token = step.sampled[index], tokens[index]
            if sequence.reason is not None:
                continue
            if index in bad:
                at = bad.index(index)
                broken.append((sequence, "".join(result.bad_reasons[at : at + 1])))
                continue
            num_wanted += 1
            known = sequence.tokens
            known.append(token)
            if not sequence.plain or token in sequence.stop_ids or len(known) >= sequence.limit:
                special.append((sequence, index))
            else:
                news.append(SequenceOutput(sequence.id, [token]))
        self._register_outputs(step)  # while those that end still have their blocks
        firsts: list[SequenceOutput] = []
        for sequence, index in special:
            kind = news if sequence.reported else firsts
            kind.append(self._token(sequence, tokens[index], result.logprobs.get(index)))
        news[before:before] = firsts  # somebody waits for them more than for all others
        for sequence, why in broken:
            self.pool.forget(sequence.blocks)
            self._finish(sequence, "error", error=why or "the model's output was not finite")
        return num_wanted

    def _token(
        self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None
    ) -> SequenceOutput:
        """News of a token that may be the last one, or came with more than itself."""
        if sequence.suspect:
            sequence.suspect = False
            self.suspects.remove(sequence)
        stopped = sequence.stops_at(token)
        if stopped or len(sequence.tokens) >= sequence.limit:
            self._end(sequence, "stop" if stopped else "length")
        return sequence.output(
            [token],
            logprobs=None if logprobs is None else [logprobs],
            stop_id=token if stopped else None,
        )

    def _register_outputs(self, step: Step) -> None:
        columns, slots = self.columns, step.sampled_slots
        unknown = np.maximum(columns.pending[slots] - 1, 0)  # computed, but not known
        full = (columns.computed[slots] - unknown) // self.config.block_size
        for index in np.flatnonzero(full > columns.hashed[slots]).tolist():
            sequence = step.sampled[index]
            if sequence.reason is None:
                self._register(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, *, error: str = "") -> None:
        self._end(sequence, reason)
        self._news.append(sequence.output([], error=error))

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Leaves every queue now, and its slot once nothing of it is in flight."""
        sequence.reason = reason
        del self.by_id[sequence.id]
        if self.fair is not None:
            self.fair.leave(sequence.tenant)
        if sequence.suspect:
            self.suspects.remove(sequence)
        if sequence.slot < 0:
            self.waiting.remove(sequence)
            if self.tracer is not None:
                self.tracer.left(sequence)
            return
        self._stop_running(sequence)
        if self.columns.in_flight[sequence.slot]:
            self.leaving.append(sequence)
        else:
            self._release(sequence)

    def recover(self, error: str) -> StepOutputs:
        """After the oldest unlanded step failed with `error`: all unlanded plans are void.

        Every running sequence goes back to the queue. Those of the failed step are suspects now;
        the one that failed alone, being a suspect already, is the cause and ends.
        """
        failed = self.steps[0].rows
        self.steps.clear()
        self._prepared = None
        self._held = None
        for sequence in self.leaving:
            self._release(sequence)
        self.leaving.clear()
        for sequence in list(self.running):
            self._put_back(sequence, "recovery")
        self._forget_all("recovery")  # blocks named in void plans were never written
        self.epoch += 1
        self._counts.recoveries += 1
        for sequence in failed:
            if sequence.reason is not None:
                continue
            if sequence.suspect:
                self._finish(sequence, "error", error=error)
            else:
                sequence.suspect, sequence.plain = True, False
                self.suspects.append(sequence)
        return self.report()

    # -- news --

    @property
    def has_news(self) -> bool:
        """True if `report` has outputs."""
        return bool(self._news)

    def report(
        self, *, prompt_tokens: int = 0, sampled_tokens: int = 0, step_ms: float = 0.0
    ) -> StepOutputs:
        """All outputs and counts since the last report, and the state now."""
        news, self._news = self._news, []
        counts, self._counts = self._counts, Counts()
        stats = StepStats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_used=self.pool.num_used,
            blocks_cached=self.pool.num_cached,
            blocks_total=self.pool.num_blocks,
            prompt_tokens=prompt_tokens,
            sampled_tokens=sampled_tokens,
            prefix_queries=counts.prefix_queries,
            prefix_hits=counts.prefix_hits,
            preemptions=counts.preemptions,
            recoveries=counts.recoveries,
            queued_tokens=self.waiting.num_tokens,
            step_ms=step_ms,
        )
        return StepOutputs(news, stats)


def _rank(sequence: Sequence) -> tuple[float, ...]:
    return sequence.rank
