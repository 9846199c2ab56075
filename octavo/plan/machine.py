"""The devices that a plan is made for: a GPU by its data, or what this machine has.

Not for: using a device. Next file: `model.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.config import WorkerConfig
from octavo.device.base import Device
from octavo.device.limits import read_memory
from octavo.plan.gpus import GPUS, TERA, THIS, Gpu
from octavo.worker.assemble import open_device
from octavo.worker.memory import Room

# What a process takes of a GPU before it has loaded anything: context, libraries, their handles.
CONTEXT_BYTES = 600 * 2**20
COMM_BYTES = 400 * 2**20  # NCCL's buffers, where there are several ranks
CPU_BANDWIDTH = 20e9
CPU_FLOPS = 0.3 * TERA


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of device, `gpu`, and its room; `device` is the real one, if it is here."""

    gpu: Gpu
    room: Room
    context: int
    device: Device | None = None


def planned(gpu: Gpu, ranks: int) -> Machine:
    """A GPU that need not be here, given to this program alone."""
    context = CONTEXT_BYTES + (COMM_BYTES if ranks > 1 else 0)
    free = gpu.memory - context
    return Machine(gpu, Room(gpu.memory, free, free, own=True), context)


def this_machine(config: WorkerConfig) -> Machine:
    """The device that an engine with this config would take here. Raises ConfigError."""
    device = open_device(config)
    if not device.own_memory:
        memory = read_memory()
        gpu = Gpu(THIS, memory.total, CPU_BANDWIDTH, CPU_FLOPS, 0.0, (0, 0), CPU_BANDWIDTH, "")
        room = Room(device.total_memory(), device.free_memory(), device.free_memory(), own=False)
        return Machine(gpu, room, 0, device)
    device.start()
    free = device.free_memory()
    total = device.total_memory()
    nearest = min(GPUS.values(), key=lambda gpu: abs(gpu.memory - total))
    gpu = replace(nearest, name=f"{THIS} (rates of {nearest.name})", memory=total)
    return Machine(gpu, Room(total, free, free, own=True), total - free, device)
