"""How far a result is from its reference, and memory that shows what was never written."""

from __future__ import annotations

import torch
from torch import Tensor

# Relative error by norm that rounding alone explains.
_BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-6}
_FP8_STEP = 0.06  # an interpreter that cuts may be a whole step of FP8 below


def bound(device: torch.device, dtype: torch.dtype, cache: torch.dtype | None = None) -> float:
    """What a result of `dtype` over a cache of `cache` may be off. Triton's interpreter cuts
    numbers where a GPU rounds them, which doubles the error."""
    if device.type == "cuda":
        return _BOUND[dtype]
    fp8 = cache is not None and cache.itemsize == 1
    return _FP8_STEP if fp8 else 3 * _BOUND[dtype]


def distance(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in f64; NaN anywhere gives NaN."""
    wide = expected.double().cpu()
    return float((found.double().cpu() - wide).norm() / wide.norm().clamp(min=1e-30))


def poison(tensor: Tensor) -> Tensor:
    """Fills memory with NaN bytes, in place."""
    tensor.view(torch.uint8).fill_(0xFF)
    return tensor


def poison_allocator(device: torch.device, megabytes: int = 64) -> None:
    """Leaves NaN in memory that the allocator hands out next."""
    for size in (1 << 10, 1 << 16, 1 << 20, megabytes << 20):
        poison(torch.empty(size, dtype=torch.uint8, device=device))
