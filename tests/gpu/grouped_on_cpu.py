"""Experts' products by the kernel for Hopper, its operations replaced: one process, one seed.

Random shapes and numbers of tokens against the product in f32:
python -m tests.gpu.grouped_on_cpu SEED
"""

from __future__ import annotations

import sys
from random import Random
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.gpu import gluon

TRIALS = 24


def main(seed: int) -> None:
    """Prints each trial; fails at the first that is wrong."""
    random = Random(seed)
    torch.manual_seed(seed)
    kernels: list[gluon.Kernel] = []
    gluon.install(lambda: kernels[0])
    from octavo.kernels.triton import grouped
    from octavo.kernels.triton.pairs import Shared, Sorted

    kernels.append(gluon.Kernel(grouped.grouped_kernel, random))
    grouped.grouped_kernel = kernels[0]
    grouped.range = gluon.counted
    for _ in range(TRIALS):
        processors = random.choice([1, 5, 13])
        grouped.gpu_of = lambda _, count=processors: SimpleNamespace(processors=count)
        count, top = random.choice([3, 8, 20]), random.choice([1, 2, 3])
        tokens, number = random.choice([1, 2, 9, 40]), random.choice([0, 0, 1, 2])
        outputs, columns = random.choice([64, 128, 192]), random.choice([128, 256, 1024])
        rows, silu = random.choice([16, 32, 64, 128]), random.random() < 0.5
        if number == 0:
            outputs += random.choice([-16, 0, 8])
            columns += random.choice([-88, 0, 8])
        print(processors, count, top, tokens, number, outputs, columns, rows, silu, flush=True)
        experts = torch.stack([torch.randperm(count)[:top] for _ in range(tokens)])
        more = torch.arange(count, count + number).expand(tokens, number)
        chosen, order = torch.cat((experts, more), dim=1).flatten().sort(stable=True)
        size = 2 * outputs if silu else outputs
        weight = (torch.randn(count + number, size, columns) * columns**-0.5).bfloat16()
        own = torch.randn(tokens, columns).bfloat16()
        x = own[order // (top + number)] if silu else torch.randn(len(order), columns).bfloat16()
        scale = torch.rand(len(order))
        tiles = tiles_of(chosen, count + number, rows)
        found = Sorted(order, order, scale, order, tiles, x, tokens, count, top, number)
        shared = None
        if number:
            extra = weight[count:]
            gate_up = extra.view(number, -1, outputs, columns).transpose(0, 1).reshape(-1, columns)
            down = extra.transpose(0, 1).reshape(size, -1)
            shared = Shared(gate_up.contiguous(), down.contiguous(), number)
        given = x[: tokens * top] if silu else x
        out = grouped.grouped(
            given, weight[:count], found, tile_rows=rows, silu=silu, own=own, shared=shared
        ).float()
        expected = torch.stack([weight[e].float() @ x[i].float() for i, e in enumerate(chosen)])
        if silu:
            gate, up = expected.split(outputs, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        else:
            expected *= scale[:, None]
        assert float((out - expected).norm() / expected.norm()) < 1e-2


def tiles_of(chosen: Tensor, count: int, rows: int) -> Tensor:
    """The tiles of sorted experts i64[A], as the sort lists them."""
    from octavo.kernels.triton.pairs import tile_room

    room = tile_room(len(chosen), count, rows)
    tiles = torch.full((3 * room + 1,), 1 << 20)
    number = start = 0
    for expert, length in enumerate(torch.bincount(chosen, minlength=count).tolist()):
        for first in range(start, start + length, rows):
            tiles[number], tiles[room + number] = expert, first
            tiles[2 * room + number] = start + length
            number += 1
        start += length
    tiles[3 * room] = number
    return tiles


if __name__ == "__main__":
    main(int(sys.argv[1]))
