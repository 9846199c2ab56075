"""Products of few rows by the kernel for Hopper, its operations replaced: one process, one seed.

Random shapes and cuts against the product in f32: python -m tests.gpu.skinny_on_cpu SEED
"""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import torch

from tests.gpu import gluon

TRIALS = 24


def main(seed: int) -> None:
    """Prints each trial; fails at the first that is wrong."""
    random = Random(seed)
    torch.manual_seed(seed)
    kernels: list[gluon.Kernel] = []
    gluon.install(lambda: kernels[0])
    from octavo.kernels.triton import skinny

    kernels.append(gluon.Kernel(skinny.skinny_kernel, random))
    skinny.skinny_kernel = kernels[0]
    skinny.range = gluon.counted
    room = skinny._room_of(torch.device("cpu"))
    for _ in range(TRIALS):
        processors = random.choice([5, 13, 40])
        skinny.gpu_of = lambda _, count=processors: SimpleNamespace(processors=count)
        count = random.choice([2, 5, 16, 17, 33, 64, 70, 130, 200])
        rows = random.choice([48, 130, 384])
        columns = random.choice([64, 136, 584, 1024, 9000 if rows < 384 else 72])
        silu, bias = random.random() < 0.4, random.random() < 0.5
        outputs = rows // 2 if silu else rows
        cut = skinny.cut_of(count, outputs, columns, processors, gated=silu)
        if random.random() < 0.3:
            cut = replace(cut, span=random.randint(4, 20), line=count <= skinny.FEW)
        if silu and random.random() < 0.7:
            cut = replace(cut, columns=skinny.JOINED_COLUMNS, joined=True)
        print(count, rows, columns, silu, bias, processors, cut, flush=True)
        x = torch.randn(count, columns).bfloat16()
        weight = (torch.randn(rows, columns) * columns**-0.5).bfloat16()
        shift = torch.randn(rows).bfloat16() if bias else None
        room.partial.fill_(torch.nan)
        found = skinny.skinny(x, weight, shift, silu=silu, cut=cut).float()
        expected = x.float() @ weight.float().t()
        if shift is not None:
            expected += shift.float()
        if silu:
            expected = torch.nn.functional.silu(expected[:, :outputs]) * expected[:, outputs:]
        assert float((found - expected).norm() / expected.norm()) < 1e-2
        assert not room.arrived.any(), "programs have to leave their counters at 0"


if __name__ == "__main__":
    main(int(sys.argv[1]))
