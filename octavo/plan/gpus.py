"""What planning knows of GPUs: memory, bandwidth and rates, from the makers' data sheets.

Memory is what the driver reports as total, not what the name says. Rates are dense. Not for: the
GPU of this machine, which is asked itself (`machine.py`). Next file: `machine.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from octavo.errors import ConfigError

THIS = "this machine"
GIB = 2**30
TERA = 10**12


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Bytes, bytes a second, floating point operations a second."""

    name: str
    memory: int
    bandwidth: float
    flops: float  # of bfloat16
    flops_8: float  # of 8-bit floats; 0: it has none
    capability: tuple[int, int]
    link: float  # to the others of its host, one direction
    product: str  # label that the device plugin gives its node


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu(
                *("H100-80", int(79.1 * GIB), 3.35 * TERA, 989 * TERA, 1979 * TERA, (9, 0)),
                *(450e9, "NVIDIA-H100-80GB-HBM3"),
            ),
            Gpu(
                *("H200", int(139.8 * GIB), 4.8 * TERA, 989 * TERA, 1979 * TERA, (9, 0)),
                *(450e9, "NVIDIA-H200"),
            ),
            Gpu(
                *("A100-80", int(79.2 * GIB), 2.04 * TERA, 312 * TERA, 0.0, (8, 0)),
                *(300e9, "NVIDIA-A100-SXM4-80GB"),
            ),
            Gpu(
                *("A100-40", int(39.4 * GIB), 1.56 * TERA, 312 * TERA, 0.0, (8, 0)),
                *(300e9, "NVIDIA-A100-SXM4-40GB"),
            ),
            Gpu(
                *("L40S", int(44.4 * GIB), 0.864 * TERA, 362 * TERA, 733 * TERA, (8, 9)),
                *(32e9, "NVIDIA-L40S"),
            ),
            Gpu(
                *("L4", int(22.0 * GIB), 0.3 * TERA, 121 * TERA, 242 * TERA, (8, 9)),
                *(32e9, "NVIDIA-L4"),
            ),
            Gpu(
                *("B200", int(178.4 * GIB), 8.0 * TERA, 2250 * TERA, 4500 * TERA, (10, 0)),
                *(900e9, "NVIDIA-B200"),
            ),
        )
    }
)
SHORT: Mapping[str, str] = MappingProxyType({"H100": "H100-80", "A100": "A100-80"})


def gpu_named(name: str) -> Gpu:
    """The data of that GPU. Raises ConfigError with the nearest known name."""
    upper = name.upper()
    found = GPUS.get(SHORT.get(upper, upper))
    if found is not None:
        return found
    near = difflib.get_close_matches(upper, GPUS, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"--gpu {name!r}: is not known; {hint}known are {', '.join(GPUS)} and this (the machine "
        "that the command runs on).",
        "gpu",
    )
