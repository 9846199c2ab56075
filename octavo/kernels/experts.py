"""Products of routed experts over any table of kernels: an expert at a time, over its own tokens.

Tokens are sorted by expert, so each weight that is needed is read once and no other is read. The
path of the CPU, where a step touches few experts and a call costs little. Not for: routing
(`layers/experts.py`), or devices where the host must not ask which experts were chosen.
Next file: `select.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.kernels.ops import ExpertProduct, Ops, PackedWeight


def looped(ops: Ops) -> Callable[[Tensor, Tensor], ExpertProduct]:
    """What `Ops.experts` is where a table has none of its own: made of its `pack` and `linear`."""

    def make(gate_up: Tensor, down: Tensor) -> ExpertProduct:
        return LoopedExperts(ops, gate_up, down)

    return make


class LoopedExperts:
    """An ExpertProduct with a packed weight of each expert.

    A token's result is summed in the order of its experts' numbers, so that it does not depend on
    the other tokens of the step.
    """

    __slots__ = ("_down", "_gate_up", "_ops")

    def __init__(self, ops: Ops, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [E, 2 * I, H], down [E, H, I]."""
        self._ops = ops
        self._gate_up = tuple(ops.pack(one) for one in gate_up)
        self._down = tuple(ops.pack(one) for one in down)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts i64[T, k], weights f32[T, k] -> [T, H]."""
        top = experts.shape[1]
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        tokens = order // top
        scale = weights.flatten()[order].unsqueeze(1)
        counts = torch.bincount(flat, minlength=len(self._down)).tolist()
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        start = 0
        for expert, count in enumerate(counts):
            if not count:
                continue
            mine = tokens[start : start + count]
            product = self._one(x.index_select(0, mine), expert)
            out.index_add_(0, mine, product * scale[start : start + count])
            start += count
        return out.to(x.dtype)

    def _one(self, x: Tensor, expert: int) -> Tensor:
        """Expert's MLP, f32."""
        gate_up: PackedWeight = self._gate_up[expert]
        if self._ops.linear_silu is not None:
            inner = self._ops.linear_silu(x, gate_up, None)
        else:
            inner = self._ops.silu_mul(self._ops.linear(x, gate_up, None, None))
        return self._ops.linear(inner, self._down[expert], None, torch.float32)
