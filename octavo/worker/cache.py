"""Takes the memory of the KV cache, so that it becomes resident only as blocks are used.

Not for: deciding its size (`memory.py`). Next file: `slots.py`.
"""

from __future__ import annotations

import mmap
from math import prod

import torch
from torch import Tensor

from octavo.forward import CacheLayout, KVCache


def allocate_cache(layout: CacheLayout, *, num_layers: int, block_size: int) -> KVCache:
    """Pages of all layers, zero and untouched.

    Mapped from the system, which gives zero pages on first use; the allocator's own memory may hold
    old bytes, and a NaN among them would spread through masked attention (0 * NaN is NaN).
    """
    return KVCache(
        keys=tuple(_pages(layout.key, layout.dtype) for _ in range(num_layers)),
        values=tuple(_pages(layout.value, layout.dtype) for _ in range(num_layers)),
        block_size=block_size,
    )


def _pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = prod(shape)
    memory = mmap.mmap(-1, count * dtype.itemsize)  # unmapped when the tensor is gone
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
