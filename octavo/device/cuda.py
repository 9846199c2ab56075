"""One NVIDIA GPU as a device: memory as measured, streams, events, pinned copies.

Says in plain words why a GPU cannot be used: none there, a driver older than torch wants, a chip
too old, a slice of a shared one. Not for: kernels (`kernels/gpu.py`) or captured graphs
(`worker/graphs.py`). Next file: `octavo/kernels/gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.errors import ConfigError

MIN_CAPABILITY = (8, 0)
GIB = 2**30
_OPTION = "device"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Peak:
    """What a measured piece of work took, in bytes."""

    torch_bytes: int  # by torch's allocator above what it held before, at the highest
    other_bytes: int  # by everything else (libraries, graphs) since then


class CudaDevice:
    """GPU number `index` of those that this process may see.

    Raises ConfigError if it cannot be used.
    """

    def __init__(self, index: int = 0, *, threads: int = 1) -> None:
        refusal = refuse(index)
        if refusal:
            raise ConfigError(refusal, _OPTION)
        found = torch.cuda.get_device_properties(index)
        self.index = index
        self.name = f"cuda:{index}"
        self.threads = threads
        self.capability = (found.major, found.minor)
        self.processors = found.multi_processor_count
        self.model = found.name
        self.torch_device = torch.device("cuda", index)
        memory = found.total_memory / GIB
        slice_note = ", a MIG slice of a larger GPU" if "MIG" in found.name else ""
        self.notes: tuple[str, ...] = (
            f"device: {found.name}, compute capability {found.major}.{found.minor}, "
            f"{found.multi_processor_count} processors, {memory:.1f} GiB{slice_note}",
        )

    def start(self) -> None:
        """Makes the GPU this process's own and products exact: no TF32 in f32 products.

        Reduced-precision sums in split products are off as well: they would round partial sums
        to bf16.
        """
        torch.cuda.set_device(self.index)
        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def compute_in_torch(self) -> None:
        """Nothing: the host computes little."""

    def total_memory(self) -> int:
        """Bytes of the GPU, or of the slice that this process may see."""
        return int(torch.cuda.mem_get_info(self.index)[1])

    def free_memory(self) -> int:
        """Bytes that this process could still take: free ones, and those its allocator keeps."""
        free = int(torch.cuda.mem_get_info(self.index)[0])
        kept = torch.cuda.memory_reserved(self.index) - torch.cuda.memory_allocated(self.index)
        return free + int(kept)

    def default_dtype(self) -> torch.dtype:
        """bf16: every GPU that is accepted multiplies it natively."""
        return torch.bfloat16

    def default_dtype_reason(self) -> str:
        """Why `default_dtype` is what it is."""
        return f"compute capability {self.capability[0]}.{self.capability[1]} has bfloat16"

    def synchronize(self) -> None:
        """Waits until all work given to the device is done."""
        torch.cuda.synchronize(self.index)

    def release_unused(self) -> None:
        """Gives memory that torch keeps for later back to the system."""
        torch.cuda.empty_cache()

    def measure(self, work: Callable[[], _T]) -> tuple[_T, Peak]:
        """Runs `work` and says what memory it took at its highest: measured, not guessed."""
        self.synchronize()
        self.release_unused()
        torch.cuda.reset_peak_memory_stats(self.index)
        free_before = int(torch.cuda.mem_get_info(self.index)[0])
        held_before = torch.cuda.memory_allocated(self.index)
        reserved_before = torch.cuda.memory_reserved(self.index)
        result = work()
        self.synchronize()
        peak = torch.cuda.max_memory_allocated(self.index) - held_before
        reserved = torch.cuda.memory_reserved(self.index) - reserved_before
        taken = free_before - int(torch.cuda.mem_get_info(self.index)[0])
        return result, Peak(int(peak), max(0, int(taken - reserved)))

    def stream(self) -> torch.cuda.Stream:
        """A new stream of work."""
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    @contextmanager
    def on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Work launched within goes to `stream`."""
        with torch.cuda.stream(stream):
            yield

    def event(self, *, timed: bool = False) -> torch.cuda.Event:
        """A new mark; `timed` ones cost more."""
        return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


class PinnedColumn:
    """An array of the host and its twin on the device, at addresses that never change.

    The host's memory is locked, so that a copy needs no wait; it must not be written again before
    the copy is done. Use as many as steps are in flight.
    """

    __slots__ = ("array", "device", "host")

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.host = torch.zeros(size, dtype=dtype, pin_memory=True)
        self.device = torch.zeros(size, dtype=dtype, device=device)
        self.array: NDArray[np.generic] = self.host.numpy()

    def send(self, count: int) -> Tensor:
        """Copies the first `count` elements to the device, in the current stream's order."""
        view = self.device[:count]
        view.copy_(self.host[:count], non_blocking=True)
        return view


@dataclass(frozen=True, slots=True)
class Links:
    """A GPU, and how it reaches others."""

    name: str
    nccl: str  # version
    peers: tuple[int, ...]  # GPUs whose memory it can read directly


def links_of(index: int) -> Links:
    """Of GPU `index` among those that this process sees."""
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return Links(
        torch.cuda.get_device_name(index),
        ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        tuple(one for one in others if torch.cuda.can_device_access_peer(index, one)),
    )


def refuse(index: int) -> str:
    """Why GPU `index` cannot be used, with the remedy; empty if it can."""
    if torch.version.cuda is None:
        return (
            f"the installed torch {torch.__version__} is built without CUDA; "
            "install a CUDA build of torch, or use --device cpu"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return explain(str(error))
    count = torch.cuda.device_count()
    if index >= count:
        return f"GPU {index} was asked for, but {count} can be seen; CUDA_VISIBLE_DEVICES chooses"
    found = torch.cuda.get_device_properties(index)
    if (found.major, found.minor) < MIN_CAPABILITY:
        return (
            f"{found.name} has compute capability {found.major}.{found.minor}; "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or later is needed (A100, RTX 30 or newer)"
        )
    return ""


def explain(error: str) -> str:
    """Torch's words for a failed start, with the remedy."""
    if "driver" in error and "too old" in error:
        return (
            f"the NVIDIA driver is too old for torch {torch.__version__} "
            f"(CUDA {torch.version.cuda}); update the driver, or install a torch for an older CUDA"
        )
    if "no NVIDIA driver" in error.lower() or "Found no NVIDIA driver" in error:
        return "no NVIDIA driver was found; install one, or use --device cpu"
    if "No CUDA GPUs" in error:
        return (
            "no GPU can be seen; check nvidia-smi and CUDA_VISIBLE_DEVICES (of a GPU in MIG mode "
            "only slices can be seen), or use --device cpu"
        )
    return f"CUDA could not be started: {error}"
