"""What all launches share: programmatic dependent launch, and sizes.

Programmatic dependent launch (PDL, CUDA programming guide, compute capability 9.0) lets a kernel
start while the one before it still runs. Every kernel of this folder that takes part says
`gdc_launch_dependents` first and `gdc_wait` before it reads or writes anything that another kernel
touches, whether it needs the data or not: the wait of one kernel vouches for all before it.
Not for: kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


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
