"""The CPU as a device: threads, memory that is really there, and whether bf16 is native.

Not for: choosing kernels. Next file: `worker/worker.py`.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from octavo.device.base import Event
from octavo.device.limits import cpu_flags, read_cores, read_memory
from octavo.errors import ConfigError

_NATIVE_BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # the last one is Arm's


class Passed:
    """An Event of a device that is done when a call returns."""

    __slots__ = ()

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class CpuDevice:
    """All cores that this process may use, as one device.

    `threads` None takes one thread a usable physical core: more threads than that wait for each
    other at every barrier. With `sharers` that is divided by so many processes of the same kind,
    and so is the memory.
    """

    name = "cpu"
    asynchronous = False
    own_memory = False
    depth = 1
    lookahead = 0
    block_size = 16

    def __init__(
        self, threads: int | None = None, root: Path = Path("/"), *, sharers: int = 1
    ) -> None:
        if threads is not None and threads < 1:
            raise ConfigError(f"threads is {threads}: at least 1 is needed", option="threads")
        self._root = root
        self._sharers = sharers
        cores = read_cores(root)
        self.threads = max(1, cores.usable // sharers) if threads is None else threads
        self._flags = cpu_flags(root)
        quota = "" if cores.quota is None else f", quota {cores.quota:g}"
        found = f"{cores.physical} physical of {cores.logical} logical cores{quota}"
        chosen = "one a usable core" if threads is None else "as set"
        chosen += f", shared by {sharers} workers" if sharers > 1 and threads is None else ""
        self.notes: tuple[str, ...] = (f"threads: {self.threads}, {chosen} ({found})",)

    def start(self) -> None:
        """Leaves torch one thread.

        Loading is many small operations. On a machine with other work, torch's threads then wait
        for each other far longer than they compute: a start of 3 s took 43 s. The same holds for
        steps whose heavy work is native: two sets of threads on the same cores cost 20 ms a step.
        """
        torch.set_num_threads(1)

    def compute_in_torch(self) -> None:
        """Gives torch all threads."""
        torch.set_num_threads(self.threads)

    def total_memory(self) -> int:
        """Main memory, or the control group's limit if lower."""
        return read_memory(self._root).total

    def free_memory(self) -> int:
        """Memory available without swapping, within the control group's limit."""
        return read_memory(self._root).free // self._sharers

    def default_dtype(self) -> torch.dtype:
        """bf16 if the core multiplies it natively, else f32, which is then faster."""
        return torch.bfloat16 if self._bf16() else torch.float32

    def default_dtype_reason(self) -> str:
        """Names the instruction set that decided."""
        native = self._bf16()
        if native:
            return f"the CPU has {native}"
        return "the CPU has none of " + ", ".join(_NATIVE_BF16)

    def synchronize(self) -> None:
        """Nothing: work on the CPU is done when the call returns."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Pages mapped from the system, which gives zero pages on first use.

        The allocator's own memory may hold old bytes, and a NaN among them would spread through
        masked attention (0 * NaN is NaN).
        """
        count = prod(shape)
        if not count:  # there is no mapping of no bytes
            return torch.empty(shape, dtype=dtype)
        memory = mmap.mmap(-1, count * dtype.itemsize)  # unmapped when the tensor is gone
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def staging(self, count: int) -> Tensor:
        """Plain memory."""
        return torch.zeros(count, dtype=torch.int32)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copied when the call returns."""
        target.copy_(source)

    def fetch(self, source: Tensor) -> Tensor:
        """A copy, as the source may change."""
        return source.clone()

    def mark(self, again: Event | None = None) -> Passed:
        """An event that has passed."""
        return Passed()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Does `work` each time: there is nothing to be gained by a graph."""
        result = work()

        def replay() -> None:
            result.copy_(work())

        return replay, result

    def rehearse(self, work: Callable[[], None]) -> None:
        """Nothing: kernels are compiled when they are loaded."""

    def peak_of(self, work: Callable[[], None]) -> int:
        """Not measured: the cache takes a share of memory that leaves room enough."""
        work()
        return 0

    def trim(self) -> None:
        """Nothing: memory goes back to the allocator when it is freed."""

    def _bf16(self) -> str:
        return next((flag for flag in _NATIVE_BF16 if flag in self._flags), "")
