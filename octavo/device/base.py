"""The seam for a device: how much memory it has, in which number format it works, when it is done.

Not for: kernels (`kernels/`) or attention (`attention/`), which are chosen by the device's name.
Next file: `cpu.py`.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Device(Protocol):
    """One device of this machine, held by one worker."""

    name: str  # as torch names it, such as "cpu" or "cuda:0"
    threads: int  # that compute on the host
    notes: tuple[str, ...]  # choices made for this device and their reasons, one line each

    def start(self) -> None:
        """Sets what is set once a process."""

    def compute_in_torch(self) -> None:
        """Gives torch's own kernels all threads; for models that are not computed natively."""

    def total_memory(self) -> int:
        """Bytes that this process could use if it were alone."""

    def free_memory(self) -> int:
        """Bytes that this process could still take now."""

    def default_dtype(self) -> torch.dtype:
        """Number format of activations if the model's own is not asked for."""

    def default_dtype_reason(self) -> str:
        """Why `default_dtype` is what it is, for the notes at start."""

    def synchronize(self) -> None:
        """Waits until all work given to the device is done."""
