"""A GPU's context is made early where there is one; elsewhere nothing happens."""

from __future__ import annotations

import subprocess
import sys

import pytest

from octavo.device import wake

CODE = """
import sys
from octavo.executor.local import wake_device
wake_device(sys.argv[1], None)
assert "torch" not in sys.modules, "torch takes longer than all that is gained"
"""


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", "cuda:x"])
def test_it_needs_neither_torch_nor_a_gpu(device: str) -> None:
    subprocess.run([sys.executable, "-c", CODE, device], check=True, timeout=60)


def test_without_a_driver_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wake, "DRIVER", "libcuda-that-is-not-there.so")
    assert not wake.wake(0)
