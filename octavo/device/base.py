"""The seam for a device: its memory, its number format, copies to and from it, when it is done.

A device that works while the host goes on (`asynchronous`) does what it is given in order: a copy
from `staging` memory is only asked for when the call returns, and an event tells when that memory
may be used again. Not for: kernels (`kernels/`) or attention (`attention/`), which are chosen by
the device's name. Next file: `cpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in the order of a device's work."""

    def query(self) -> bool:
        """True once all work before it is done."""

    def synchronize(self) -> None:
        """Waits for that. Raises what the device failed with."""


class Device(Protocol):
    """One device of this machine, held by one worker."""

    name: str  # as torch names it, such as "cpu" or "cuda:0"
    threads: int  # that compute on the host
    notes: tuple[str, ...]  # choices made for this device and their reasons, one line each
    asynchronous: bool  # the host goes on while the device works
    own_memory: bool  # not shared with other programs' data: the cache takes all that is allowed
    depth: int  # steps in flight that keep it busy
    lookahead: int  # unknown tokens that a sequence may run ahead
    block_size: int  # tokens a page of the KV cache, if none is asked for

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

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed memory for pages; on the CPU not resident before it is used."""

    def staging(self, count: int) -> Tensor:
        """i32[count] of host memory that `copy` can read and write while the host goes on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies in the order of the device's work; one side is `staging` memory or a `fetch`."""

    def fetch(self, source: Tensor) -> Tensor:
        """Host memory that holds `source` once an event marked after this call has passed."""

    def mark(self, again: Event | None = None) -> Event:
        """An event after all work given to the device so far.

        `again` is one that nobody waits for any more: it may be the one that is returned.
        """

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """A call that does `work` again, and the tensor that holds its result after each call.

        It holds it until the next such call, of this or of another record: they share memory.
        `work` has been done once before. On a GPU this is a captured graph: nothing in `work` may
        wait for the device, and all that it reads must stay where it is.
        """

    def rehearse(self, work: Callable[[], None]) -> None:
        """Makes ready what `work` needs, such as compiled kernels; its results are garbage."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Does `work`; bytes of the device that it took for a while beyond those held before."""

    def trim(self) -> None:
        """Gives back memory that is held but not used, as after a step that ran out of it."""
