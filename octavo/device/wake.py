"""Makes a GPU's context while this process still imports: a third of a second, and torch waits.

Knows only the driver's library, not torch. Not for: whether the GPU can be used, which `cuda.py`
says. Next file: `cuda.py`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

DRIVER = "libcuda.so.1"


def kernels_folder(cache_dir: str) -> Path:
    """Where compiled kernels are kept."""
    return Path(cache_dir) / "triton"


def has_kernels(cache_dir: str | None) -> bool:
    """False if all kernels are still to be compiled."""
    return cache_dir is None or kernels_folder(cache_dir).is_dir()


def wake(index: int) -> bool:
    """Makes the primary context of GPU `index`, which torch will find; False if that fails.

    Why it failed is told when torch tries. The context is this process's until it ends.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return bool(
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )
