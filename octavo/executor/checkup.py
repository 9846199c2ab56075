"""What `octavo doctor` asks of each worker: facts, then a timed all-reduce. No model is loaded.

Runs where the worker would run, started in the same way, and joins the same groups. Not for:
judging what is found (`cli/doctor_ranks.py`). Next file: `parallel/world.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import time

import torch
import zmq
from torch import distributed

from octavo.executor.channel import Context, connect, encode
from octavo.executor.records import Answer, Broken, FromRank, RankSettings
from octavo.parallel.collectives import all_reduce
from octavo.parallel.mesh import Axis
from octavo.parallel.world import World, join

FACTS, TIMES = 0, 1  # numbers of the two answers
SIZES = (16 * 1024, 16 * 1024 * 1024)  # bytes of an all-reduce
ROUNDS = 20
GIB = 2**30


def examine(settings: RankSettings) -> int:
    """Sends two answers, of facts and of times; 1 if the ranks cannot join."""
    context: Context = zmq.Context()
    results = connect(context, zmq.PUSH, settings.results, settings)
    results.linger = 1000
    rank = settings.place.rank

    def send(message: FromRank) -> None:
        results.send(encode(message))

    device = device_of(settings)
    send(Answer(rank, FACTS, facts(settings, device)))
    try:
        world = join(settings.place, device)
        send(Answer(rank, TIMES, times(world, device)))
    except Exception as error:
        send(Broken(rank, f"{type(error).__name__}: {error}", type(error).__name__))
        return 1
    return 0


def device_of(settings: RankSettings) -> str:
    """The rank's device, as torch names it."""
    kind, _, index = settings.worker.device.partition(":")
    if kind == "cpu":
        return kind
    return f"{kind}:{int(index or 0) + settings.place.local_rank}"


def facts(settings: RankSettings, device: str) -> dict[str, str]:
    """What stands fixed where this rank runs; "clock" is its time in seconds since 1970."""
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    found = {
        "host": socket.gethostname(),
        "address": settings.place.host,
        "python": platform.python_version(),
        "octavo": importlib.metadata.version("octavo"),
        "torch": str(torch.__version__),
        "device": device,
        "shared memory": f"{shared.free / GIB:.1f} GiB free" if shared else "MISSING: /dev/shm",
        "clock": repr(time.time()),
    }
    if device.startswith("cuda"):
        found |= gpu_facts(device)
    return found


def gpu_facts(device: str) -> dict[str, str]:
    """Of a GPU: its name, NCCL, and which of the other GPUs seen here it can read directly."""
    from octavo.device.cuda import links_of

    found = links_of(torch.device(device).index or 0)
    peers = ", ".join(map(str, found.peers)) or "to no other GPU that this process sees"
    return {"gpu": found.name, "nccl": found.nccl, "peer access": peers}


def times(world: World, device: str) -> dict[str, str]:
    """Microseconds of an all-reduce over each axis, by its size in bytes."""
    found: dict[str, str] = {}
    for name, axis in (("tensor", world.mesh.tp), ("stages", world.mesh.pp)):
        if axis.size > 1:
            for size in SIZES:
                micros = 1e6 * _seconds(axis, size, device)
                found[f"all-reduce {name} {size // 1024} KiB"] = f"{micros:.0f} us"
    return found


def _seconds(axis: Axis, size: int, device: str) -> float:
    x = torch.ones(size // 4, device=device)
    all_reduce(x, axis)
    x.fill_(1.0)
    float(x[0])  # waits for the device
    began = time.perf_counter()
    for _ in range(ROUNDS):
        all_reduce(x, axis)
    last = float(x[0])
    seconds = (time.perf_counter() - began) / ROUNDS
    expected = float(axis.size) ** ROUNDS
    if abs(last / expected - 1.0) > 1e-3:
        raise distributed.DistBackendError(f"the all-reduce gave {last}, not {expected}")
    return seconds
