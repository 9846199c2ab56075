"""The same GPU as a device that is given work and asked for results later: see `device/base.py`.

All work goes to one stream, so that it is done in the order in which it was given. Not for: what
the GPU is and why it may be refused (`cuda.py`). Next file: `worker/staged.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from octavo.device.base import Event
from octavo.device.cuda import CudaDevice
from octavo.device.cuda_ahead import Compilers, compile_ahead, name_versions
from octavo.device.wake import has_kernels, kernels_folder

DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # where a GPU may be: no fork is in vain


class _Memory:
    """Memory of the GPU that its owner may give to others (the CUDA array interface)."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.view(torch.uint8).__cuda_array_interface__


def _alias(tensor: Tensor) -> Tensor:
    """The same contiguous memory without a claim to it: later graphs may use it as well."""
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return memory.view(tensor.dtype).view(tensor.shape)


class CudaQueue(CudaDevice):
    """GPU `index`; compiled kernels are kept below `cache_dir`.

    Where that holds none yet, processes are forked to compile them.
    """

    asynchronous = True
    own_memory = True
    depth = 2
    lookahead = 1
    block_size = 64

    def __init__(self, index: int = 0, *, cache_dir: str | None = None) -> None:
        self._compilers: Compilers | None = None
        if cache_dir is not None:
            triton.knobs.cache.dir = str(kernels_folder(cache_dir))
            if not has_kernels(cache_dir) and any(driver.exists() for driver in DRIVERS):
                self._compilers = Compilers()
        self._versions = threading.Thread(target=name_versions, name="versions", daemon=True)
        self._versions.start()
        super().__init__(index)
        self._pool: Any = None  # of captured graphs' memory

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed memory of the GPU."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def staging(self, count: int) -> Tensor:
        """Locked memory: copies from and to it need no wait."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Asks for a copy in the stream's order."""
        target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor) -> Tensor:
        """Locked memory that the source is copied to in the stream's order."""
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        target.copy_(source, non_blocking=True)
        return target

    def mark(self, again: Event | None = None) -> torch.cuda.Event:
        """An event of the stream; a new one takes the host three times as long."""
        event = again if isinstance(again, torch.cuda.Event) else self.event()
        event.record()
        return event

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """A CUDA graph. All graphs share one pool of memory, for only one runs at a time."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return graph.replay, _alias(result)

    def rehearse(self, work: Callable[[], None]) -> None:
        """Compiles the kernels of `work` side by side."""
        self._versions.join()
        problem = compile_ahead(work, self.index, self._compilers)
        if self._compilers is not None:
            self._compilers.close()
            self._compilers = None
        if problem:
            self.notes += (f"kernels: not all compiled ahead: {problem}",)
        self.synchronize()

    def peak_of(self, work: Callable[[], None]) -> int:
        """By torch's allocator at its highest, with what libraries took meanwhile."""
        _, peak = self.measure(work)
        return peak.torch_bytes + peak.other_bytes

    def trim(self) -> None:
        """Gives back what torch keeps for later."""
        self.release_unused()
