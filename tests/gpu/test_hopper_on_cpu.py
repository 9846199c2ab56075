"""The kernels for Hopper on a CPU: their arithmetic of places, turns and tiles."""

from __future__ import annotations

import secrets
import subprocess
import sys

import pytest


@pytest.mark.parametrize("kernel", ["grouped", "skinny"])
def test_places_and_turns(kernel: str) -> None:
    """In a process of its own, as another triton stands in the place of the real one there."""
    seed = secrets.randbits(31)
    found = subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{kernel}_on_cpu", str(seed)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert found.returncode == 0, f"seed {seed}\n{found.stdout[-600:]}\n{found.stderr[-1500:]}"
