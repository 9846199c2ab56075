"""The program of the engine-core process: builds worker, scheduler and core, then serves.

Started by `supervisor.py` as `python -m octavo.core`; its settings come over standard input so that
none of them stands on a command line. Torch is imported in here and never in the API process, if
told so before settings come: while the server opens the model's files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from octavo.config import SchedulerConfig, WorkerConfig
from octavo.engine.channel import Addresses
from octavo.engine.core import EngineCore
from octavo.engine.process import Report, run
from octavo.engine.scheduler import Scheduler
from octavo.engine.trace import Tracer
from octavo.errors import OctavoError
from octavo.executor.base import Executor
from octavo.types import WorkerInfo

GET_READY = b" "  # before the settings, where the model will run in this process


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """All that a core's process is told. Sizes in `scheduler` that the worker finds are zero."""

    addresses: tuple[Addresses, ...]  # of its clients; the first is the server's own
    parent: int  # process id of the server
    worker: WorkerConfig
    scheduler: SchedulerConfig


def build_core(
    worker: WorkerConfig,
    scheduler: SchedulerConfig,
    report: Report,
    folder: Path | None = None,
) -> tuple[EngineCore, WorkerInfo]:
    """Starts the workers, one of them in this process, and puts scheduler and core before them.

    `folder` is private to this user, for sockets; one is made if it is left out and needed.
    """
    executor = _executor(worker, report, folder)
    info = executor.start()
    # What does not fit has been refused by the worker; see `worker/memory.py`.
    sized = replace(
        scheduler,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        depth=info.depth,
        lookahead=info.lookahead,
    )
    tracer = Tracer() if scheduler.trace else None
    return EngineCore(Scheduler(sized, tracer), executor), info


def _import_worker() -> None:
    """What is wrong with it is told when it is imported again."""
    with contextlib.suppress(Exception):
        from octavo.executor.local import import_worker

        import_worker()


def _wake(worker: WorkerConfig) -> None:
    from octavo.executor.local import wake_device

    wake_device(worker.device, worker.cache_dir)


def _executor(worker: WorkerConfig, report: Report, folder: Path | None) -> Executor:
    """As `worker.parallel` says."""
    if worker.parallel.backend == "uni":
        from octavo.executor.local import LocalExecutor

        return LocalExecutor(worker, report=report)
    check_division(worker)
    from octavo.executor.remote import RemoteExecutor

    if worker.parallel.backend == "ray":
        from octavo.executor.ray import RayCrew

        actors = RayCrew(worker.parallel, worker.device, worker.threads)
        return RemoteExecutor(worker, actors, report=report)
    from octavo.executor.spawn import LocalCrew

    crew = LocalCrew(worker.parallel, folder)
    return RemoteExecutor(worker, crew, report=report, parent=os.getpid())


def check_division(worker: WorkerConfig) -> None:
    """Refuses a model that cannot be spread so, before processes are started for it.

    Raises ConfigError or CheckpointError.
    """
    from octavo.checkpoint.checkpoint import open_checkpoint
    from octavo.models.divide import check_sizes
    from octavo.models.registry import read_spec

    checkpoint = open_checkpoint(worker.model, load_format=worker.load_format)
    spec = read_spec({**checkpoint.config, **dict(worker.hf_overrides)})
    check_sizes(spec, worker.parallel.tensor, worker.parallel.pipeline)


def main() -> int:
    """Reads the settings, serves until told to stop, and gives the exit code."""
    # Ctrl-C and service managers signal every process of a group; the API process drains first
    # and then says stop. Should it die instead, the heartbeat notices and ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    first = sys.stdin.buffer.read(1)
    if first == GET_READY:
        threading.Thread(target=_import_worker, name="import", daemon=True).start()
    told = first + sys.stdin.buffer.read()
    if not told.strip():
        return 1  # the server could not open the model, and has said so
    settings = msgspec.json.decode(told, type=CoreSettings)
    if first == GET_READY:
        threading.Thread(target=_wake, args=(settings.worker,), name="wake", daemon=True).start()
    try:
        return run(
            settings.addresses,
            settings.parent,
            lambda report: build_core(
                settings.worker, settings.scheduler, report, settings.addresses[0].folder
            ),
        )
    except OctavoError:
        return 1  # the client has been told, and tells the operator


if __name__ == "__main__":
    sys.exit(main())
