"""Products of routed experts: tokens are sorted by expert, so each weight is read once if at all.

`LoopedExperts` works over any table of kernels, an expert at a time: the path of tables that have
no product of their own. `ClampedExperts` is that for experts of `ClampedForm`, in two calls of
torch's grouped product. Not for: routing (`layers/experts.py`).
Next file: `select.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import ConfigError
from octavo.kernels.ops import ClampedForm, ExpertProduct, Ops, PackedWeight


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


class ClampedExperts:
    """An ExpertProduct for experts of `ClampedForm`: two grouped products, each of all experts.

    Rows of weights must be whole units of 16 bytes, as the library reads them.
    """

    __slots__ = ("_down", "_form", "_gate_up")

    def __init__(self, gate_up: Tensor, down: Tensor, form: ClampedForm) -> None:
        """gate_up [E, 2 * I, H], down [E, H, I]."""
        check_units(gate_up, down)
        self._gate_up = gate_up.transpose(1, 2)
        self._down = down.transpose(1, 2)
        self._form = form

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """x [T, H], experts i64[T, k], weights f32[T, k] -> [T, H]."""
        form, top = self._form, experts.shape[1]
        chosen, order = experts.flatten().sort(stable=True)
        numbers = torch.arange(self._down.shape[0], device=x.device)
        ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
        inner = functional.grouped_mm(x.index_select(0, order // top), self._gate_up, offs=ends)
        inner = inner + form.gate_up_bias.index_select(0, chosen)
        middle = clamped_mul(inner, form.alpha, form.limit)
        product = functional.grouped_mm(middle, self._down, offs=ends)
        product = product + form.down_bias.index_select(0, chosen)
        scaled = product.float() * weights.flatten()[order].unsqueeze(1)
        own = torch.empty_like(scaled).index_copy_(0, order, scaled)
        return own.view(len(x), top, -1).sum(dim=1).to(x.dtype)


def clamped_mul(x: Tensor, alpha: float, limit: float) -> Tensor:
    """x [T, 2 * I], gate half then up half -> [T, I]; see `ClampedForm`."""
    gate, up = x.float().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)).to(x.dtype)


def check_units(gate_up: Tensor, down: Tensor) -> None:
    """Raises ConfigError for rows that grouped products cannot read."""
    for name, weight in (("hidden size", gate_up), ("experts' intermediate size", down)):
        unit = 16 // weight.element_size()
        if weight.shape[2] % unit:
            raise ConfigError(
                f"the {name} on one rank is {weight.shape[2]}: grouped products need a "
                f"multiple of {unit}",
                "kernels",
            )
