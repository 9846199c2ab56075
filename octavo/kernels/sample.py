"""The definition of `Ops.sample`, in plain torch; native kernels must choose the same tokens.

A row's token depends on its logits, settings, seed and position alone:

1.  Temperature 0 is greedy: the first of the greatest logits. Else z = logits / temperature, and
    a token's weight is exp(z - max z), in f64.
2.  Filters, in vLLM's order: min_p keeps weights of at least min_p (the greatest weight is 1);
    then top_k keeps the k greatest z and all that equal the least of them; then top_p keeps a
    token unless the tokens with a strictly greater z weigh top_p or more of what is left.
    Tokens with equal z stay or go together.
3.  The draw: u in [0, 1) from (seed, position); the first token, in the order of ids, at which
    the running sum of kept weights exceeds u times their sum.

A row with a NaN or without a finite maximum gives token 0; who calls reports it.
u is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied to the seed and then to the position.
Next file: `reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.ops import SampleRows

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample(logits: Tensor, rows: SampleRows) -> Tensor:
    """Logits f32[S, V], settings -> i32[S]."""
    settings = zip(
        rows.temperature.tolist(),
        rows.top_k.tolist(),
        rows.top_p.tolist(),
        rows.min_p.tolist(),
        rows.seed.tolist(),
        rows.position.tolist(),
        strict=True,
    )
    tokens = [_sample_row(logits[index], *setting) for index, setting in enumerate(settings)]
    return torch.tensor(tokens, dtype=torch.int32, device=logits.device)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), a multiple of 2^-53; seed and position are taken modulo 2^64."""
    bits = _mix(_mix(seed + _GOLDEN) + _GOLDEN * (position + 1))
    return (bits >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _sample_row(
    logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    z = logits.float()
    if temperature != 0:
        z = z / torch.tensor(temperature, dtype=torch.float32, device=z.device)
    top = z.max()
    if not torch.isfinite(top):
        return 0
    if temperature == 0:
        return int((z == top).nonzero()[0])
    weights = torch.exp(z.double() - top.double())
    kept = _keep(z, weights, top_k=top_k, top_p=top_p, min_p=min_p)
    sums = (weights * kept).cumsum(0)
    passed = (sums > uniform(seed, position) * sums[-1]) & kept
    return int(passed.nonzero()[0])


def _keep(z: Tensor, weights: Tensor, *, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens may be drawn: bool[V]."""
    kept = weights >= min_p
    if 0 < top_k < z.numel():
        remaining = torch.where(kept, z, -torch.inf)
        kept &= z >= remaining.topk(top_k).values[-1]
    if top_p < 1:
        order = torch.where(kept, z, -torch.inf).argsort(descending=True)
        sums = (weights * kept)[order].cumsum(0)
        # The first of equal values stands for them all: what is above it is above each.
        values = z[order]
        first = torch.searchsorted(-values, -values)
        above = torch.where(first > 0, sums[(first - 1).clamp(min=0)], 0.0)
        kept = kept.clone()
        kept[order] &= above < top_p * sums[-1]
    return kept
