"""Memory for packed weights: large regions that ask for huge pages. Next file: `native.py`."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
REGION = 32 << 20


class Arena:
    """Memory for packed weights, handed out in order from large regions; freed with its views."""

    __slots__ = ("_region", "_used")

    def __init__(self) -> None:
        self._region: Tensor | None = None
        self._used = 0

    def take(self, size: int) -> Tensor:
        """u8[size], aligned to a cache line."""
        size_aligned = -(-size // 64) * 64
        if self._region is None or self._used + size_aligned > self._region.numel():
            self._region = huge_region(max(REGION, size_aligned))
            self._used = 0
        view = self._region[self._used : self._used + size]
        self._used += size_aligned
        return view


def huge_region(size: int) -> Tensor:
    """u8[size or a little more] on a huge-page boundary; pages are taken when first written."""
    size = -(-size // HUGE_PAGE) * HUGE_PAGE
    raw = torch.empty(size + HUGE_PAGE, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE
    region = raw[start : start + size]
    # Advice only: without it the kernels are right, and slower by TLB misses.
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.madvise(region.data_ptr(), size, mmap.MADV_HUGEPAGE)
    return region
