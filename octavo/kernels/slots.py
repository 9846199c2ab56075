"""What a device does for the worker's slots each step: the table of these kernels, in plain torch.

A step reaches the device as one packed array of integers (`Layout`); `place` makes the model's
inputs of it and of the slot tables, `note` takes the sampled tokens. Plain torch is the oracle
for `triton/slots.py`, and no path of its own speed. Not for: deciding what is in a step
(`worker/staged.py`). Next file: `triton/slots.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ADMIT_WORDS = 8  # slot, temperature, top_k, top_p, min_p, low and high half of the seed, unused
SETTINGS = 4  # rows of `SlotTensors.settings`
NOT_FINITE, NO_TOKEN = 1, 2  # rows of flags in `StepTensors.out`


@dataclass(frozen=True, slots=True)
class SlotTensors:
    """Columns of all slots, on the device. Numbers of f32 are kept by their bits."""

    blocks: Tensor  # i32[slots, B]
    last_token: Tensor  # i32[slots + 1]: what is sampled for idle rows goes into the last one
    settings: Tensor  # i32[4, slots]: temperature f32, top_k i32, top_p f32, min_p f32
    seed: Tensor  # i64[slots]


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs and outputs, on the device, at addresses that never change."""

    packed: Tensor  # i32, see Layout
    ids: Tensor  # i32[T]
    positions: Tensor  # i32[T]
    slot_map: Tensor  # i32[T]
    q_indptr: Tensor  # i32[R + 1]
    kv_lens: Tensor  # i32[R]
    block_table: Tensor  # i32[R, B]
    sample_rows: Tensor  # i32[R]
    sample_slots: Tensor  # i32[R]
    settings: Tensor  # i32[4, R], as SlotTensors'
    seed: Tensor  # i64[R]
    position: Tensor  # i64[R]
    out: Tensor  # i32[3, R]: tokens, flags "not finite", flags "no token can be chosen"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of `packed` begin, in words: each follows the one before it.

    slots[R], starts[R], q_indptr[R + 1], sampled[S] (rows), tokens[T] (-1: the slot's last one),
    then `changes` new blocks as slot, index, block in three runs, then `admits` of ADMIT_WORDS.
    """

    rows: int
    tokens: int
    sampled: int
    changes: int
    admits: int

    @property
    def changes_at(self) -> int:
        """Where the new blocks begin."""
        return 3 * self.rows + 1 + self.sampled + self.tokens

    @property
    def admits_at(self) -> int:
        """Where the settings of new sequences begin."""
        return self.changes_at + 3 * self.changes

    @property
    def words(self) -> int:
        """Length of the whole."""
        return self.admits_at + ADMIT_WORDS * self.admits


@dataclass(frozen=True, slots=True)
class Paging:
    """What `place` must know of the cache."""

    block_size: int
    scratch: int  # the block that idle rows write to
    width: int  # blocks of a row that may be read in this step


@dataclass(frozen=True, slots=True)
class SlotOps:
    """The kernels by name."""

    # Writes new blocks and settings into the slots' columns.
    update: Callable[[StepTensors, SlotTensors, Layout], None]
    # Fills the step's inputs for so many rows and tokens; zeroes the flags. Each idle row has one
    # idle token while there are some; the last one has all the others. From the last sampled row on
    # the settings are those of greedy rows.
    place: Callable[[StepTensors, SlotTensors, Layout, Paging, tuple[int, int]], None]
    # Flags rows of f32[S, V] that hold a NaN or an infinity.
    check: Callable[[Tensor, StepTensors], None]
    # Tokens i32[S] go to `out` and to their slots.
    note: Callable[[Tensor, StepTensors, SlotTensors], None]


def update(step: StepTensors, slots: SlotTensors, layout: Layout) -> None:
    """See SlotOps."""
    if layout.changes:
        at = layout.changes_at
        row, index, block = step.packed[at : at + 3 * layout.changes].view(3, -1)
        slots.blocks[row.long(), index.long()] = block
    if layout.admits:
        at = layout.admits_at
        admits = step.packed[at : at + ADMIT_WORDS * layout.admits].view(-1, ADMIT_WORDS)
        slot = admits[:, 0].long()
        slots.settings[:, slot] = admits[:, 1 : 1 + SETTINGS].t()
        slots.seed.view(torch.int32).view(-1, 2)[slot] = admits[:, 5:7]
        slots.last_token[slot] = 0


def place(
    step: StepTensors, slots: SlotTensors, layout: Layout, paging: Paging, size: tuple[int, int]
) -> None:
    """See SlotOps."""
    rows, tokens = layout.rows, layout.tokens
    packed = step.packed
    slot = packed[:rows].long()
    starts = packed[rows : 2 * rows]
    indptr = packed[2 * rows : 3 * rows + 1]
    sampled = packed[3 * rows + 1 : 3 * rows + 1 + layout.sampled].long()
    given = packed[layout.changes_at - tokens : layout.changes_at]
    lengths = indptr.diff()
    owner = torch.repeat_interleave(lengths.long(), output_size=tokens)
    count = torch.arange(tokens, dtype=torch.int32, device=packed.device)
    positions = count - indptr[owner] + starts[owner]
    last = slots.last_token[slot]
    step.ids[:tokens] = torch.where(given >= 0, given, last[owner])
    step.positions[:tokens] = positions
    block = slots.blocks[slot[owner], positions.long() // paging.block_size]
    step.slot_map[:tokens] = block * paging.block_size + positions % paging.block_size
    step.q_indptr[: rows + 1] = indptr
    step.kv_lens[:rows] = starts + lengths
    step.block_table[:rows, : paging.width] = slots.blocks[slot, : paging.width]
    number = layout.sampled
    for tensor in (step.sample_rows, step.seed, step.position):
        tensor[number : size[0]] = 0
    step.settings[:, number : size[0]] = 0
    step.sample_slots[number : size[0]] = slots.settings.shape[1]
    step.sample_rows[:number] = indptr[sampled + 1] - 1
    step.sample_slots[:number] = slot[sampled].int()
    step.settings[:, :number] = slots.settings[:, slot[sampled]]
    step.seed[:number] = slots.seed[slot[sampled]]
    step.position[:number] = (starts + lengths)[sampled].long()
    step.out[1:, : size[0]] = 0
    _place_idle(step, layout, paging, size)


def _place_idle(step: StepTensors, layout: Layout, paging: Paging, size: tuple[int, int]) -> None:
    """Tokens 0 at position 0 of the scratch block."""
    rows, tokens = layout.rows, layout.tokens
    step.ids[tokens : size[1]] = 0
    step.positions[tokens : size[1]] = 0
    step.slot_map[tokens : size[1]] = paging.scratch * paging.block_size
    if size[0] == rows:
        return
    ends = torch.arange(1, size[0] - rows + 1, dtype=torch.int32, device=step.packed.device)
    ends = (tokens + ends).clamp(max=size[1])
    ends[-1] = size[1]
    step.q_indptr[rows + 1 : size[0] + 1] = ends
    step.kv_lens[rows : size[0]] = step.q_indptr[rows : size[0] + 1].diff()
    step.block_table[rows : size[0], : paging.width] = paging.scratch


def check(logits: Tensor, step: StepTensors) -> None:
    """See SlotOps."""
    step.out[NOT_FINITE, : logits.shape[0]] |= (~torch.isfinite(logits).all(dim=1)).int()


def note(tokens: Tensor, step: StepTensors, slots: SlotTensors) -> None:
    """See SlotOps."""
    rows = tokens.shape[0]
    step.out[0, :rows] = tokens
    slots.last_token[step.sample_slots[:rows].long()] = tokens


REFERENCE = SlotOps(update=update, place=place, check=check, note=note)


def slot_ops(device: str) -> SlotOps:
    """The kernels that serve a device, by its name in torch, for one set of tensors."""
    if not device.startswith("cuda"):
        return REFERENCE
    from octavo.kernels.triton.slots import triton_slots

    ops: SlotOps = triton_slots()
    return ops
