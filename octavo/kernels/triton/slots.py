"""Slots on the GPU: a step's inputs from one packed array, its tokens back into the slots.

Same results as `octavo/kernels/slots.py`, which says what everything is; one launch each. Integers
that change from step to step are not specialized, or each new value would be compiled anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from octavo.kernels.slots import (
    ADMIT_WORDS,
    NOT_FINITE,
    Layout,
    Paging,
    SlotOps,
    SlotTensors,
    StepTensors,
)
from octavo.kernels.triton.launch import Repeated, divide_up, pdl

TURN = 256  # tokens or blocks of one turn of a program
ENTRIES = 128  # of a list that one program works off
CHUNK = 8192  # logits that one program looks at


@triton.jit(do_not_specialize=["changes", "admits", "changes_at", "admits_at"])
def update_kernel(
    packed_ptr,
    blocks_ptr,  # [slots, B]
    last_token_ptr,
    settings_ptr,  # [4, slots]
    seed_ptr,  # i32[slots, 2]
    changes,
    admits,
    changes_at,
    admits_at,
    num_slots,
    B,
    ADMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entry i of both lists, BLOCK of them a program."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < changes
    at = packed_ptr + changes_at + i
    slot = tl.load(at, mask=there, other=0).to(tl.int64)
    index = tl.load(at + changes, mask=there, other=0)
    block = tl.load(at + 2 * changes, mask=there, other=0)
    tl.store(blocks_ptr + slot * B + index, block, mask=there)
    there = i < admits
    at = packed_ptr + admits_at + i * ADMIT
    slot = tl.load(at, mask=there, other=0)
    for word in tl.static_range(4):
        value = tl.load(at + 1 + word, mask=there, other=0)
        tl.store(settings_ptr + word * num_slots + slot, value, mask=there)
    for word in tl.static_range(2):
        value = tl.load(at + 5 + word, mask=there, other=0)
        tl.store(seed_ptr + 2 * slot + word, value, mask=there)
    tl.store(last_token_ptr + slot, tl.zeros_like(slot), mask=there)


@triton.jit(
    do_not_specialize=["rows", "sampled", "tokens", "all_rows", "all_tokens", "scratch", "width"]
)
def place_kernel(
    packed_ptr,
    blocks_ptr,  # [slots, B]
    last_token_ptr,
    slot_settings_ptr,  # [4, slots]
    slot_seed_ptr,
    ids_ptr,
    positions_ptr,
    slot_map_ptr,
    indptr_ptr,
    kv_lens_ptr,
    table_ptr,  # [R, B]
    sample_rows_ptr,
    sample_slots_ptr,
    settings_ptr,  # [4, R]
    seed_ptr,
    position_ptr,
    out_ptr,
    rows,
    sampled,
    tokens,
    all_rows,
    all_tokens,
    scratch,
    width,
    num_slots,
    max_rows,
    B,
    P: tl.constexpr,
    TURN: tl.constexpr,
):
    """Program r: row r, idle from `rows` on, and the r-th sampled row."""
    r = tl.program_id(0)
    lane = tl.arange(0, TURN)
    real = r < rows
    slot = tl.load(packed_ptr + r, mask=real, other=0).to(tl.int64)
    start = tl.load(packed_ptr + rows + r, mask=real, other=0)
    first = tl.load(packed_ptr + 2 * rows + r, mask=real, other=0)
    last = tl.load(packed_ptr + 2 * rows + r + 1, mask=real, other=0)
    idle = tl.minimum(tokens + r - rows, all_tokens)
    first = tl.where(real, first, idle)
    last = tl.where(real, last, tl.minimum(idle + 1, all_tokens))
    last = tl.where((r >= rows) & (r == all_rows - 1), all_tokens, last)
    if r == 0:
        tl.store(indptr_ptr, 0)
    tl.store(indptr_ptr + r + 1, last)
    tl.store(kv_lens_ptr + r, start + last - first)
    for low in range(0, width, TURN):
        index = low + lane
        block = tl.load(blocks_ptr + slot * B + index, mask=(index < width) & real, other=0)
        block = tl.where(real, block, scratch)
        tl.store(table_ptr + r.to(tl.int64) * B + index, block, mask=index < width)
    given_ptr = packed_ptr + 3 * rows + 1 + sampled
    newest = tl.load(last_token_ptr + slot)
    for low in range(first, last, TURN):
        token = low + lane
        inside = token < last
        position = tl.where(real, start + token - first, 0)
        given = tl.load(given_ptr + token, mask=inside & real, other=-1)
        given = tl.where(given >= 0, given, newest)
        given = tl.where(real, given, 0)
        block = tl.load(blocks_ptr + slot * B + position // P, mask=inside & real, other=0)
        block = tl.where(real, block, scratch)
        tl.store(ids_ptr + token, given, mask=inside)
        tl.store(positions_ptr + token, position, mask=inside)
        tl.store(slot_map_ptr + token, block * P + position % P, mask=inside)
    if r < sampled:
        row = tl.load(packed_ptr + 3 * rows + 1 + r)
        own = tl.load(packed_ptr + row)
        begin = tl.load(packed_ptr + 2 * rows + row)
        end = tl.load(packed_ptr + 2 * rows + row + 1)
        tl.store(sample_rows_ptr + r, end - 1)
        tl.store(sample_slots_ptr + r, own)
        for word in tl.static_range(4):
            value = tl.load(slot_settings_ptr + word * num_slots + own)
            tl.store(settings_ptr + word * max_rows + r, value)
        tl.store(seed_ptr + r, tl.load(slot_seed_ptr + own))
        ends = tl.load(packed_ptr + rows + row) + end - begin
        tl.store(position_ptr + r, ends.to(tl.int64))
    else:
        tl.store(sample_rows_ptr + r, 0)
        tl.store(sample_slots_ptr + r, num_slots)
        for word in tl.static_range(4):
            tl.store(settings_ptr + word * max_rows + r, 0)
        tl.store(seed_ptr + r, tl.zeros([], tl.int64))
        tl.store(position_ptr + r, tl.zeros([], tl.int64))
    tl.store(out_ptr + max_rows + r, 0)
    tl.store(out_ptr + 2 * max_rows + r, 0)


@triton.jit
def check_kernel(logits_ptr, flags_ptr, V, BLOCK: tl.constexpr):
    """Flags row `program_id(0)` if one of its chunk of logits is not finite."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits_ptr + row.to(tl.int64) * V + column, mask=column < V, other=0.0)
    wrong = tl.where(tl.abs(value) < float("inf"), 0, 1)
    if tl.max(wrong, 0) > 0:
        tl.store(flags_ptr + row, 1)


@triton.jit(do_not_specialize=["rows"])
def note_kernel(
    tokens_ptr, out_ptr, slots_ptr, last_token_ptr, rows, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Tokens to `out` and to the last tokens of their slots."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < rows
    token = tl.load(tokens_ptr + i, mask=inside, other=0)
    slot = tl.load(slots_ptr + i, mask=inside, other=0)
    tl.store(out_ptr + i, token, mask=inside)
    tl.store(last_token_ptr + slot, token, mask=inside)


class Launches:
    """`update` and `place` of one set of tensors; see SlotOps."""

    def __init__(self) -> None:
        self._update: Repeated | None = None
        self._place: Repeated | None = None

    def update(self, step: StepTensors, slots: SlotTensors, layout: Layout) -> None:
        """See SlotOps."""
        count = max(layout.changes, layout.admits)
        if count == 0:
            return
        if self._update is None:
            self._update = _update_of(step, slots)
        self._update(
            divide_up(count, ENTRIES),
            layout.changes,
            layout.admits,
            layout.changes_at,
            layout.admits_at,
        )

    def place(
        self,
        step: StepTensors,
        slots: SlotTensors,
        layout: Layout,
        paging: Paging,
        size: tuple[int, int],
    ) -> None:
        """See SlotOps. The size of blocks is that of the first call."""
        if self._place is None:
            self._place = _place_of(step, slots, paging.block_size)
        self._place(
            size[0],
            layout.rows,
            layout.sampled,
            layout.tokens,
            *size,
            paging.scratch,
            paging.width,
        )


def _update_of(step: StepTensors, slots: SlotTensors) -> Repeated:
    tensors = (
        step.packed,
        slots.blocks,
        slots.last_token,
        slots.settings,
        slots.seed.view(torch.int32),
    )
    sizes = (slots.settings.shape[1], slots.blocks.shape[1])
    return Repeated(update_kernel, tensors, *sizes, ADMIT_WORDS, ENTRIES)


def _place_of(step: StepTensors, slots: SlotTensors, block_size: int) -> Repeated:
    tensors = (
        step.packed,
        slots.blocks,
        slots.last_token,
        slots.settings,
        slots.seed,
        step.ids,
        step.positions,
        step.slot_map,
        step.q_indptr,
        step.kv_lens,
        step.block_table,
        step.sample_rows,
        step.sample_slots,
        step.settings,
        step.seed,
        step.position,
        step.out,
    )
    sizes = (slots.settings.shape[1], step.kv_lens.shape[0], slots.blocks.shape[1])
    return Repeated(place_kernel, tensors, *sizes, block_size, TURN)


def check(logits: Tensor, step: StepTensors) -> None:
    """See SlotOps."""
    rows, size = logits.shape
    check_kernel[(rows, triton.cdiv(size, CHUNK))](
        logits, step.out[NOT_FINITE], size, BLOCK=CHUNK, num_warps=8
    )


def note(tokens: Tensor, step: StepTensors, slots: SlotTensors) -> None:
    """See SlotOps."""
    rows = tokens.shape[0]
    note_kernel[(triton.cdiv(rows, ENTRIES),)](
        tokens,
        step.out,
        step.sample_slots,
        slots.last_token,
        rows,
        BLOCK=ENTRIES,
        **pdl(tokens.device),
    )


def triton_slots() -> SlotOps:
    """The table for one set of `StepTensors` and `SlotTensors`, whichever its first call names."""
    own = Launches()
    return SlotOps(update=own.update, place=own.place, check=check, note=note)
