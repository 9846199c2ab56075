"""One request being generated, the numbers that change in every step, and a step in the making.

A `Sequence` holds what is looked at now and then (tokens, block table, hashes, reason); `Columns`
holds, by slot, what every step reads and writes, as arrays, so that planning hundreds of decode
rows is a few array operations. Only a sequence in a slot has columns: one that waits has computed
nothing and is in no step. Not for: deciding anything (see `scheduler.py`).
Next file: `block_pool.py`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.engine.block_pool import chain_digest
from octavo.types import (
    FROM_DEVICE,
    SAMPLE,
    AddRequest,
    Admit,
    FinishReason,
    SequenceOutput,
    StepPlan,
    TokenLogprobs,
    TokenParams,
    TraceEvent,
)

if TYPE_CHECKING:
    from octavo.engine.trace import Wait

Slots: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float64]
NEVER = 2**31 - 1  # in `Columns.hashed`: blocks of this sequence are not registered


class Columns:
    """i32[S] each, by slot; a free slot is all zeros."""

    def __init__(self, num_slots: int) -> None:
        self._table: npt.NDArray[np.int32] = np.zeros((7, num_slots), np.int32)
        self.computed = self._table[0]  # tokens whose KV is written or planned
        self.pending = self._table[1]  # tokens sampled in unlanded steps, unknown to the host
        self.in_flight = self._table[2]  # unlanded steps with a row of this slot
        self.limit = self._table[3]  # tokens at which the sequence ends
        self.capacity = self._table[4]  # tokens that its blocks can hold
        self.last = self._table[5]  # its last known token
        self.hashed = self._table[6]  # blocks already offered to the prefix cache

    def clear(self, slot: int) -> None:
        """Makes the slot a free one."""
        self._table[:, slot] = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state. It waits (no slot), runs (slot), or has ended (`reason`)."""

    id: str
    params: TokenParams
    tokens: array[int]  # prompt and known output, i32
    num_prompt: int
    limit: int  # tokens at which it ends with reason "length"
    rank: tuple[float, ...]  # smaller is served first and preempted last
    deadline: float
    adapter: str
    root: bytes | None  # parent of its first block's hash; None: its blocks are not shared
    suspect: bool  # must live through one sampled step alone
    stop_ids: frozenset[int]
    tenant: str = ""
    slot: int = -1
    blocks: list[int] = field(default_factory=list)  # its block table, only appended to
    chain: list[bytes] = field(default_factory=list)  # hashes of its full blocks
    reason: FinishReason | None = None
    plain: bool = False  # its next output is its new token and nothing else
    reported: bool = False  # the first output has been made
    scheduled_at: float = 0.0
    num_cached: int = 0
    preemptions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # until they are reported
    pooled: Floats | None = None  # f64[H], the sum of what its rows gave
    events: list[TraceEvent] = field(default_factory=list)  # until they are reported
    wait: Wait | None = None  # its stay in the queue, where that is traced

    @staticmethod
    def of(
        request: AddRequest, *, limit: int, rank: tuple[float, ...], root: bytes | None
    ) -> Sequence:
        """A waiting sequence."""
        params = request.params
        return Sequence(
            id=request.id,
            params=params,
            tokens=array("i", request.prompt_ids + request.emitted_ids),
            num_prompt=len(request.prompt_ids),
            limit=limit,
            rank=rank,
            deadline=request.deadline,
            adapter=request.adapter,
            root=root,
            suspect=request.suspect,
            stop_ids=frozenset(params.stop_ids),
            tenant=request.tenant,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    def digests(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first `count` blocks, all of whose tokens must be known."""
        assert self.root is not None
        chain = self.chain
        for index in range(len(chain), count):
            tokens = self.tokens[index * block_size : (index + 1) * block_size]
            chain.append(chain_digest(chain[-1] if chain else self.root, tokens.tobytes()))
        return chain[:count]

    def stops_at(self, token: int) -> bool:
        """True if `token`, already appended, ends the sequence."""
        if token not in self.stop_ids:
            return False
        if self.params.grammar is not None and token in self.params.grammar.end_ids:
            return True  # the grammar was at its end and left nothing else
        return len(self.tokens) - self.num_prompt >= self.params.min_tokens

    def forget_progress(self) -> None:
        """Back to the queue: what was computed, and scored of the prompt, is to be done again."""
        self.slot = -1
        self.blocks = []
        self.pooled = None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def whole_prompt(self) -> bool:
        """True if each prompt token must be computed for it, whatever the prefix cache holds."""
        return self.prompt_logprobs is not None or self.params.pooling == "mean"

    def pool(self, data: bytes) -> None:
        """What a row with POOL gave, f32[H]."""
        values = np.frombuffer(data, np.float32).astype(np.float64)
        self.pooled = values if self.pooled is None else self.pooled + values

    def _take_pooled(self) -> bytes:
        pooled, self.pooled = self.pooled, None
        if pooled is None:
            return b""
        count = self.num_prompt if self.params.pooling == "mean" else 1
        return bytes((pooled / count).astype(np.float32).tobytes())

    def output(
        self,
        new_ids: list[int],
        *,
        logprobs: list[TokenLogprobs] | None = None,
        stop_id: int | None = None,
        error: str = "",
    ) -> SequenceOutput:
        """News of this sequence; the first and the last one carry its history too."""
        first, self.reported = not self.reported, True
        prompt_logprobs = None
        if new_ids and self.prompt_logprobs is not None:
            prompt_logprobs = self.prompt_logprobs[: self.num_prompt]
            self.prompt_logprobs = None
        self.plain = self.params.logprobs is None and not self.params.logprob_ids
        trace: tuple[TraceEvent, ...] = ()
        if self.events:
            trace = tuple(self.events)
            self.events.clear()
        return SequenceOutput(
            id=self.id,
            new_ids=new_ids,
            reason=self.reason,
            stop_id=stop_id,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached=self.num_cached if first else 0,
            scheduled_at=self.scheduled_at if first or self.reason else 0.0,
            preemptions=self.preemptions if self.reason else 0,
            error=error,
            trace=trace,
            pooled=self._take_pooled() if new_ids and self.pooled is not None else b"",
        )


@dataclass(slots=True)
class Chunk:
    """A row that computes known tokens of one sequence."""

    sequence: Sequence
    start: int
    length: int
    flags: int


@dataclass(slots=True)
class Step:
    """What the host keeps of a plan until it lands."""

    plan: StepPlan
    rows: list[Sequence]
    sampled: list[Sequence]
    slots: Slots  # of rows
    sampled_slots: Slots
    prompt_tokens: int
    chunks: list[Chunk]
    planned_at: float


def _no_slots() -> Slots:
    return np.zeros(0, np.int32)


@dataclass(slots=True)
class Draft:
    """A plan in the making: decode rows as arrays, other rows one by one."""

    budget: int  # tokens left
    now: float
    decodes: Slots = field(default_factory=_no_slots)
    starts: Slots = field(default_factory=_no_slots)  # of decodes
    pending: Slots = field(default_factory=_no_slots)  # of decodes, before this step
    chunks: list[Chunk] = field(default_factory=list)
    attached: list[tuple[int, int, int]] = field(default_factory=list)  # slot, index, block
    admits: list[Admit] = field(default_factory=list)
    tight: bool = False  # a running sequence lacked blocks: not the time to admit more

    def add_decodes(self, slots: Slots, columns: Columns) -> None:
        """One more token for each; their blocks have room for it."""
        self.decodes = slots
        self.starts = columns.computed[slots]
        self.pending = columns.pending[slots]
        self.budget -= slots.size
        columns.computed[slots] += 1
        columns.pending[slots] += 1
        columns.in_flight[slots] += 1

    def seal(self, number: int, *, epoch: int, columns: Columns, decoding: list[Sequence]) -> Step:
        """The record for the worker, and what the host keeps of it; `decoding` are the rows'."""
        # Rows of one sampled token first: to the worker they are decode rows.
        chunks = sorted(self.chunks, key=lambda c: (c.length > 1, not c.flags & SAMPLE))
        last = [c.sequence for c in chunks if c.flags & SAMPLE]
        slots = _join(self.decodes, [c.sequence.slot for c in chunks])
        rows, at, ids = self._block_columns(slots)
        unknown = self.pending > 0
        tokens = [columns.last[self.decodes[~unknown]].tobytes()]
        tokens += [c.sequence.tokens[c.start : c.start + c.length].tobytes() for c in chunks]
        plan = StepPlan(
            step=number,
            epoch=epoch,
            slots=slots.tobytes(),
            starts=_join(self.starts, [c.start for c in chunks]).tobytes(),
            lengths=_join(np.ones_like(self.decodes), [c.length for c in chunks]).tobytes(),
            flags=(SAMPLE + FROM_DEVICE * unknown.astype(np.uint8)).tobytes()
            + bytes(c.flags for c in chunks),
            tokens=b"".join(tokens),
            block_rows=rows,
            block_at=at,
            block_ids=ids,
            admits=tuple(self.admits),
        )
        return Step(
            plan=plan,
            rows=decoding + [c.sequence for c in chunks],
            sampled=decoding + last,
            slots=slots,
            sampled_slots=_join(self.decodes, [s.slot for s in last]),
            prompt_tokens=sum(c.length for c in chunks),
            chunks=chunks,
            planned_at=self.now,
        )

    def _block_columns(self, slots: Slots) -> tuple[bytes, bytes, bytes]:
        if not self.attached:
            return b"", b"", b""
        attached = np.array(self.attached, np.int32)
        row_of = np.zeros(slots.max() + 1, np.int32)
        row_of[slots] = np.arange(slots.size, dtype=np.int32)
        rows, at, ids = row_of[attached[:, 0]], attached[:, 1], attached[:, 2]
        return rows.tobytes(), at.tobytes(), ids.tobytes()


def _join(decodes: Slots, others: list[int]) -> Slots:
    return np.concatenate((decodes, np.array(others, np.int32))) if others else decodes
