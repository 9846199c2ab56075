"""What the tests of native kernels share: the library, or a skip with the reason."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels.cpu.binding import Library, load
from octavo.kernels.cpu.native import NativeOps
from octavo.kernels.ops import Ops

DTYPES = [torch.float32, torch.bfloat16]
# Half a unit in the last place of the result, and a little for f32 sums.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8}


def native_library(threads: int = 2) -> Library:
    library = load(threads=threads)
    if isinstance(library, str):
        pytest.skip(f"no native kernels here: {library}")
    return library


def native_ops(dtype: torch.dtype, threads: int = 2, *, int8: bool = False) -> Ops:
    library = native_library(threads)
    if library.refuse(dtype, int8=int8):
        pytest.skip(library.refuse(dtype, int8=int8))
    return NativeOps(library, dtype, int8=int8).table("under test")
