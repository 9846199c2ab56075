"""Scales that know of activations: AWQ (Lin et al. 2023, arXiv:2306.00978).

A few input channels of a layer are much larger than the rest, so rounding their weights costs most.
They are multiplied by s > 1 before rounding, and the layer before is divided by s, so that the
product stays. s is a power of the channel's mean size; the power is searched for, by the distance
between the layer's outputs and those of its plain weights. Next file: `produce.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STEPS = 20  # powers tried, from 0 on
LEAST = 1e-4


def search(
    x: Tensor, weights: Sequence[Tensor], rounded: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float, float]:
    """x f32[T, K], weights [N, K] -> (s f32[K], error with it, error without).

    `rounded` gives what a weight becomes. Errors are mean squares over tokens and outputs.
    """
    size = x.abs().mean(dim=0).clamp(min=LEAST)
    wide = torch.cat([weight.float() for weight in weights])
    exact = x @ wide.t()
    best, best_error, plain_error = torch.ones_like(size), torch.inf, torch.inf
    for step in range(STEPS):
        s = size ** (step / STEPS)
        s = s / (s.max() * s.min()).sqrt()
        found = x @ (rounded(wide * s) / s).t()
        error = float((found - exact).square().mean())
        if step == 0:
            plain_error = error
        if error < best_error:
            best, best_error = s, error
    return best, best_error, plain_error
