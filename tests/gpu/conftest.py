"""The device of these tests: a GPU, or Triton's interpreter if `TRITON_INTERPRET=1` is set."""

from __future__ import annotations

import secrets

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Skips where the kernels cannot run."""
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def seed() -> int:
    """A fresh seed for each test, printed when it fails."""
    value = secrets.randbits(31)
    print(f"seed {value}")
    torch.manual_seed(value)
    return value
