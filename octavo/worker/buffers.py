"""Inputs: lays a plan's numbers out as the model wants them (`ForwardBatch`).

`HostInputs` does so for a model on the CPU, in memory taken once and reused. Not for: state that
outlives a step, which is in `slots.py`, or devices with memory of their own (`staged.py`).
Next file: `runner.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.forward import ForwardBatch, KVCache
from octavo.types import FROM_DEVICE, SAMPLE, StepPlan
from octavo.worker.slots import HostSlots, Ints


@dataclass(frozen=True, slots=True)
class StepRows:
    """A plan's rows as arrays, and which of them are sampled."""

    slots: Ints  # [R]
    starts: Ints  # [R]
    lengths: Ints  # [R]
    flags: NDArray[np.uint8]  # [R]
    ends: Ints  # [R] position after the row's last token
    sampled: NDArray[np.intp]  # [S] rows with SAMPLE
    num_tokens: int
    longest: int  # tokens of the longest row


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a batch holds: a plan's own rows and tokens, and idle ones after them."""

    rows: int
    tokens: int


def read_rows(plan: StepPlan) -> StepRows:
    """Views of a plan's packed columns."""
    starts = np.frombuffer(plan.starts, np.int32)
    lengths = np.frombuffer(plan.lengths, np.int32)
    flags = np.frombuffer(plan.flags, np.uint8)
    return StepRows(
        slots=np.frombuffer(plan.slots, np.int32),
        starts=starts,
        lengths=lengths,
        flags=flags,
        ends=starts + lengths,
        sampled=np.flatnonzero(flags & SAMPLE),
        num_tokens=int(lengths.sum()),
        longest=int(lengths.max()),
    )


class _Column:
    """A persistent i32 array and the tensor over the same memory."""

    __slots__ = ("array", "tensor")

    def __init__(self, size: int) -> None:
        self.array: Ints = np.zeros(size, np.int32)
        self.tensor = torch.from_numpy(self.array)


class Inputs(Protocol):
    """Where a step's inputs are made, and what must be noted of its plan for that."""

    def fill(self, plan: StepPlan, rows: StepRows, size: StepSize) -> tuple[Tensor, ForwardBatch]:
        """Input ids i32[T] and the batch, of `size`; all after the plan's own rows is idle.

        Takes note of the plan's admits and blocks. Both are valid until the next call.
        """


class HostInputs:
    """Room for `max_tokens` tokens of `max_rows` rows with `max_blocks` blocks each."""

    def __init__(
        self, slots: HostSlots, kv: KVCache, *, max_tokens: int, max_rows: int, max_blocks: int
    ) -> None:
        self._slots = slots
        self._kv = kv
        self.max_tokens = max_tokens
        self.max_rows = max_rows
        self._ids = _Column(max_tokens)
        self._positions = _Column(max_tokens)
        self._slot_map = _Column(max_tokens)
        self._indptr = _Column(max_rows + 1)
        self._kv_lens = _Column(max_rows)
        self._table = _Column(max_rows * max_blocks)
        self._sample_rows = _Column(max_rows)
        self._count = np.arange(max(max_tokens, max_rows), dtype=np.int32)

    def fill(self, plan: StepPlan, rows: StepRows, size: StepSize) -> tuple[Tensor, ForwardBatch]:
        """See `Inputs`; there are no idle rows."""
        slots, kv = self._slots, self._kv
        if plan.block_ids:
            slots.attach(
                rows.slots[np.frombuffer(plan.block_rows, np.int32)],
                np.frombuffer(plan.block_at, np.int32),
                np.frombuffer(plan.block_ids, np.int32),
            )
        num_rows = len(rows.slots)
        assert size.rows == num_rows, (size, num_rows)
        num_tokens = rows.num_tokens
        assert 0 < num_rows <= self.max_rows, (num_rows, self.max_rows)
        assert num_tokens <= self.max_tokens, (num_tokens, self.max_tokens)
        longest = rows.longest
        max_kv = int(rows.ends.max())
        width = -(-max_kv // kv.block_size)

        indptr = self._indptr.array
        np.cumsum(rows.lengths, out=indptr[1 : num_rows + 1])
        self._kv_lens.array[:num_rows] = rows.ends
        table = self._table.array[: num_rows * width].reshape(num_rows, width)
        table[:] = slots.blocks[rows.slots, :width]
        self._place(rows, table, num_tokens=num_tokens, block_size=kv.block_size)
        self._fill_ids(plan, rows, slots, num_tokens)
        num_sampled = len(rows.sampled)
        np.subtract(indptr[rows.sampled + 1], 1, out=self._sample_rows.array[:num_sampled])

        batch = ForwardBatch(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_decodes=num_rows if longest == 1 else int(np.argmax(rows.lengths != 1)),
            positions=self._positions.tensor[:num_tokens],
            slot_map=self._slot_map.tensor[:num_tokens],
            q_indptr=self._indptr.tensor[: num_rows + 1],
            kv_lens=self._kv_lens.tensor[:num_rows],
            block_table=self._table.tensor[: num_rows * width].view(num_rows, width),
            sample_rows=self._sample_rows.tensor[:num_sampled],
            max_q=longest,
            max_kv=max_kv,
            kv=kv,
        )
        return self._ids.tensor[:num_tokens], batch

    def _place(self, rows: StepRows, table: Ints, *, num_tokens: int, block_size: int) -> None:
        """Positions of all tokens and where their KV goes."""
        positions = self._positions.array[:num_tokens]
        num_rows = len(rows.slots)
        if num_tokens == num_rows:
            positions[:] = rows.starts
            owner = self._count[:num_rows]
        else:
            first = rows.starts - self._indptr.array[:num_rows]
            owner = np.repeat(self._count[:num_rows], rows.lengths)
            np.add(self._count[:num_tokens], first[owner], out=positions)
        page, offset = np.divmod(positions, np.int32(block_size))
        slot_map = self._slot_map.array[:num_tokens]
        np.multiply(table[owner, page], np.int32(block_size), out=slot_map)
        slot_map += offset

    def _fill_ids(self, plan: StepPlan, rows: StepRows, slots: HostSlots, num_tokens: int) -> None:
        ids = self._ids.array[:num_tokens]
        given = np.frombuffer(plan.tokens, np.int32)
        if len(given) == num_tokens:
            ids[:] = given
            return
        known = np.ones(num_tokens, np.bool_)
        from_device = np.flatnonzero(rows.flags & FROM_DEVICE)
        at = self._indptr.array[from_device]
        known[at] = False
        ids[at] = slots.last_token[rows.slots[from_device]]
        ids[known] = given
