"""Slots and inputs on a device with memory of its own: one copy a step, and kernels do the rest.

A plan's integers are packed into one array of staging memory, copied at once, and spread out on the
device, where block tables, last tokens and settings of all slots live. So a step that is planned
before the one before it has ended reads its tokens there. The device does its work in order: its
input tensors are written for the next step only after this step has read them. Staging memory the
host may write anew once the copy from it is done, which an event tells; two take turns.
Not for: the CPU, whose model reads what the host writes (`buffers.py`). Next file:
`staged_choose.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.device.base import Device, Event
from octavo.forward import ForwardBatch, KVCache
from octavo.kernels.ops import SampleRows
from octavo.kernels.slots import (
    ADMIT_WORDS,
    SETTINGS,
    Layout,
    Paging,
    SlotOps,
    SlotTensors,
    StepTensors,
)
from octavo.types import FROM_DEVICE, Admit, StepPlan, TokenParams
from octavo.worker.buffers import StepRows, StepSize
from octavo.worker.slots import Ints

TURNS = 2
KEPT_TOKENS = 1024  # of batches whose views are kept: graphs have few sizes, and none is larger


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest step."""

    max_tokens: int
    max_rows: int
    max_blocks: int  # of a row
    max_length: int  # of a row, in tokens
    num_slots: int


class Staging:
    """Staging memory and the event of the last copy from it."""

    __slots__ = ("array", "event", "tensor")

    def __init__(self, device: Device, words: int) -> None:
        self.tensor = device.staging(words)
        self.array: Ints = self.tensor.numpy()
        self.event: Event | None = None


class StagedInputs:
    """Inputs on a device. `tensors` and `slots` are shared with the chooser."""

    def __init__(self, device: Device, ops: SlotOps, kv: KVCache, limits: Limits) -> None:
        """The last block of `kv` is for idle rows: no plan may name it."""
        self._device = device
        self._ops = ops
        self._kv = kv
        self._limits = limits
        self._scratch = kv.keys[0].shape[0] - 1
        rows, tokens = limits.max_rows, limits.max_tokens + limits.max_rows
        # As many new blocks as tokens need, and one more a row.
        changes = limits.max_tokens // kv.block_size + 2 * rows
        words = Layout(rows, limits.max_tokens, rows, changes, limits.num_slots).words
        self._staging = [Staging(device, words) for _ in range(TURNS)]
        self._turn = 0
        self._filtered = np.zeros(limits.num_slots, np.bool_)
        self._lens: Ints = np.ones(rows, np.int32)

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device.name)

        def longs(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device.name)

        self.slots = SlotTensors(
            blocks=ints(limits.num_slots, limits.max_blocks),
            last_token=ints(limits.num_slots + 1),
            settings=ints(SETTINGS, limits.num_slots),
            seed=longs(limits.num_slots),
        )
        self.tensors = StepTensors(
            packed=ints(words),
            ids=ints(tokens),
            positions=ints(tokens),
            slot_map=ints(tokens),
            q_indptr=ints(rows + 1),
            kv_lens=ints(rows),
            block_table=ints(rows, limits.max_blocks),
            sample_rows=ints(rows),
            sample_slots=ints(rows),
            settings=ints(SETTINGS, rows),
            seed=longs(rows),
            position=longs(rows),
            out=ints(3, rows),
        )
        self._templates: dict[tuple[int, int], ForwardBatch] = {}

    def fill(self, plan: StepPlan, rows: StepRows, size: StepSize) -> tuple[Tensor, ForwardBatch]:
        """See `Inputs`. Gives the device a copy and one or two kernels to do."""
        layout = Layout(
            rows=len(rows.slots),
            tokens=rows.num_tokens,
            sampled=len(rows.sampled),
            changes=len(plan.block_ids) // 4,
            admits=len(plan.admits),
        )
        assert 0 < layout.rows <= size.rows <= self._limits.max_rows, (layout, size)
        assert layout.tokens <= self._limits.max_tokens, (layout, self._limits)
        staging = self._next_staging()
        self._pack(staging.array, plan, rows, layout)
        step, words = self.tensors, layout.words
        self._device.copy(step.packed[:words], staging.tensor[:words])
        staging.event = self._device.mark(staging.event)
        if layout.changes or layout.admits:
            self._ops.update(step, self.slots, layout)
        max_kv = int(rows.ends.max())
        longest = max(max_kv, size.tokens - layout.tokens)  # an idle row may be longer
        width = -(-longest // self._kv.block_size)
        assert width <= self._limits.max_blocks, (size, layout)
        paging = Paging(self._kv.block_size, self._scratch, width)
        self._ops.place(step, self.slots, layout, paging, (size.rows, size.tokens))
        lens = self._lens[: size.rows]
        lens[: layout.rows] = rows.ends
        lens[layout.rows :] = 1
        return self._batch(rows, layout, size, max_kv=max_kv, lens=lens.copy())

    def filtered(self, rows: StepRows) -> bool:
        """True if a sampled row has top_k, top_p or min_p set."""
        return bool(self._filtered[rows.slots[rows.sampled]].any())

    def settings(self, number: int, *, filtered: bool) -> SampleRows:
        """Settings of the first `number` sampled rows of the plan that was filled last."""
        step = self.tensors
        floats = step.settings.view(torch.float32)
        return SampleRows(
            temperature=floats[0, :number],
            top_k=step.settings[1, :number],
            top_p=floats[2, :number],
            min_p=floats[3, :number],
            seed=step.seed[:number],
            position=step.position[:number],
            filtered=filtered,
        )

    def idle(self, size: StepSize, *, decode: bool) -> tuple[Tensor, ForwardBatch]:
        """Ids and batch of idle rows at the addresses of every step of `size`.

        Rows are all decode rows, of one token, or all are not.
        """
        step = self.tensors
        ends = torch.arange(size.rows + 1, dtype=torch.int32).clamp(max=size.tokens)
        ends[-1] = size.tokens
        step.ids[: size.tokens] = 0
        step.positions[: size.tokens] = 0
        step.slot_map[: size.tokens] = self._scratch * self._kv.block_size
        step.q_indptr[: size.rows + 1] = ends
        step.kv_lens[: size.rows] = ends.diff()
        step.block_table[: size.rows] = self._scratch
        step.settings[:, : size.rows] = 0
        step.sample_slots[: size.rows] = self._limits.num_slots
        step.sample_rows[: size.rows] = 0
        batch = self._view(size)
        if not decode:
            sampled = step.sample_rows[: size.rows]
            batch = replace(batch, num_decodes=0, max_q=size.tokens, sample_rows=sampled)
        return step.ids[: size.tokens], batch

    def _next_staging(self) -> Staging:
        staging = self._staging[self._turn]
        self._turn = (self._turn + 1) % TURNS
        if staging.event is not None:
            staging.event.synchronize()
        return staging

    def _pack(self, array: Ints, plan: StepPlan, rows: StepRows, layout: Layout) -> None:
        number, at = layout.rows, 3 * layout.rows + 1
        array[:number] = rows.slots
        array[number : 2 * number] = rows.starts
        array[2 * number] = 0
        np.cumsum(rows.lengths, out=array[2 * number + 1 : at])
        array[at : at + layout.sampled] = rows.sampled
        at += layout.sampled
        self._pack_tokens(array[at : at + layout.tokens], plan, rows, array[2 * number :])
        at = layout.changes_at
        if layout.changes:
            changes = array[at : layout.admits_at].reshape(3, layout.changes)
            changes[0] = rows.slots[np.frombuffer(plan.block_rows, np.int32)]
            changes[1] = np.frombuffer(plan.block_at, np.int32)
            changes[2] = np.frombuffer(plan.block_ids, np.int32)
        if plan.admits:
            admits = array[layout.admits_at : layout.words].reshape(-1, ADMIT_WORDS)
            for admit, words in zip(plan.admits, admits, strict=True):
                _pack_admit(words, admit)
                self._filtered[admit.slot] = _has_filter(admit.params)

    def _pack_tokens(self, out: Ints, plan: StepPlan, rows: StepRows, indptr: Ints) -> None:
        given = np.frombuffer(plan.tokens, np.int32)
        if len(given) == len(out):
            out[:] = given
            return
        out[:] = -1
        if len(given):
            known = np.ones(len(out), np.bool_)
            known[indptr[np.flatnonzero(rows.flags & FROM_DEVICE)]] = False
            out[known] = given

    def _batch(
        self, rows: StepRows, layout: Layout, size: StepSize, *, max_kv: int, lens: Ints
    ) -> tuple[Tensor, ForwardBatch]:
        view = self._view(size)
        decodes = size.rows if rows.longest == 1 else int(np.argmax(rows.lengths != 1))
        batch = ForwardBatch(
            num_rows=size.rows,
            num_tokens=size.tokens,
            num_decodes=decodes,
            positions=view.positions,
            slot_map=view.slot_map,
            q_indptr=view.q_indptr,
            kv_lens=view.kv_lens,
            block_table=view.block_table,
            sample_rows=self.tensors.sample_rows[: layout.sampled],
            max_q=rows.longest,
            max_kv=max_kv,
            kv=self._kv,
            kv_lens_host=lens,
        )
        return self.tensors.ids[: size.tokens], batch

    def _view(self, size: StepSize) -> ForwardBatch:
        """Views of the tensors; those of small steps are kept, as making them takes a while."""
        tokens = size.tokens
        known = self._templates.get((size.rows, tokens))
        if known is not None:
            return known
        step = self.tensors
        view = ForwardBatch(
            num_rows=size.rows,
            num_tokens=tokens,
            num_decodes=size.rows,
            positions=step.positions[:tokens],
            slot_map=step.slot_map[:tokens],
            q_indptr=step.q_indptr[: size.rows + 1],
            kv_lens=step.kv_lens[: size.rows],
            block_table=step.block_table[: size.rows],
            sample_rows=step.sample_rows[:0],
            max_q=1,
            max_kv=self._limits.max_blocks * self._kv.block_size,
            kv=self._kv,
        )
        if tokens <= KEPT_TOKENS and len(self._templates) < KEPT_TOKENS:
            self._templates[size.rows, tokens] = view
        return view


def _has_filter(params: TokenParams) -> bool:
    return bool(params.top_k or params.top_p < 1 or params.min_p)


def _pack_admit(words: NDArray[np.int32], admit: Admit) -> None:
    params = admit.params
    floats = words.view(np.float32)
    words[0] = admit.slot
    floats[1] = params.temperature
    words[2] = params.top_k
    floats[3] = params.top_p
    floats[4] = params.min_p
    words[5:7].view(np.uint64)[0] = params.seed
    words[7] = 0
