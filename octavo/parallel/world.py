"""How the ranks of one model find each other: process groups made by hand, none of them global.

They meet at a store: a file in a folder that only this user may enter, or on several machines a
port of rank 0 on the one interface that was chosen. Gloo joins CPUs, NCCL joins GPUs; a second
group of all ranks, always gloo, is for agreeing on numbers while the model is loaded.
Not for: starting processes (`executor/`). Next file: `mesh.py`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import (
    Backend,
    FileStore,
    PrefixStore,
    ProcessGroup,
    Store,
    TCPStore,
)

from octavo.config import Place
from octavo.parallel.mesh import Axis, Calls, Mesh

JOIN_SECONDS = 300.0  # for all ranks to come: some of them read weights first
COLLECTIVE_SECONDS = 3600.0  # a rank that waits so long was left behind; the executor ends it first


@dataclass(frozen=True, slots=True)
class World:
    """This rank among all: its mesh, and those that share its machine."""

    mesh: Mesh = field(default_factory=Mesh.single)
    local_size: int = 1  # ranks on this machine, which share its cores and main memory
    calls: Calls = field(default_factory=Calls)
    everybody: ProcessGroup | None = None

    def least(self, value: int) -> int:
        """The smallest of all ranks' values; all ranks must ask."""
        if self.everybody is None:
            return value
        found = torch.tensor([value], dtype=torch.int64)
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.MIN  # type: ignore[assignment]
        with self.calls.entered("agree"):
            self.everybody.allreduce([found], options).wait()
        return int(found)


def join(place: Place, device: str) -> World:
    """Meets the other ranks; returns when all are there. `device` is as torch names it.

    Raises RuntimeError if they do not come within `JOIN_SECONDS`.
    """
    if place.size == 1:
        return World()
    calls = Calls()
    store = open_store(place)
    stage, lane = divmod(place.rank, place.tensor)
    make = _Groups(store, place, device)
    tp = Axis(lane, place.tensor, make.group(f"tp{stage}", lane, place.tensor), calls)
    pp = Axis(stage, place.pipeline, make.group(f"pp{lane}", stage, place.pipeline), calls)
    everybody = make.gloo("all", place.rank, place.size)
    return World(Mesh(tp, pp), place.local_size, calls, everybody)


def open_store(place: Place) -> Store:
    """The store that `place` names, "file:PATH" or "tcp:HOST:PORT"."""
    kind, _, where = place.store.partition(":")
    if kind == "file":
        return FileStore(where, place.size)
    host, _, port = where.rpartition(":")
    patience = timedelta(seconds=JOIN_SECONDS)
    if place.rank:
        return TCPStore(host, int(port), None, False, patience, wait_for_workers=False)
    # Given a socket, the store listens at its address alone; by itself it would take all of them.
    listening = socket.create_server((host, int(port)), backlog=place.size)
    return TCPStore(
        host,
        int(port),
        None,
        True,
        patience,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


class _Groups:
    """Makes process groups; every rank of a group must make it."""

    def __init__(self, store: Store, place: Place, device: str) -> None:
        self._store = store
        self._host = place.host
        self._device = torch.device(device)

    def group(self, name: str, rank: int, size: int) -> ProcessGroup | None:
        """The group of one axis on the device; None for a rank alone."""
        if size == 1:
            return None
        if self._device.type == "cpu":
            return self.gloo(name, rank, size)
        return self._nccl(name, rank, size)

    def gloo(self, name: str, rank: int, size: int) -> ProcessGroup:
        """A group of CPUs, which listens on this rank's own interface alone."""
        store = PrefixStore(name, self._store)
        options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        options._threads = 1
        backend = distributed.ProcessGroupGloo(store, rank, size, options)
        return _wrap(store, rank, size, torch.device("cpu"), backend)

    def _nccl(self, name: str, rank: int, size: int) -> ProcessGroup:
        store = PrefixStore(name, self._store)
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=COLLECTIVE_SECONDS)
        backend = distributed.ProcessGroupNCCL(store, rank, size, options)
        return _wrap(store, rank, size, self._device, backend)


def _wrap(
    store: Store, rank: int, size: int, device: torch.device, backend: Backend
) -> ProcessGroup:
    group = ProcessGroup(store, rank, size)
    nccl = device.type != "cpu"
    kind = ProcessGroup.BackendType.NCCL if nccl else ProcessGroup.BackendType.GLOO
    group._register_backend(device, kind, backend)
    return group
