"""What all launches share: programmatic dependent launch, and sizes.

Programmatic dependent launch (PDL, CUDA programming guide, compute capability 9.0) lets a kernel
start while the one before it still runs. Every kernel of this folder that takes part says
`gdc_launch_dependents` first and `gdc_wait` before it reads or writes anything that another kernel
touches, whether it needs the data or not: the wait of one kernel vouches for all before it.
Also launches that spare the host the JIT's look at every argument. Not for: kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gpu:
    """What launches must know of a device."""

    pdl: bool  # programmatic dependent launch can be used
    processors: int  # streaming multiprocessors
    hopper: bool = False  # compute capability 9: its tensor cores read shared memory as wgmma does


@lru_cache(maxsize=16)
def gpu_of(device: torch.device) -> Gpu:
    """The device's limits. A tensor on the CPU means Triton's interpreter."""
    if device.type != "cuda":
        return Gpu(pdl=False, processors=4)
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.major >= 9, found.multi_processor_count, hopper=found.major == 9)


def pdl(device: torch.device) -> dict[str, bool]:
    """Launch arguments: the kernel's own PDL constant and the launcher's attribute."""
    return {"PDL": True, "launch_pdl": True} if gpu_of(device).pdl else {"PDL": False}


def power_of_2(value: int) -> int:
    """The least power of 2 that is not less than `value`."""
    return 1 << max(0, value - 1).bit_length()


def divide_up(value: int, size: int) -> int:
    """value / size, rounded up."""
    return -(-value // size)


class Repeated:
    """Launches of one kernel of which nothing changes but programs and some integers.

    The JIT looks at every argument of every launch, which for twenty of them takes the host longer
    than the kernel takes the GPU. Here the first launch goes through it, and the later ones give
    the compiled kernel addresses and integers as they are.
    """

    __slots__ = ("_constants", "_direct", "_kernel", "_tensors")

    def __init__(self, kernel: Any, tensors: tuple[Tensor, ...], *constants: int) -> None:
        """The kernel takes `tensors`, which stay where they are, then integers that it does not
        specialize, then `constants`.
        """
        self._kernel = kernel
        self._tensors = tensors
        self._constants = constants
        self._direct: Callable[..., None] | None = None

    def __call__(self, programs: int, *numbers: int) -> None:
        """Launches so many programs with these integers."""
        if self._direct is not None:
            self._direct(programs, numbers)
            return
        compiled = self._kernel[(programs,)](*self._tensors, *numbers, *self._constants)
        # None: the interpreter's, or one that is only being compiled.
        if compiled is not None and self._tensors[0].is_cuda:
            self._direct = self._made(compiled)

    def _made(self, compiled: Any) -> Callable[..., None]:
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        addresses = tuple(tensor.data_ptr() for tensor in self._tensors)
        constants, device = self._constants, self._tensors[0].device

        def launch(programs: int, numbers: tuple[int, ...]) -> None:
            stream = torch.cuda.current_stream(device).cuda_stream
            more = (*addresses, *numbers, *constants)
            run(programs, 1, 1, stream, function, metadata, None, None, None, *more)

        return launch
