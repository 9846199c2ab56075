"""The kernels that lay a step out, against plain torch, on random steps."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest
import torch
from torch import Tensor

from octavo.kernels.slots import (
    ADMIT_WORDS,
    REFERENCE,
    SETTINGS,
    Layout,
    Paging,
    SlotTensors,
    StepTensors,
)

SLOTS, ROWS, BLOCKS, TOKENS = 19, 16, 300, 2000


def make(device: torch.device) -> tuple[StepTensors, SlotTensors]:
    def ints(*shape: int) -> Tensor:
        return torch.full(shape, -77, dtype=torch.int32, device=device)

    def longs(*shape: int) -> Tensor:
        return torch.full(shape, -77, dtype=torch.int64, device=device)

    slots = SlotTensors(
        torch.randint(0, 10**6, (SLOTS, BLOCKS), dtype=torch.int32, device=device),
        torch.randint(0, 10**5, (SLOTS + 1,), dtype=torch.int32, device=device),
        torch.randint(-(2**31), 2**31 - 1, (SETTINGS, SLOTS), dtype=torch.int32, device=device),
        torch.randint(-(2**62), 2**62, (SLOTS,), device=device),
    )
    size = TOKENS + 100
    step = StepTensors(
        ints(20000), ints(size), ints(size), ints(size), ints(ROWS + 1), ints(ROWS),
        ints(ROWS, BLOCKS), ints(ROWS), ints(ROWS), ints(SETTINGS, ROWS), longs(ROWS),
        longs(ROWS), ints(3, ROWS),
    )  # fmt: skip
    return step, slots


def clone(pair: tuple[StepTensors, SlotTensors]) -> tuple[StepTensors, SlotTensors]:
    step, slots = pair
    return (
        StepTensors(*(getattr(step, f.name).clone() for f in fields(step))),
        SlotTensors(*(getattr(slots, f.name).clone() for f in fields(slots))),
    )


def random_step(rng: random.Random, page: int) -> tuple[list[int], Layout, Paging, tuple[int, int]]:
    decodes = rng.random() < 0.4
    rows = rng.randint(1, ROWS)
    lengths = [1 if decodes else rng.choice([1, 1, 7, 300, 700]) for _ in range(rows)]
    while sum(lengths) > TOKENS:
        lengths[lengths.index(max(lengths))] = 1
    longest = BLOCKS * page
    starts = [rng.randrange(longest - length + 1) for length in lengths]
    sampled = sorted(rng.sample(range(rows), rng.randint(0, rows)))
    tokens = [rng.choice([-1, rng.randrange(10**5)]) for _ in range(sum(lengths))]
    changes, admits = rng.choice([0, 3, 200]), rng.choice([0, 2, 9])
    slots = rng.sample(range(SLOTS), rows)
    indptr = [sum(lengths[:i]) for i in range(rows + 1)]
    cells = rng.sample(range(SLOTS * BLOCKS), changes)
    words = [*slots, *starts, *indptr, *sampled, *tokens]
    words += [cell // BLOCKS for cell in cells] + [cell % BLOCKS for cell in cells]
    words += [rng.randrange(10**6) for _ in cells]
    for slot in rng.sample(range(SLOTS), admits):
        words += [slot, *(rng.randrange(-(2**31), 2**31) for _ in range(ADMIT_WORDS - 1))]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    layout = Layout(rows, sum(lengths), len(sampled), changes, admits)
    assert layout.words == len(words)
    size = (rows, sum(lengths))
    if decodes:
        more = rng.randint(0, ROWS - rows)
        size = (rows + more, sum(lengths) + more)
    elif rows < ROWS and rng.random() < 0.5:
        size = (rng.randint(rows + 1, ROWS), sum(lengths) + rng.choice([0, 1, 5, 90]))
    return words, layout, Paging(page, 10**6, -(-max(ends) // page)), size


@pytest.mark.parametrize("page", [16, 64])
def test_steps_are_laid_out_as_plain_torch_does(device: torch.device, seed: int, page: int) -> None:
    from octavo.kernels.triton.slots import triton_slots

    rng = random.Random(seed + page)
    ours = make(device)
    expected = clone(ours)
    triton = triton_slots()
    for _ in range(30):
        words, layout, paging, size = random_step(rng, page)
        packed = torch.tensor(words, dtype=torch.int32, device=device)
        logits = torch.randn(layout.sampled, 20_000, device=device)
        for row in range(layout.sampled):
            if rng.random() < 0.2:
                wrong = rng.choice([torch.nan, torch.inf, -torch.inf])
                logits[row, rng.randrange(20_000)] = wrong
        drawn = torch.randint(0, 10**5, (layout.sampled,), dtype=torch.int32, device=device)
        for ops, (step, slots) in ((triton, ours), (REFERENCE, expected)):
            step.packed[: len(words)] = packed
            ops.update(step, slots, layout)
            ops.place(step, slots, layout, paging, size)
            if layout.sampled:
                ops.check(logits, step)
                ops.note(drawn, step, slots)
        for found, wanted in zip(ours, expected, strict=True):
            for field in fields(found):  # type: ignore[arg-type]
                one, two = getattr(found, field.name), getattr(wanted, field.name)
                assert torch.equal(one, two), field.name
